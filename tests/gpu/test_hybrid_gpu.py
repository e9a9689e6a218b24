"""The real unit with a hybrid target of a billion parameters on a real GPU: killed, resumed, and out of memory.

Needs a booted node with the packages, a runtime for GPUs and flash-linear-attention, as test_preflight_gpu.py does.
"""

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from conftest import save_dataset
from container import HOST, Machine
from system.node import journal, make_run, show, start, wait_for
from system.test_training import step_of

from .test_faults_gpu import trains_again

TARGET, DATA = "/srv/hybrid/target", "/srv/hybrid/data"
VOCABULARY = 32768
MAKE = f"""
import torch, transformers
config = transformers.AutoConfig.for_model(
    "qwen3_5_text", hidden_size=2048, num_hidden_layers=16, num_attention_heads=16, num_key_value_heads=4,
    head_dim=128, intermediate_size=6144, vocab_size={VOCABULARY}, linear_num_key_heads=16,
    linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128, max_position_embeddings=8192,
    tie_word_embeddings=False,
)
torch.manual_seed(0)
model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
print(sum(p.numel() for p in model.parameters()), "parameters")
model.save_pretrained({TARGET!r})
"""
# Takes what memory there is and what comes back, until it is ended.
HOG = """
import time, torch
held = []
print("begins", flush=True)
while True:
    free, _ = torch.cuda.mem_get_info()
    try:
        held.append(torch.empty(max(free - (64 << 20), 16 << 20), dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def hybrid(node: Machine) -> Machine:
    """The node, with the target and random text for it in rows of 200 to 4000 tokens."""
    pytest.importorskip("fla")
    if not node.path(TARGET).exists():
        made = subprocess.run([sys.executable, "-c", MAKE], capture_output=True, text=True, check=True)
        print(f"\na target with {made.stdout.strip()}")
        rng = np.random.default_rng(0)
        rows = [rng.integers(0, VOCABULARY - 1, rng.integers(200, 4000)).tolist() for _ in range(400)]
        save_dataset(node.path(DATA), {"input_ids": rows, "loss_mask": [[1] * len(row) for row in rows]})
        node.run("chmod", "--recursive", "a+rX", "/srv/hybrid")
    return node


def make(node: Machine, name: str) -> str:
    return make_run(
        node,
        name,
        target_model=TARGET,
        data_dir=DATA,
        devices="0",
        on_dirty="wait",
        max_steps=1_000_000,
        token_budget=8192,
        max_length=4096,
        max_anchors=256,
        block_size=16,
        draft_layers=5,
        mask_token_id=VOCABULARY - 1,
        save_interval=20,
        log_interval=5,
    )


def said(text: str, *words: str) -> None:
    """Prints the lines with one of these words."""
    print("\n" + "\n".join(line for line in text.splitlines() if any(word in line for word in words)))


@contextlib.contextmanager
def hog() -> Iterator[None]:
    """Another process that takes the GPU's memory; ended by its pid."""
    process = HOST.start(sys.executable, "-c", HOG)
    try:
        assert process.stdout is not None
        assert process.stdout.readline()
        yield
    finally:
        process.kill()
        process.wait()


def test_a_hybrid_target_trains_on_flas_kernels_and_goes_on_after_sigkill(hybrid: Machine) -> None:
    unit = make(hybrid, "hybrid")
    start(hybrid, unit)
    wait_for(lambda: step_of(hybrid, "hybrid") >= 45, 120, "45 steps")
    hybrid.run("systemctl", "kill", "--kill-whom=all", "--signal=SIGKILL", unit)
    print(f"\ntrains again after {trains_again(hybrid, unit, 0):.1f} s")
    wait_for(lambda: step_of(hybrid, "hybrid") >= 65, 60, "more steps")
    hybrid.run("systemctl", "stop", unit)
    told = journal(hybrid, unit)
    said(told, "target loaded", "training:", "killed by", "resuming", "busy:", "stopped at")
    assert "delta rule by fla" in told
    assert re.search(r"resuming from \S*step-0*40", told)
    assert show(hybrid, unit, "Result") == "success"


def test_memory_that_another_process_takes_is_told_and_the_run_goes_on_when_it_is_back(hybrid: Machine) -> None:
    unit = make(hybrid, "hogged")
    hybrid.run("systemctl", "start", "--no-block", unit)
    wait_for(lambda: "first step under way" in show(hybrid, unit, "StatusText"), 120, "the first step")
    with hog():
        wait_for(lambda: "out of memory" in journal(hybrid, unit), 120, "the lack of memory")
    wait_for(lambda: step_of(hybrid, "hogged") >= 15, 180, "steps after it")
    hybrid.run("systemctl", "stop", unit)
    told = journal(hybrid, unit)
    said(told, "memory", "waiting", "training:", "stopped at", "restart")
    assert show(hybrid, unit, "Result") == "success"
