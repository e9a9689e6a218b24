"""Position-weighted cross-entropy through the target's frozen head, in chunks of rows."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

CHUNK_ROWS = 1024


def position_weights(block_size: int, loss_decay: float) -> Tensor:
    """exp(−(k−1)/γ) at positions k ≥ 1 of a block, 0 at the anchor; float32 [block_size]."""
    decay = loss_decay or default_loss_decay(block_size)
    k = torch.arange(block_size, dtype=torch.float32)
    weights = torch.exp(-(k - 1) / decay)
    weights[0] = 0.0
    return weights


def default_loss_decay(block_size: int) -> float:
    """γ as published: 7 for blocks of 16 and 4 for blocks of 8; in between and beyond in proportion."""
    return 4.0 * math.pow(block_size / 8, math.log2(7 / 4))


class _WeightedCrossEntropy(Function):
    """The gradient by the hidden states is formed with the loss: the head is frozen and needs none."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        gradient = torch.empty_like(hidden)
        correct = torch.empty(labels.shape, dtype=torch.bool, device=labels.device)
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in range(0, hidden.shape[0], CHUNK_ROWS):
            rows = slice(start, start + CHUNK_ROWS)
            logits = (hidden[rows] @ head.T).float()
            label = labels[rows, None]
            correct[rows] = logits.argmax(-1) == labels[rows]
            log_normaliser = logits.logsumexp(-1, keepdim=True)
            loss += (weights[rows] * (log_normaliser - logits.gather(-1, label)).squeeze(-1)).sum()
            probabilities = logits.sub_(log_normaliser).exp_()
            probabilities.scatter_add_(-1, label, -torch.ones_like(label, dtype=torch.float32))
            probabilities.mul_(weights[rows, None])
            gradient[rows] = probabilities.to(head.dtype) @ head
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_loss: Tensor, by_correct: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ARG004
        (gradient,) = ctx.saved_tensors
        return gradient * by_loss.to(gradient.dtype), None, None, None


def weighted_cross_entropy(hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Σ weights · cross-entropy, and whether each row's most likely token is its label.

    hidden [M, H] and head [V, H] (frozen: gets no gradient) of one dtype, labels [M] int64, weights [M]
    float32. Never holds more than CHUNK_ROWS · V logits. Returns a float32 scalar and booleans [M].
    """
    loss, correct = _WeightedCrossEntropy.apply(hidden, head, labels, weights)  # type: ignore[no-untyped-call]
    return loss, correct
