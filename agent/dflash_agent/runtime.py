"""The trainer's runtime: a venv that the node makes for itself from the locked wheels.

    /var/lib/dflash/runtime/<id>/     a venv; `complete` in it is written last
    /var/lib/dflash/runtime/current   link to the one that new starts use

A run keeps the runtime that it started with. A failed installation leaves the old one in use.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SHARE_DIR = Path("/usr/share/dflash")
RUNTIME_DIR = Path("/var/lib/dflash/runtime")
CURRENT = "current"
PREVIOUS = "previous"
COMPLETE = "complete"
PYTHON = "/usr/bin/python3"
FREE_BYTES = {"cpu": 3 << 30, "cuda": 12 << 30}  # of an unpacked runtime, with room to spare


class RuntimeFailed(Exception):
    """A runtime could not be installed or chosen; str() is one line."""


@dataclass(frozen=True, slots=True)
class Source:
    """What a runtime is made from."""

    wheel: Path  # the trainer itself
    lock: Path  # what it needs, with hashes
    wheelhouse: Path | None  # None: pip's configured index
    variant: str

    @property
    def id(self) -> str:
        """Changes with the lock and with the trainer's own code."""
        digest = hashlib.sha256(self.lock.read_bytes() + self.wheel.read_bytes()).hexdigest()
        version = self.wheel.name.split("-")[1]
        return f"{version}-{self.variant}-{digest[:12]}"


def source(share: Path = SHARE_DIR) -> Source:
    """What dflash-trainer and a wheelhouse package have put on this node. Raises RuntimeFailed."""
    variant = "cuda" if Path("/dev/nvidiactl").exists() else "cpu"
    locks = share / "trainer" / "lock"
    if not (locks / f"{variant}.txt").exists() and (locks / "cpu.txt").exists():
        variant = "cpu"
    wheels = sorted((share / "trainer").glob("dflash_trainer-*.whl"))
    lock = locks / f"{variant}.txt"
    if not wheels or not lock.exists():
        raise RuntimeFailed(f"{share / 'trainer'} holds no trainer; apt install dflash-trainer")
    wheelhouse = share / "wheelhouse" / variant
    return Source(wheels[-1], lock, wheelhouse if wheelhouse.is_dir() else None, variant)


def current(root: Path = RUNTIME_DIR) -> Path | None:
    """The directory that `current` points to, resolved; None if there is none that is complete."""
    directory = (root / CURRENT).resolve()
    return directory if (directory / COMPLETE).exists() else None


def complete_ones(root: Path = RUNTIME_DIR) -> list[Path]:
    """Every complete runtime, oldest first."""
    found = [path.parent for path in root.glob(f"*/{COMPLETE}") if not path.parent.is_symlink()]
    return sorted(found, key=lambda path: (path / COMPLETE).stat().st_mtime)


def install(origin: Source, root: Path = RUNTIME_DIR, say: Callable[[str], None] = print) -> Path:
    """Makes the runtime of `origin` current, installing it if need be. Raises RuntimeFailed.

    One installation at a time; the link moves only after the new one has been seen to import.
    """
    root.mkdir(parents=True, exist_ok=True)
    with _locked(root):
        directory = root / origin.id
        if not (directory / COMPLETE).exists():
            _make(origin, directory, say)
        if current(root) != directory.resolve():
            point(root, directory)
        say(f"runtime {directory.name} is in use for new starts")
        for old in prune(root):
            say(f"removed old runtime {old.name}")
    return directory


def _make(origin: Source, directory: Path, say: Callable[[str], None]) -> None:
    free = shutil.disk_usage(directory.parent).free
    if free < FREE_BYTES[origin.variant]:
        raise RuntimeFailed(
            f"{directory.parent} has {free >> 20} MiB free, a {origin.variant} runtime needs "
            f"{FREE_BYTES[origin.variant] >> 20} MiB; free space and run `dflashctl runtime install`"
        )
    if directory.exists():  # what an interrupted installation has left
        shutil.rmtree(directory)
    where = origin.wheelhouse or "the configured index"
    say(f"making runtime {directory.name} from {where}")
    try:
        _run([PYTHON, "-m", "venv", str(directory)], say)
        pip = [
            str(directory / "bin" / "python"),
            "-m",
            "pip",
            "--disable-pip-version-check",
            "install",
            "--no-deps",
        ]
        offline = ["--no-index", "--find-links", str(origin.wheelhouse)] if origin.wheelhouse else []
        _run([*pip, "--require-hashes", *offline, "-r", str(origin.lock)], say)
        _run([*pip, "--no-index", str(origin.wheel)], say)
        _run([str(directory / "bin" / "python"), "-m", "dflash_trainer", "--version"], say)
    except RuntimeFailed:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    (directory / COMPLETE).write_text(f"{origin.lock.name}\n")


_PROGRESS = re.compile(r"(?:Processing|Downloading) \S*?([^/\s]+)\.whl|(Installing collected packages)")


def _run(command: list[str], say: Callable[[str], None]) -> None:
    """Runs a step of an installation; its progress is said, its last lines are the error if it fails."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd="/"
    )
    last: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        match = _PROGRESS.search(line)
        if match:
            say(f"  {match[1] or 'installing, which takes about a minute'}")
        if line.strip() and not line.startswith(" "):
            last = [*last[-2:], line.strip()]
    if process.wait() != 0:
        raise RuntimeFailed(f"`{' '.join(command[:4])} …` failed: {'; '.join(last) or process.returncode}")


def rollback(wanted: str | None = None, root: Path = RUNTIME_DIR) -> Path:
    """Makes the previous runtime, or the one named, current again. Raises RuntimeFailed."""
    with _locked(root):
        there = {path.name: path for path in complete_ones(root)}
        now = current(root)
        if wanted is None:
            previous = (root / PREVIOUS).resolve()
            if not (previous / COMPLETE).exists() or previous == now:
                raise RuntimeFailed("no earlier runtime is left; `dflashctl runtime list` shows what there is")
            wanted = previous.name
        if wanted not in there:
            raise RuntimeFailed(f"no runtime {wanted}; there are: {', '.join(there) or 'none'}")
        point(root, there[wanted])
        return there[wanted]


def point(root: Path, directory: Path) -> None:
    """Moves `current` to `directory` in one step, and remembers the one before as `previous`."""
    now = current(root)
    if now is not None and now != directory.resolve():
        _link(root / PREVIOUS, now.name)
    _link(root / CURRENT, directory.name)


def _link(link: Path, to: str) -> None:
    fresh = link.with_name(f".{link.name}.new")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(to)
    fresh.replace(link)


def prune(root: Path) -> list[Path]:
    """Removes the runtimes that are neither current nor previous and that no process uses; returns them."""
    keep = {(root / CURRENT).resolve(), (root / PREVIOUS).resolve(), *in_use(root)}
    doomed = [path for path in complete_ones(root) if path.resolve() not in keep]
    for path in doomed:
        (path / COMPLETE).unlink()
        shutil.rmtree(path)
    return doomed


def in_use(root: Path) -> set[Path]:
    """The runtimes of running processes, by the files that they have mapped (proc(5))."""
    used = set()
    prefix = f"{root.resolve()}/"
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            mapped = (process / "maps").read_text(errors="replace")
        except OSError:
            continue  # it has ended, or is a kernel thread
        for match in re.finditer(re.escape(prefix) + r"([^/\n]+)/", mapped):
            used.add(root.resolve() / match[1])
    return used


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    with (root / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another installation to end", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
