"""A throwaway Debian 12 machine: a tree made once by mmdebstrap, copied, booted by systemd-nspawn, and removed.

It has no network but loopback: what is installed in it comes from the tree or the local repository.
"""

import contextlib
import hashlib
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from packages import BuildFailed, apt_install, cache_dir, run, say

SUITE = "bookworm"
INCLUDED = (
    "adduser",
    "bash-completion",
    "ca-certificates",
    "dbus",
    "polkitd",
    "procps",
    "python3",
    "python3-psutil",
    "python3-pydbus",
    "python3-systemd",
    "python3-venv",
    "systemd",
    "systemd-sysv",
)
HOST_NEEDS = ("mmdebstrap", "systemd-container", "util-linux")
BOOT_SECONDS = 120
STOP_SECONDS = 60
REPOSITORY = "/srv/dflash-packages"


@dataclass(frozen=True, slots=True)
class Machine:
    """A booted Debian: this host, or a container. `root` is where its files are, seen from here."""

    root: Path
    enter: tuple[str, ...]

    def run(
        self, *command: str, check: bool = True, timeout: float = 600, text_input: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command as root in the machine. Raises CalledProcessError unless check is off."""
        return subprocess.run(
            [*self.enter, *command], capture_output=True, text=True, check=check, timeout=timeout, input=text_input
        )

    def start(self, *command: str) -> "subprocess.Popen[str]":
        """Starts a command in the machine, its output to be read line by line; Ctrl-C here does not reach it."""
        return subprocess.Popen(
            [*self.enter, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            bufsize=1,
            start_new_session=True,
        )

    def path(self, inside: str | Path) -> Path:
        """Where a file of the machine is, seen from here."""
        return self.root / str(inside).lstrip("/")


HOST = Machine(Path("/"), ())


def base_tree() -> Path:
    """The Debian tree, made once. Raises BuildFailed."""
    apt_install(*HOST_NEEDS)
    key = hashlib.sha256(" ".join((SUITE, *INCLUDED)).encode()).hexdigest()[:12]
    tree = cache_dir() / "trees" / f"{SUITE}-{key}.tar"
    if not tree.exists():
        say(f"making a Debian tree ({SUITE})")
        tree.parent.mkdir(parents=True, exist_ok=True)
        unfinished = tree.with_name(f".{tree.name}")
        include = f"--include={','.join(INCLUDED)}"
        lean = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "locale")]
        run(["mmdebstrap", "--variant=minbase", include, *lean, SUITE, str(unfinished)])
        unfinished.rename(tree)
    return tree


@contextlib.contextmanager
def booted(repository: Path, binds: Mapping[Path, Path]) -> Iterator[Machine]:
    """A container with `repository` as its only apt source, booted; stopped and removed afterwards.

    `binds`: directories of this host and where they are in the container, writable.
    """
    tree = base_tree()
    scratch = Path(tempfile.mkdtemp(prefix="dflash-node-", dir=cache_dir()))
    root = scratch / "root"
    root.mkdir()
    process = None
    try:
        run(["tar", "-C", str(root), "--numeric-owner", "-xf", str(tree)])
        (root / "etc/apt/sources.list").write_text(f"deb [trusted=yes] file:{REPOSITORY} ./\n")
        (root / "etc/machine-id").write_text("")
        (root / "etc/hostname").write_text("node\n")
        with (scratch / "console.log").open("w") as console:
            process = subprocess.Popen(
                [
                    *("systemd-nspawn", "--quiet", "-D", str(root), "--boot", "--register=no", "--keep-unit"),
                    *("--private-network", "--hostname=node", "--console=pipe", "--resolv-conf=off"),
                    f"--bind-ro={repository}:{REPOSITORY}",
                    *(f"--bind={outside}:{inside}" for outside, inside in binds.items()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        leader = _leader(process, scratch / "console.log")
        enter = ("nsenter", "-t", str(leader), "-a", "--", "env", "-i", "HOME=/root", "LANG=C.UTF-8")
        machine = Machine(root, (*enter, "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"))
        _wait_until_running(machine)
        yield machine
    finally:
        if process is not None:
            _stop(process)
        shutil.rmtree(scratch)


def _leader(process: "subprocess.Popen[bytes]", console: Path) -> int:
    """The container's process 1, among the children of nspawn."""
    end = time.monotonic() + BOOT_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            raise BuildFailed(f"systemd-nspawn ended: {' '.join(console.read_text().split())[-500:]}")
        for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{child}/status").read_text()
                comm = Path(f"/proc/{child}/comm").read_text().strip()
                ids = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()
                if ids[-1] == "1" and len(ids) > 2 and comm == "systemd":
                    return int(child)
        select.select([], [], [], 0.05)
    raise BuildFailed(f"the container has no process 1 after {BOOT_SECONDS} s")


def _wait_until_running(machine: Machine) -> None:
    """Waits for the boot to end. Raises BuildFailed with what failed in it."""
    end = time.monotonic() + BOOT_SECONDS
    state = ""
    while time.monotonic() < end:
        state = machine.run("systemctl", "is-system-running", "--wait", check=False, timeout=BOOT_SECONDS).stdout.strip()
        if state in ("running", "degraded"):
            break
        select.select([], [], [], 0.1)  # process 1 does not answer yet
    if state != "running":
        failed = machine.run("systemctl", "--failed", "--plain", "--no-legend", check=False).stdout
        raise BuildFailed(f"the container is {state or 'not up'} after booting: {' '.join(failed.split())}")


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """Powers the container off (SIGRTMIN+4 to its process 1, by nspawn on SIGTERM); kills it if that hangs."""
    if process.poll() is not None:
        return
    descriptor = os.pidfd_open(process.pid)
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGTERM)
        if not select.select([descriptor], [], [], STOP_SECONDS)[0]:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    finally:
        os.close(descriptor)
    process.wait()
