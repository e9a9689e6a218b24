"""The launcher: environment, refusals."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from dflash_agent import launch, preflight
from dflash_agent.preflight import Verdict


def test_an_environment_that_the_administrator_has_set_wins() -> None:
    given = {"CACHE_DIRECTORY": "/c", "PYTORCH_CUDA_ALLOC_CONF": "mine", "HOME": "/h"}
    made = launch.environment(given, Verdict("id", 0, ("GPU-b", "GPU-a"), (1, 0)))
    assert made["PYTORCH_CUDA_ALLOC_CONF"] == "mine"
    assert "PYTORCH_ALLOC_CONF" not in made
    assert made["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert made["TRITON_CACHE_DIR"] == "/c/triton"
    assert made["HOME"] == "/h"


def test_torchs_memory_grows_in_place_unless_the_administrator_says_otherwise() -> None:
    for given, expected in (({}, "expandable_segments:True"), ({"PYTORCH_ALLOC_CONF": "mine"}, "mine")):
        assert launch.environment(given, Verdict("id", 0, ("GPU-a",), (0,)))["PYTORCH_ALLOC_CONF"] == expected


def test_cuda_sees_the_leased_gpus_whatever_was_set_and_none_without_a_lease() -> None:
    given = {"CUDA_VISIBLE_DEVICES": "7", "LISTEN_FDS": "2", "LISTEN_FDNAMES": "gpu-GPU-b:gpu-GPU-a"}
    made = launch.environment(given, Verdict("id", 0, ("GPU-b", "GPU-a"), (1, 0)))
    assert made["CUDA_VISIBLE_DEVICES"] == "GPU-b,GPU-a"
    assert not [name for name in made if name.startswith("LISTEN_")]
    assert launch.environment(given, Verdict("id", 0))["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize("name", ["Bad", "no-such-run-here"])
def test_a_run_that_cannot_start_is_exit_78_with_one_line(name: str) -> None:
    path = os.pathsep.join(p for p in sys.path if p.endswith("agent"))
    done = subprocess.run(
        [sys.executable, "-m", "dflash_agent.launch", name],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 78
    assert name in done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_the_units_restart_time_is_the_preflights() -> None:
    unit = (Path(__file__).parents[2] / "units" / "dflash-train@.service").read_text()
    assert f"\nRestartSec={preflight.RESTART_SECONDS}s\n" in unit
    assert f"\nRestartPreventExitStatus={preflight.EXIT_CANNOT_START}\n" in unit
