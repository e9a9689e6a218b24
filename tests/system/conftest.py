"""One booted container for all system tests: the packages from the local repository, the runtime, a tiny target."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import MASK_TOKEN, make_dataset, make_target
from container import HOST_NEEDS, Machine, booted
from packages import build, missing

TINY = {
    "target-model": "/srv/tiny/target",
    "data-dir": "/srv/tiny/data",
    "epochs": "20",
    "max-steps": "20",
    "token-budget": "256",
    "max-length": "256",
    "max-anchors": "8",
    "block-size": "4",
    "draft-layers": "2",
    "mask-token-id": str(MASK_TOKEN),
    "log-interval": "5",
    "save-interval": "5",
    "lr": "2e-3",
}
