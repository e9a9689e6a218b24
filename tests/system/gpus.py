"""GPUs in a container without any: a stand-in for the driver's library, and real processes that hold its nodes."""

import contextlib
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from container import Machine
from nvml.standin import append_xid, compile_library, write_state

STATE = "/srv/nvml/state"
LIBRARIES = "/usr/lib/x86_64-linux-gnu"
HOLD = """
import os, signal, sys
files = [open(path, "r+b") for path in sys.argv[1:]]
print(os.getpid(), flush=True)
while True:
    signal.pause()
"""


def install_driver(node: Machine) -> None:
    """Puts the library where the real one is; without a state it says that the driver is not loaded."""
    node.path(STATE).parent.mkdir(parents=True, exist_ok=True)
    compile_library(node.path(LIBRARIES), Path(STATE))


def report(node: Machine, *gpus: Mapping[str, object], **general: object) -> None:
    """Sets what the driver says, and makes the nodes of its GPUs."""
    write_state(node.path(STATE), gpus, **general)
    for gpu in gpus:
        node.path(f"/dev/nvidia{gpu['minor']}").touch()
        node.path(f"/dev/nvidia{gpu['minor']}").chmod(0o666)


def xid(node: Machine, gpu: int, code: int) -> None:
    """An Xid error happens."""
    append_xid(node.path(STATE), gpu, code)


def unload_driver(node: Machine) -> None:
    """As without a driver."""
    node.path(STATE).unlink(missing_ok=True)
    for path in node.path("/dev").glob("nvidia*"):
        path.unlink()


@contextlib.contextmanager
def holding(
    node: Machine, *nodes: str, user: str = "root", program: str = HOLD, before: tuple[str, ...] = ()
) -> Iterator[int]:
    """A process with the nodes open, outside any unit unless `before` puts it in one; its pid in the container."""
    command = (*before, "python3", "-c", program, *nodes)
    if not before:
        command = ("setpriv", "--reuid", user, "--regid", user, "--clear-groups", *command)
    process = node.start(*command)
    try:
        pid = int(read_line(process))
    except ValueError:
        process.kill()
        process.wait()
        raise
    try:
        yield pid
    finally:
        if pid > 1:  # in a pid namespace of its own the caller has to find it
            node.run("kill", "-KILL", str(pid), check=False)
        process.send_signal(signal.SIGCONT)  # nsenter stops with what it runs
        process.wait()


def read_line(process: "subprocess.Popen[str]") -> str:
    """The next line that a process prints."""
    assert process.stdout is not None
    return process.stdout.readline()


def alive(node: Machine, pid: int) -> bool:
    """Whether a process of the container lives, or is at least not reaped."""
    return node.path(f"/proc/{pid}").exists()
