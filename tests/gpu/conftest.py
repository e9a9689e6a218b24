"""A booted node with the packages, a runtime for GPUs and a GPU, for the tests of the unit on a real one."""

import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from conftest import make_dataset, make_target
from container import BOOTED_WITH_SYSTEMD, HOST, Machine
from system.node import DATA, TARGET


def gpu_name() -> str:
    """Its name, asked by another process: this one must not have it open. Empty without one."""
    code = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture(scope="module")
def node() -> Iterator[Machine]:
    """This node, with a tiny target. Skips where this process has the GPU open: to the node that is dirt."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        pytest.skip("this process has the GPU open: run these tests by themselves")
    name = gpu_name()
    if not BOOTED_WITH_SYSTEMD or not shutil.which("dflashctl") or not name:
        pytest.skip("needs a booted node with the packages and a GPU")
    print(f"\n{name}")
    make_target(HOST.path(TARGET))
    make_dataset(HOST.path(DATA))
    HOST.run("chmod", "--recursive", "a+rX", TARGET)
    yield HOST
    HOST.run("systemctl", "stop", "dflash-train@*.service", check=False)
