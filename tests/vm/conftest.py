"""An image of a node for the tests that need a kernel of their own; they share a worker."""

import os
import shutil
from pathlib import Path

import pytest
from packages import build

from .machine import Image, image, missing


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """One machine at a time: each takes all cores."""
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.xdist_group("vm"))


@pytest.fixture(scope="session")
def node_image() -> Image:
    """A node's image, where one can be made and booted."""
    if shutil.which("apt-get") is None:
        pytest.skip("the packages are built on Debian")
    if os.geteuid() != 0:
        pytest.skip("making a node's image needs root")
    if reason := missing():
        pytest.skip(reason)
    return image(build())
