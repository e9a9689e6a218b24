"""The drafter on a real GPU: FlexAttention against SDPA under the same mask, and a whole run."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import MASK_TOKEN, load_store
from dflash_agent.runfile import from_flags
from dflash_trainer.drafter import Drafter
from dflash_trainer.drafter_config import DrafterConfig
from dflash_trainer.inputs import drafter_config
from dflash_trainer.loader import Cutter
from dflash_trainer.loss import position_weights
from dflash_trainer.mask import dense_mask, flex_mask
from dflash_trainer.memory import PieceLimit
from dflash_trainer.pipeline import Tapped, tap_in_pieces
from dflash_trainer.plan import make_plan
from dflash_trainer.step import Trainer
from dflash_trainer.target import load_target, read_config

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

CONFIG = DrafterConfig(
    hidden_size=256,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=64,
    intermediate_size=512,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    vocab_size=1000,
    max_position_embeddings=1024,
    num_target_layers=8,
    block_size=16,
    mask_token_id=999,
    target_layer_ids=(1, 4),
)


@pytest.mark.parametrize(("context_length", "blocks"), [(100, 5), (256, 32), (300, 7)])
def test_flex_attention_and_sdpa_agree_in_values_and_gradients(context_length: int, blocks: int) -> None:
    torch.manual_seed(0)
    drafter = Drafter(CONFIG).cuda()
    drafter.reset_parameters(0)
    anchors = torch.randint(1, context_length, (2, blocks), device="cuda").sort(1).values
    positions = (anchors[:, :, None] + torch.arange(16, device="cuda")).flatten(1)
    noise = torch.randn(2, blocks * 16, 256, device="cuda")
    context = torch.randn(2, context_length, 512, device="cuda")
    results = []
    for make in (dense_mask, flex_mask):
        drafter.zero_grad()
        out = drafter(noise, positions, context, drafter.masks(anchors, context_length, make))
        (out * torch.linspace(0, 1, 256, device="cuda")).sum().backward()
        results.append((out.detach(), [p.grad.clone() for p in drafter.parameters() if p.grad is not None]))
    (dense, dense_grads), (flex, flex_grads) = results
    torch.testing.assert_close(flex, dense, rtol=1e-2, atol=5e-3)
    for a, b in zip(flex_grads, dense_grads, strict=True):
        assert (a - b).norm() <= 2e-2 * b.norm()


def test_a_batch_that_does_not_fit_into_the_gpu_is_done_in_pieces_with_the_same_result(
    target_dir: Path, dataset_dir: Path, tmp_path: Path
) -> None:
    gpu = torch.device("cuda")
    made = from_flags("run1", {"target.model": str(target_dir), "data.dir": str(dataset_dir)})
    run = replace(made, drafter=replace(made.drafter, layers=2, block_size=16, intermediate=8192, head_dim=64))
    config = drafter_config(run, read_config(target_dir), MASK_TOKEN)
    target = load_target(target_dir, config.target_layer_ids, gpu, torch.bfloat16)
    store = load_store(dataset_dir, 256, 96)
    plan = make_plan(np.diff(store.survey.offsets), 4096, 0, 4)
    cutter = Cutter(store, plan, 0, 512, MASK_TOKEN, position_weights(16, 7.0).numpy())
    batch = cutter.cut(0).to(gpu)
    assert len(batch.anchors) >= 8
    results = []
    peak = 0
    for share in (1.0, 0.6):
        torch.manual_seed(0)
        limit = PieceLimit(tmp_path)
        trainer = Trainer(run, config, target, gpu, 100, None, limit)
        states = Tapped(batch, *tap_in_pieces(target, batch, limit), None)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        if share < 1:
            total = torch.cuda.get_device_properties(gpu).total_memory
            torch.cuda.set_per_process_memory_fraction((before + share * peak) / total)
        try:
            result = trainer.settle(trainer.step(1, states))
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        peak = torch.cuda.max_memory_reserved() - before
        results.append((limit.splits, result))
        del trainer, states, limit
    (none, whole), (splits, pieces) = results
    assert none == 0
    assert splits > 0
    assert pieces.loss == pytest.approx(whole.loss, rel=1e-3)
    assert pieces.grad_norm == pytest.approx(whole.grad_norm, rel=2e-2)
    assert (tmp_path / "pieces.json").exists()


@pytest.mark.parametrize("dtype", ["float32", "float8"])
def test_a_target_of_another_type_is_trained_for_too(
    dtype: str, train_flags: Callable[..., list[str]], tmp_path: Path
) -> None:
    trained(train_flags(max_steps=6, head_dim=16, target_dtype=dtype))
    assert (tmp_path / "out" / "complete.json").exists()


def test_a_run_trains_without_compiling(train_flags: Callable[..., list[str]], tmp_path: Path) -> None:
    trained(train_flags(max_steps=6, head_dim=16, attention="dense", target_compile="never"))
    assert (tmp_path / "out" / "complete.json").exists()


def trained(flags: list[str]) -> str:
    """What a training says that ends well."""
    path = os.pathsep.join(p for p in sys.path if p.endswith(("agent", "trainer")))
    environment = os.environ | {"PYTHONPATH": path + os.pathsep + os.environ.get("PYTHONPATH", "")}
    words = [sys.executable, "-m", "dflash_trainer", *flags]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_a_run_trains_on_the_gpu_and_resumes(train_flags: Callable[..., list[str]], tmp_path: Path) -> None:
    flags = train_flags(max_steps=80, head_dim=16, lr=1e-2)
    trained(flags)
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < 0.85 * losses[0]
    assert "nothing left to train" in trained(flags)
