"""What a drafted position costs, through the target's frozen head, in chunks of rows; and what weight it has.

Hard labels: cross-entropy to the data's tokens (arXiv 2602.06036). Distillation: the Kullback-Leibler divergence
from the target's own distribution. Weights: fixed, falling by position, or D-PACE's (arXiv 2605.18810), which
follow from the drafter's confidence.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

LOGITS_AT_A_TIME = {"cuda": 1 << 30, "cpu": 1 << 26}  # the rows of so many make a matrix product that fills it
DPACE_SMOOTHING = 0.5  # α as published


@dataclass(frozen=True, slots=True)
class Objective:
    """How a drafter is trained."""

    distill: float = 0.0  # share of the divergence from the target's distribution; the rest is that of hard labels
    dpace: bool = False


@dataclass(frozen=True, slots=True)
class LogitShape:
    """What a model does to the products with its head: cap · tanh(multiplier · x / cap); cap 0: none."""

    multiplier: float = 1.0
    cap: float = 0.0

    def __call__(self, products: Tensor) -> Tensor:
        logits = products if self.multiplier == 1 else products * self.multiplier
        return self.cap * torch.tanh(logits / self.cap) if self.cap else logits


PLAIN = LogitShape()


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


@torch.no_grad()
def dpace_weights(nats: Tensor, trained: Tensor, blocks: int, block_size: int) -> Tensor:
    """D-PACE's weight of each trained position: how much of the expected acceptance length hangs on it.

    nats [M] float32 is the cross-entropy there, `trained` [M] where in the blocks [blocks · block_size], flattened.
    With q = (1 − α) · exp(−nats) + α, the weight of position j is the sum over m ≥ j of q₁ · … · qₘ (equations 7
    and 8). Positions that are not trained neither count nor end a block.
    """
    confidence = torch.ones(blocks * block_size, device=nats.device)
    counts = torch.zeros_like(confidence)
    confidence[trained] = (1 - DPACE_SMOOTHING) * torch.exp(-nats) + DPACE_SMOOTHING
    counts[trained] = 1.0
    reached = confidence.view(blocks, block_size).cumprod(-1) * counts.view(blocks, block_size)
    return reached.flip(-1).cumsum(-1).flip(-1).flatten()[trained]


class _PositionLosses(Function):
    """The gradient by the hidden states is formed with the losses: the head is frozen and needs none."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        labels: Tensor,
        shape: LogitShape,
        distill: float,
        taught: Tensor | None,
        taught_shape: LogitShape,
        keep: int,
    ) -> tuple[Tensor, ...]:
        gradient = torch.empty_like(hidden)
        found = []
        most = max(1, LOGITS_AT_A_TIME[hidden.device.type] // head.shape[0])
        chunks = max(1, math.ceil(hidden.shape[0] / most))
        size = max(1, math.ceil(hidden.shape[0] / chunks))  # alike: a small last one would leave the GPU idle
        for begin in range(0, hidden.shape[0], size):
            part = slice(begin, begin + size)
            logits = hidden[part] @ head.T
            goal = None if taught is None else taught[part] @ head.T
            kept = logits.topk(keep) if keep else ()
            found.append((*logits_to_gradient(logits, labels[part], shape, distill, goal, taught_shape), *kept))
            torch.mm(logits, head, out=gradient[part])
        ctx.save_for_backward(gradient)
        losses, *others = (torch.cat(parts) for parts in zip(*found, strict=True))
        ctx.mark_non_differentiable(*others)
        return losses, *others

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_losses: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * by_losses[:, None].to(gradient.dtype), *[None] * 7


def logits_to_gradient(
    logits: Tensor,
    labels: Tensor,
    shape: LogitShape = PLAIN,
    distill: float = 0.0,
    taught: Tensor | None = None,
    taught_shape: LogitShape = PLAIN,
) -> tuple[Tensor, Tensor, Tensor]:
    """Replaces products with the head, logits [M, V], by the gradient of each row's loss.

    taught [M, V]: the target's products, needed to distill. Returns the losses and, of hard labels alone, the
    cross-entropies, both float32 [M], and whether each row's greatest logit is its label's, bool [M].
    """
    if logits.is_cuda:
        from dflash_trainer import loss_kernel

        return loss_kernel.logits_to_gradient(logits, labels, shape, distill, taught, taught_shape)
    wide, label = shape(logits.float()), labels[:, None]
    correct = wide.argmax(-1) == labels
    normaliser = wide.logsumexp(-1, keepdim=True)
    losses = nats = (normaliser - wide.gather(-1, label)).squeeze(-1)
    gradient = (wide - normaliser).exp_()
    gradient.scatter_add_(-1, label, torch.full_like(label, distill - 1, dtype=torch.float32))
    if taught is not None:
        certainty = taught_shape(taught.float()).log_softmax(-1)
        goal = certainty.exp()
        divergence = (goal * (certainty - wide + normaliser)).sum(-1)
        losses = (1 - distill) * nats + distill * divergence
        gradient -= distill * goal
    if shape.cap:
        gradient *= 1 - (wide / shape.cap).square()
    logits.copy_(gradient.mul_(shape.multiplier))
    return losses, nats, correct


def position_losses(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    shape: LogitShape = PLAIN,
    distill: float = 0.0,
    taught: Tensor | None = None,
    taught_shape: LogitShape = PLAIN,
    keep: int = 0,
) -> tuple[Tensor, ...]:
    """What each position costs (differentiable) and its cross-entropy, in nats, float32 [M]; whether it is right.

    hidden [M, H], head [V, H] (frozen: gets no gradient) and taught [M, H], the target's final states at the
    positions before, of one dtype; labels [M] int64. Never holds more than LOGITS_AT_A_TIME logits of each kind.
    With `keep` also the greatest products with the head and their tokens, [M, keep] each.
    """
    found: tuple[Tensor, ...] = _PositionLosses.apply(  # type: ignore[no-untyped-call]
        hidden, head, labels, shape, distill, taught if distill else None, taught_shape, keep
    )
    return found
