"""A booted container for all system tests, with the packages, the runtime and a tiny target in it."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import make_dataset, make_target
from container import Machine, booted
from packages import build

from .node import DATA, TARGET, install


@pytest.fixture(scope="session")
def repository() -> Path:
    """The packages as an apt repository, built if anything in them has changed."""
    if shutil.which("apt-get") is None:
        pytest.skip("the packages are built on Debian")
    return build()


@pytest.fixture(scope="session")
def bootable(repository: Path) -> Path:
    """The repository, where a container can be booted."""
    if os.geteuid() != 0:
        pytest.skip("booting a container needs root")
    return repository


@pytest.fixture(scope="session")
def node(bootable: Path) -> Iterator[Machine]:
    """What most tests share: they make runs of their own in it and leave packages and runtime as they are."""
    with booted(bootable, {}) as machine:
        install(machine, "dflash", "dflash-wheelhouse-cpu")
        machine.run("systemctl", "start", "dflash-runtime")
        make_target(machine.path(TARGET))
        make_dataset(machine.path(DATA))
        machine.run("chmod", "--recursive", "a+rX", TARGET)  # transformers writes weights for their owner only
        yield machine


@pytest.fixture
def bare_node(bootable: Path) -> Iterator[Machine]:
    """A container of one test's own, without the packages."""
    with booted(bootable, {}) as machine:
        yield machine
