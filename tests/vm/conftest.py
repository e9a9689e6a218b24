"""An image of a node for the tests that need a kernel of their own."""

import os
import shutil

import pytest
from packages import build

from .machine import Image, image, missing


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
