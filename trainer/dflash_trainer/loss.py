"""Position-weighted cross-entropy through the target's frozen head, in chunks of rows."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

LOGITS_AT_A_TIME = {"cuda": 1 << 30, "cpu": 1 << 26}  # the rows of so many make a matrix product that fills it


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
        losses, correct = [], []
        most = max(1, LOGITS_AT_A_TIME[hidden.device.type] // head.shape[0])
        chunks = max(1, math.ceil(hidden.shape[0] / most))
        size = max(1, math.ceil(hidden.shape[0] / chunks))  # alike: a small last one would leave the GPU idle
        for begin in range(0, hidden.shape[0], size):
            part = slice(begin, begin + size)
            logits = hidden[part] @ head.T
            loss, right = logits_to_gradient(logits, labels[part], weights[part])
            torch.mm(logits, head, out=gradient[part])
            losses.append(loss)
            correct.append(right)
        ctx.save_for_backward(gradient)
        right = torch.cat(correct)
        ctx.mark_non_differentiable(right)
        return torch.cat(losses).sum(), right

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_loss: Tensor, by_correct: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ARG004
        (gradient,) = ctx.saved_tensors
        return gradient * by_loss.to(gradient.dtype), None, None, None


def logits_to_gradient(logits: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Replaces logits [M, V] by the gradient of Σ weights · cross-entropy.

    Returns the terms of the sum, float32 [M], and whether each row's greatest logit is its label's, bool [M].
    """
    if logits.is_cuda:
        from dflash_trainer import loss_kernel

        return loss_kernel.logits_to_gradient(logits, labels, weights)
    wide, label = logits.float(), labels[:, None]
    correct = wide.argmax(-1) == labels
    normaliser = wide.logsumexp(-1, keepdim=True)
    losses = weights * (normaliser - wide.gather(-1, label)).squeeze(-1)
    probabilities = (wide - normaliser).exp_()
    probabilities.scatter_add_(-1, label, -torch.ones_like(label, dtype=torch.float32))
    logits.copy_(probabilities.mul_(weights[:, None]))
    return losses, correct


def weighted_cross_entropy(hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Σ weights · cross-entropy, and whether each row's most likely token is its label.

    hidden [M, H] and head [V, H] (frozen: gets no gradient) of one dtype, labels [M] int64, weights [M]
    float32. Never holds more than LOGITS_AT_A_TIME logits. Returns a float32 scalar and booleans [M].
    """
    loss, correct = _WeightedCrossEntropy.apply(hidden, head, labels, weights)  # type: ignore[no-untyped-call]
    return loss, correct
