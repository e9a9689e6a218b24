"""The launcher: back-off, environment, refusals."""

import doctest
import os
import subprocess
import sys
from pathlib import Path

import pytest
from dflash_agent import launch, manager, outputs
from dflash_trainer import drafter, metrics


def test_the_pauses_between_restarts_double_up_to_ten_minutes() -> None:
    waits = [launch.pause(n) + launch.RESTART_SECONDS for n in range(1, 12)]
    assert waits == [5, 10, 20, 40, 80, 160, 320, 600, 600, 600, 600]
    assert launch.pause(0) == 0
    assert launch.pause(10**9) == 595


def test_an_environment_that_the_administrator_has_set_wins() -> None:
    given = {"CACHE_DIRECTORY": "/c", "PYTORCH_CUDA_ALLOC_CONF": "mine", "HOME": "/h"}
    made = launch.environment(given)
    assert made["PYTORCH_CUDA_ALLOC_CONF"] == "mine"
    assert made["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert made["TRITON_CACHE_DIR"] == "/c/triton"
    assert made["HOME"] == "/h"


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


@pytest.mark.parametrize("module", [launch, manager, metrics, outputs, drafter])
def test_the_examples_in_the_docstrings_hold(module: object) -> None:
    result = doctest.testmod(module)  # type: ignore[arg-type]
    assert result.attempted > 0
    assert result.failed == 0


def test_the_units_restart_time_is_the_launchers() -> None:
    unit = (Path(__file__).parents[2] / "units" / "dflash-train@.service").read_text()
    assert f"\nRestartSec={launch.RESTART_SECONDS}s\n" in unit
    assert f"\nRestartPreventExitStatus={launch.EXIT_CANNOT_START}\n" in unit
