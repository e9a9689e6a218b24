"""A throwaway Debian 12 machine: a tree made once by mmdebstrap, unpacked, booted by systemd-nspawn, forgotten.

It has no network but loopback: what is installed in it comes from the tree or the local repository.
"""

import contextlib
import hashlib
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packages import BuildFailed, apt_install, cache_dir, locked, run, say

SUITE = "bookworm"
INCLUDED = (
    "adduser",
    "bash-completion",
    "ca-certificates",
    "dbus",
    "polkitd",
    "procps",
    "python3",
    "python3-prometheus-client",
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
BOOTED_WITH_SYSTEMD = Path("/run/systemd/system").is_dir()  # sd_booted(3)
MEMORY = 10 << 30  # bytes that must be free for a container to lie in memory; it takes half of it

CGROUPS = tuple(Path("/sys/fs/cgroup", kind) for kind in ("", "systemd", "unified"))  # where a manager has its own

# The file system is mounted where only this process and the container see it, so that it ends with them. Where no
# manager makes a scope for it, the container gets a cgroup ($4) here: two in one would remove each other's groups.
START = """set -e
[ -z "$3" ] || mount -t tmpfs -o mode=755,size="$3" node "$1"
tar -C "$1" --numeric-owner -xf "$2"
for top in $5; do
	[ -n "$4" ] && [ -w "$top/cgroup.procs" ] || continue
	mkdir "$top/$4"
	echo $$ > "$top/$4/cgroup.procs"
done
root=$1
shift 5
exec systemd-nspawn --quiet -D "$root" "$@"
"""


@dataclass(frozen=True, slots=True)
class Machine:
    """A booted Debian: this host, or a container."""

    root: Path  # where its files are, seen from here; Path.resolve() would lead out of it
    enter: tuple[str, ...]  # what goes before a command

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


def base_tree(name: str = SUITE, included: Sequence[str] = INCLUDED, hooks: Sequence[str] = ()) -> Path:
    """The tar file of a small Debian with everything that the packages depend on, made once. Raises BuildFailed.

    `name`: what the file's begins with; `hooks`: shell commands for its making, with the tree as $1.
    """
    apt_install(*HOST_NEEDS)
    recipe = [
        "--variant=minbase",
        f"--include={','.join(included)}",
        *(f"--dpkgopt=path-exclude=/usr/share/{folder}/*" for folder in ("doc", "locale")),
        f'--customize-hook=echo "deb [trusted=yes] file:{REPOSITORY} ./" > "$1/etc/apt/sources.list"',
        '--customize-hook=echo node > "$1/etc/hostname"; : > "$1/etc/machine-id"',
        *(f"--customize-hook={hook}" for hook in hooks),
        SUITE,
    ]
    key = hashlib.sha256("\n".join(recipe).encode()).hexdigest()[:12]
    tree = cache_dir() / "trees" / f"{name}-{key}.tar"
    with locked("trees"):
        if not tree.exists():
            say(f"making a Debian tree ({name})")
            tree.parent.mkdir(parents=True, exist_ok=True)
            unfinished = tree.with_name(f".{tree.name}")
            run(["mmdebstrap", *recipe, str(unfinished)])
            unfinished.rename(tree)
    return tree


@contextlib.contextmanager
def booted(repository: Path, binds: Mapping[Path, Path]) -> Iterator[Machine]:
    """A container with `repository` as its only apt source, booted; stopped and gone afterwards.

    It lies in memory if there is plenty, else in the cache. Nothing of it outlives this process, however that
    ends: nspawn gets SIGTERM then (PR_SET_PDEATHSIG), on which it halts the container.

    `binds`: directories of this host and where they are in the container, writable.
    """
    tree = base_tree()
    prefix = f"node-{os.getpid()}-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=cache_dir(), ignore_cleanup_errors=True) as scratch:
        root, console = Path(scratch) / "root", Path(scratch) / "console.log"
        root.mkdir()
        size = str(MEMORY) if free_memory() > MEMORY else ""
        cgroup = "" if BOOTED_WITH_SYSTEMD else f"dflash-{Path(scratch).name}"
        with console.open("w") as output:
            process = subprocess.Popen(
                [
                    *("setpriv", "--pdeathsig", "TERM", "unshare", "--mount"),
                    *("sh", "-c", START, "start", str(root), str(tree), size, cgroup, " ".join(map(str, CGROUPS))),
                    *("--boot", "--register=no", "--private-network", "--hostname=node"),
                    *(() if BOOTED_WITH_SYSTEMD else ("--keep-unit",)),  # no manager to make a scope for it
                    *("--console=pipe", "--resolv-conf=off", f"--bind-ro={repository}:{REPOSITORY}"),
                    *(f"--bind={outside}:{inside}" for outside, inside in binds.items()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            leader = _leader(process, console)
            enter = ("nsenter", "-t", str(leader), "-a", "--", "env", "-i", "HOME=/root", "LANG=C.UTF-8")
            paths = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
            machine = Machine(Path(f"/proc/{leader}/root"), (*enter, paths))
            _wait_until_running(machine)
            yield machine
        finally:
            _stop(process)
            _remove_cgroups(cgroup)


def free_memory() -> int:
    """Bytes that new work can have without swapping (MemAvailable of proc(5))."""
    line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable:"))
    return int(line.split()[1]) << 10


def _leader(process: "subprocess.Popen[bytes]", console: Path) -> int:
    """The container's process 1, among the children of nspawn."""
    end = time.monotonic() + BOOT_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            raise BuildFailed(f"systemd-nspawn ended: {' '.join(console.read_text().split())[-500:]}")
        with contextlib.suppress(OSError):  # a process that has just ended
            for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
                status = Path(f"/proc/{child}/status").read_text()
                comm = Path(f"/proc/{child}/comm").read_text().strip()
                ids = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()
                if ids[-1] == "1" and len(ids) > 2 and comm == "systemd":
                    return int(child)
        time.sleep(0.05)
    raise BuildFailed(f"the container has no process 1 after {BOOT_SECONDS} s")


def _wait_until_running(machine: Machine) -> None:
    """Waits for the boot to end. Raises BuildFailed with what failed in it."""
    end = time.monotonic() + BOOT_SECONDS
    state = ""
    while state not in ("running", "degraded") and time.monotonic() < end:
        asked = machine.run("systemctl", "is-system-running", "--wait", check=False, timeout=BOOT_SECONDS)
        state = asked.stdout.strip()  # empty as long as process 1 does not answer
        time.sleep(0.05)
    if state != "running":
        failed = machine.run("systemctl", "--failed", "--plain", "--no-legend", check=False).stdout
        raise BuildFailed(f"the container is {state or 'not up'} after booting: {' '.join(failed.split())}")


def _remove_cgroups(name: str) -> None:
    """Removes what the container had: directories without processes."""
    for top in CGROUPS if name else ():
        for folder, _, _ in os.walk(top / name, topdown=False):
            with contextlib.suppress(OSError):
                Path(folder).rmdir()


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """Has nspawn halt the container, which it does on SIGTERM; kills it if that hangs."""
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
