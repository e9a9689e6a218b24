"""Our loss and SpecForge's, of the same weights, anchors and batch: one number, one gradient."""

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import MASK_TOKEN, VOCABULARY, load_store
from dflash_trainer.drafter import Drafter
from dflash_trainer.drafter_config import DrafterConfig
from dflash_trainer.loader import Cutter
from dflash_trainer.loss import position_weights
from dflash_trainer.plan import make_plan
from dflash_trainer.step import block_loss
from dflash_trainer.target import load_target
from specforge_peer import training_model, with_anchors_of

ANCHORS = 12
MACHINES = [
    pytest.param("cpu", "sdpa", torch.float32, id="cpu"),
    pytest.param(
        "cuda",
        "flex_attention",
        torch.bfloat16,
        id="gpu",
        marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
    ),
]


def config_of(block_size: int, hidden: int) -> DrafterConfig:
    return DrafterConfig(
        hidden_size=hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=64,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        vocab_size=VOCABULARY,
        max_position_embeddings=256,
        num_target_layers=4,
        block_size=block_size,
        mask_token_id=MASK_TOKEN,
        target_layer_ids=(0, 2),
    )


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize(("device", "attention", "dtype"), MACHINES)
def test_loss_accuracy_and_gradient_are_those_of_specforge(
    device: str, attention: str, dtype: torch.dtype, block_size: int, target_dir: Path, dataset_dir: Path
) -> None:
    config = config_of(block_size, 32)
    there = torch.device(device)
    target = load_target(target_dir, config.target_layer_ids, there, dtype)
    store = load_store(dataset_dir, 256, VOCABULARY)
    offsets = store.survey.offsets
    plan = make_plan(np.diff(offsets), 256, 0, 1)
    cutter = Cutter(store, plan, 0, ANCHORS, MASK_TOKEN, position_weights(block_size, 7.0).numpy())
    batch = cutter.cut(0).to(there)
    mask = torch.zeros(batch.input_ids.shape)
    for row, number in enumerate(plan.epochs[0][0]):
        own = store.loss_mask[offsets[number] : offsets[number + 1]]
        mask[row, : len(own)] = torch.from_numpy(own.astype(np.float32))
    drafter = Drafter(config)
    drafter.reset_parameters(1)
    drafter.to(there)
    theirs = training_model(drafter, target, attention, dtype, ANCHORS)
    with_anchors_of(theirs, batch)
    states = target.states(batch.input_ids)

    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        loss, correct = block_loss(drafter, target, batch, states)
    loss.backward()
    their_loss, their_accuracy, _ = theirs(batch.input_ids, states, mask.to(there))
    their_loss.backward()

    exact = dtype == torch.float32
    assert loss.item() == pytest.approx(their_loss.item(), rel=1e-5 if exact else 5e-3)
    accuracy = correct.float().mean().item()
    assert accuracy == pytest.approx(their_accuracy.item(), abs=1e-6 if exact else 0.02)
    for name, parameter in theirs.draft_model.named_parameters():
        ours = drafter.get_parameter(name).grad
        assert ours is not None
        error = (ours - parameter.grad).norm() / parameter.grad.norm()
        assert error < (1e-4 if exact else 5e-2), (name, error.item())
