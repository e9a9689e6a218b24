"""The autotuner's guard on a real GPU: threads that tune at once, without and with it, and after a restart."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("triton") is None,
    reason="no CUDA device or no Triton",
)

TRIES = 3
KERNELS = (
    "own",
    pytest.param(
        "fla",
        marks=pytest.mark.skipif(
            importlib.util.find_spec("fla") is None, reason="flash-linear-attention is not installed"
        ),
    ),
)


def tune(kernels: str, guard: str, cache: Path) -> dict[str, Any]:
    """What tests/gpu/tuning.py found in a process of its own, whose cache lies there."""
    cache.mkdir(exist_ok=True)
    paths = [path for path in sys.path if path.endswith(("agent", "trainer"))]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "FLA_"))}
    environment |= {
        "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]),
        "TRITON_CACHE_DIR": str(cache),
    }
    words = [sys.executable, str(Path(__file__).with_name("tuning.py")), kernels, guard]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(kernels, guard, found)
    return found


@pytest.mark.parametrize("kernels", KERNELS)
def test_unguarded_threads_crash_on_a_cold_cache(kernels: str, tmp_path: Path) -> None:
    for attempt in range(TRIES):
        if tune(kernels, "unguarded", tmp_path / str(attempt))["errors"]:
            return
    pytest.skip(f"{kernels}: no crash without the guard in {TRIES} tries; what it is for did not show here")


@pytest.mark.parametrize("kernels", KERNELS)
def test_guarded_threads_pass_on_a_cold_cache_and_a_restart_measures_nothing(kernels: str, tmp_path: Path) -> None:
    for attempt in range(TRIES if kernels == "own" else 1):  # fla's take two minutes
        cache = tmp_path / str(attempt)
        cold = tune(kernels, "guarded", cache)
        assert (cold["errors"], cold["wrong"]) == ([], [])
        assert cold["measured"] > 0
        warm = tune(kernels, "guarded", cache)
        assert (warm["errors"], warm["wrong"]) == ([], [])
        assert warm["measured"] == 0, warm["kernels"]
