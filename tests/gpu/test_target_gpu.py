"""A hybrid target on a real GPU: whose kernels it runs on; that compiling and float8 do not change what it says."""

import importlib.util
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_trainer.float8 import to_float8
from dflash_trainer.target import Target, compile_layers, kernels, load_target

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("fla") is None,
    reason="no CUDA device or no flash-linear-attention",
)
GPU = torch.device("cuda")
TAPPED = (1, 4, 6)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of Qwen3.6's kind with 35 million parameters and two full layers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 1024,
        "vocab_size": 2048,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "max_position_embeddings": 4096,
    }
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_5_text", **sizes))  # type: ignore[no-untyped-call]
    directory = tmp_path_factory.mktemp("hybrid")
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory


def load(directory: Path) -> Target:
    return load_target(directory, TAPPED, GPU, torch.bfloat16)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def exact_states(directory: Path, ids: torch.Tensor) -> torch.Tensor:
    """By transformers' own code, on the CPU, in float32."""
    slow = load_target(directory, TAPPED, torch.device("cpu"), torch.float32)
    module = sys.modules[type(slow.decoder.layers[0]).__module__]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("torch_chunk_gated_delta_rule", "causal_conv1d_fn"):
            patch.setattr(module, name, inspect.unwrap(getattr(module, name)))
        return slow.states(ids.cpu()).to(GPU)


def test_states_are_those_of_the_slow_path_with_flas_kernels_and_compiled_for_any_size(hybrid: Path) -> None:
    target = load(hybrid)
    found = kernels(target.decoder)
    assert found["delta rule"] == "fla"
    batches = [torch.randint(0, 2048, shape, device=GPU) for shape in ((1, 700), (3, 200), (2, 513), (1, 64))]
    exact = [exact_states(hybrid, ids) for ids in batches]
    plain = [error(target.states(ids), states) for ids, states in zip(batches, exact, strict=True)]
    compile_layers(target.decoder)
    assert kernels(target.decoder) == found | {"convolution": "dflash_trainer"}
    compiled = [error(target.states(ids), states) for ids, states in zip(batches, exact, strict=True)]
    print("errors of bfloat16, plain and compiled:", plain, compiled)
    assert max(plain) < 0.05
    assert max(compiled) < 1.3 * max(plain)


def test_a_float8_target_is_near_the_one_that_it_was_made_from(hybrid: Path) -> None:
    target = load(hybrid)
    ids = torch.randint(0, 2048, (2, 300), device=GPU)
    plain = target.states(ids)
    before = torch.cuda.memory_allocated()
    assert to_float8(target.decoder.layers) > 40
    assert torch.cuda.memory_allocated() < before
    eight = target.states(ids)
    exact = exact_states(hybrid, ids)
    print("errors of bfloat16, float8:", error(plain, exact), error(eight, exact))
    assert error(plain, exact) < error(eight, exact) < 0.15
    compile_layers(target.decoder)
    assert error(target.states(ids), exact) < 1.3 * error(eight, exact)


def test_a_gpu_without_flash_linear_attention_is_refused_in_one_line(hybrid: Path) -> None:
    program = f"""
import sys, torch
sys.modules["fla"] = None
from pathlib import Path
from dflash_trainer.target import check_kernels, kernels, load_target
target = load_target(Path({str(hybrid)!r}), {TAPPED}, torch.device("cuda"), torch.bfloat16)
try:
    check_kernels(kernels(target.decoder), torch.device("cuda"), False)
except Exception as error:
    print(__import__("json").dumps([type(error).__name__, str(error)]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment(), check=True
    )
    kind, text = json.loads(done.stdout.splitlines()[-1])
    assert kind == "CannotStart"
    assert "flash-linear-attention cannot be imported; install it" in text


def environment() -> dict[str, str]:
    """With this process's modules."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
