"""What the system tests do in a container."""

import time
from collections.abc import Callable
from subprocess import CompletedProcess

from conftest import MASK_TOKEN
from container import Machine

TARGET, DATA = "/srv/tiny/target", "/srv/tiny/data"
TINY: dict[str, object] = {
    "target-model": TARGET,
    "data-dir": DATA,
    "epochs": 1000,
    "max-steps": 20,
    "token-budget": 256,
    "max-length": 256,
    "max-anchors": 8,
    "block-size": 4,
    "draft-layers": 2,
    "mask-token-id": MASK_TOKEN,
    "log-interval": 5,
    "save-interval": 5,
    "lr": 2e-3,
}


def install(node: Machine, *packages: str) -> CompletedProcess[str]:
    """Installs packages from the local repository."""
    node.run("apt-get", "-qq", "update")
    return apt(node, "install", *packages)


def apt(node: Machine, *words: str) -> CompletedProcess[str]:
    """apt-get, without questions."""
    return node.run("env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "--yes", *words)


def make_run(node: Machine, name: str, **changes: object) -> str:
    """A run that takes seconds, made with dflashctl; keyword arguments add or replace flags. Its unit."""
    flags = TINY | {flag.replace("_", "-"): value for flag, value in changes.items()}
    words = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
    node.run("dflashctl", "new", name, *words)
    return f"dflash-train@{name}.service"


def start(node: Machine, unit: str) -> None:
    """Starts a unit, or fails the test with what its journal says."""
    assert node.run("systemctl", "start", unit, check=False).returncode == 0, journal(node, unit)


def show(node: Machine, unit: str, name: str) -> str:
    """A property of a unit."""
    return node.run("systemctl", "show", "--property", name, "--value", unit).stdout.strip()


def journal(node: Machine, unit: str) -> str:
    """The messages of a unit."""
    return node.run("journalctl", "--unit", unit, "--output=cat", "--no-pager").stdout


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Waits until the condition holds. Raises AssertionError after so many seconds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s in vain: {what}"
        time.sleep(0.1)
