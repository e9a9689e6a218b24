"""Builds the Debian packages and a local apt repository of them, in the user's cache; only if something changed."""

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INPUTS = (
    "LICENSE",
    "README.md",
    "agent",
    "debian",
    "docs/man",
    "packaging/bin",
    "packaging/demo-data",
    "packaging/lock",
    "packaging/make-manual",
    "pyproject.toml",
    "setup.cfg",
    "trainer",
    "units",
)
BUILD_NEEDS = (
    "apt-utils",
    "build-essential",
    "debhelper",
    "dh-python",
    "fakeroot",
    "python3",
    "python3-pip",
    "python3-setuptools",
    "python3-venv",
    "python3-wheel",
)
PYTHON = "/usr/bin/python3"


class BuildFailed(Exception):
    """A package could not be built; str() is one line."""


def cache_dir() -> Path:
    """Where everything that can be made again is kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dflash"


def say(text: str) -> None:
    """One line of progress."""
    print(f"· {text}", flush=True)


def apt_install(*packages: str) -> None:
    """Installs the packages that are missing. Raises BuildFailed if they cannot be."""
    command = ["dpkg-query", "-W", "-f", "${Package} ${db:Status-Abbrev}\n", *packages]
    known = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    there = {line.split()[0] for line in known.splitlines() if line.endswith("ii ")}
    missing = [package for package in packages if package not in there]
    if not missing:
        return
    if os.geteuid() != 0:
        raise BuildFailed(f"needed: apt-get install {' '.join(missing)}; install them, or run this with sudo")
    say(f"apt-get install {' '.join(missing)}")
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for step in (["update"], ["install", "--yes", "--no-install-recommends", *missing]):
        run(["apt-get", "-qq", *step], env=environment)


def run(command: list[str], **options: object) -> None:
    """A command whose output matters only if it fails. Raises BuildFailed with its last lines."""
    done = subprocess.run(  # type: ignore[call-overload]
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        **options,
    )
    if done.returncode:
        print(done.stdout, file=sys.stderr)
        raise BuildFailed(f"`{' '.join(command[:4])} …` failed with exit code {done.returncode}; see above")


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Only one process at a time makes the thing of that name in the cache."""
    cache_dir().mkdir(parents=True, exist_ok=True)
    with (cache_dir() / f".{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def fetch_wheels(name: str = "cpu") -> Path:
    """The wheels of a lock, downloaded once and checked against their hashes. Raises BuildFailed."""
    lock = ROOT / "packaging" / "lock" / f"{name}.txt"
    directory = cache_dir() / "wheels" / hashlib.sha256(lock.read_bytes()).hexdigest()[:16]
    with locked("wheels"):
        if not directory.exists():
            say(f"downloading the locked wheels ({name})")
            unfinished = directory.with_name(directory.name + ".part")
            unfinished.mkdir(parents=True, exist_ok=True)
            pip = [PYTHON, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "--require-hashes"]
            run([*pip, "--only-binary=:all:", "--dest", str(unfinished), "--requirement", str(lock)])
            unfinished.rename(directory)
    return directory


def input_files() -> Iterator[Path]:
    """Every file that goes into the packages."""
    for name in INPUTS:
        path = ROOT / name
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            if file.is_file() and "__pycache__" not in file.parts and not file.name.endswith(".pyc"):
                yield file


def build() -> Path:
    """A directory with the packages and an apt repository of them. Raises BuildFailed."""
    apt_install(*BUILD_NEEDS)
    with locked("packages"):
        wheels, (binding,) = fetch_wheels(), fetch_wheels("agent").glob("nvidia_ml_py-*.whl")
        digest = hashlib.sha256(wheels.name.encode())
        for file in input_files():
            content = str(file.readlink()).encode() if file.is_symlink() else file.read_bytes()
            digest.update(
                f"{file.relative_to(ROOT)} {file.stat().st_mode & 0o111} {len(content)}\n".encode() + content
            )
        repository = cache_dir() / "packages" / digest.hexdigest()[:16]
        if not repository.exists():
            say("building the packages")
            _build(repository, wheels, binding)
        return repository


def _build(repository: Path, wheels: Path, binding: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="dflash-build-") as scratch:
        tree = Path(scratch) / "dflash"
        for file in input_files():
            copy = tree / file.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, copy, follow_symlinks=True)
        environment = os.environ | {
            "DFLASH_NVML_WHEEL": str(binding),
            "DFLASH_WHEELHOUSE": str(wheels),
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        }
        command = ["dpkg-buildpackage", "--build=binary", "--no-sign", "-Ppkg.dflash.wheelhouse"]
        run(command, cwd=tree, env=environment)
        unfinished = repository.with_name(repository.name + ".part")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        for file in Path(scratch).glob("dflash*_*"):
            if file.is_file():
                shutil.move(file, unfinished)
    index = subprocess.run(
        ["apt-ftparchive", "packages", "."], cwd=unfinished, capture_output=True, text=True, check=True
    )
    (unfinished / "Packages").write_text(index.stdout)
    unfinished.rename(repository)
    builds = sorted(repository.parent.iterdir(), key=lambda path: path.stat().st_mtime)
    for old in builds[:-2]:  # the last but one may be in use by a container
        shutil.rmtree(old)
