"""SpecForge's training model of a DFlash drafter, made from the sizes and weights of one of ours."""

import warnings
from typing import Any

import pytest
import torch
from dflash_trainer.drafter import Drafter
from dflash_trainer.loader import Batch
from dflash_trainer.target import Target
from torch import Tensor, nn


def training_model(drafter: Drafter, target: Target, attention: str, dtype: torch.dtype, anchors: int) -> Any:
    """Theirs on the target's device, with the drafter's weights in `dtype`; attention "sdpa" or "flex_attention".

    Skips the test if SpecForge is not installed.
    """
    pytest.importorskip("specforge")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about flash-attn, which this model has no use for
        from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
        from specforge.modeling.draft.dflash import DFlashDraftModel
    from transformers import Qwen3Config

    config = Qwen3Config(**drafter.config.to_json("float32"))
    config._attn_implementation = attention
    with torch.device(target.head.device):
        theirs = DFlashDraftModel(config).to(dtype)
    theirs.load_state_dict(drafter.state_dict())
    head = nn.Linear(1, 1, bias=False)
    head.weight = nn.Parameter(target.head, requires_grad=False)
    return OnlineDFlashModel(
        draft_model=theirs,
        target_lm_head=head,
        target_embed_tokens=nn.Embedding.from_pretrained(target.embedding),
        mask_token_id=drafter.config.mask_token_id,
        block_size=drafter.config.block_size,
        attention_backend=attention,
        num_anchors=anchors,
        loss_decay_gamma=7.0,
    )


def with_anchors_of(model: Any, batch: Batch) -> None:
    """Has the model take the anchors of one of our batches instead of drawing its own."""
    positions = batch.anchors
    first = batch.block_ids.view(*positions.shape, -1)[:, :, 0]
    keep = first != model.mask_token_id  # a padding block has no anchor token

    def anchors_of(*_: Any) -> tuple[Tensor, Tensor]:
        return positions, keep

    model._sample_anchor_positions = anchors_of
