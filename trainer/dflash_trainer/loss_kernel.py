"""The part of the loss between its matrix products, on a GPU: two passes over the logits, in place (Triton)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_trainer.loss import PLAIN, LogitShape

COLUMNS = 4096  # a program works on so many of a row at once
WARPS = 8


@triton.jit  # type: ignore[untyped-decorator]
def _shaped(products, multiplier, cap, capped: tl.constexpr):  # type: ignore[no-untyped-def]
    """As LogitShape."""
    logits = products * multiplier
    if capped:
        logits = cap * (2 / (1 + tl.exp(-2 * logits / cap)) - 1)  # tanh
    return logits


@triton.jit  # type: ignore[untyped-decorator]
def _loss_kernel(  # type: ignore[no-untyped-def]  # Triton reads annotations, and knows its own only
    logits,
    taught,
    labels,
    losses,
    nats,
    correct,
    vocabulary,
    multiplier,
    cap,
    taught_multiplier,
    taught_cap,
    distill,
    capped: tl.constexpr,
    taught_capped: tl.constexpr,
    distilling: tl.constexpr,
    columns: tl.constexpr,
):
    """A row: each lane keeps the greatest logit that it met, where, and the sum of exponentials beside it.

    To distill, the same of the target's logits, with the sums of its logits and of ours under its exponentials.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocabulary
    taught += row * vocabulary
    label = tl.load(labels + row).to(tl.int32)
    lane = tl.arange(0, columns)
    greatest = tl.full((columns,), -3e38, tl.float32)  # not -inf: less itself it is no number
    place = tl.zeros((columns,), tl.int32)
    total = tl.zeros((columns,), tl.float32)
    of_label = tl.zeros((columns,), tl.float32)
    taught_greatest = tl.full((columns,), -3e38, tl.float32)
    taught_total = tl.zeros((columns,), tl.float32)
    of_taught = tl.zeros((columns,), tl.float32)
    of_ours = tl.zeros((columns,), tl.float32)
    for start in range(0, vocabulary, columns):
        at = start + lane
        here = at < vocabulary
        logit = _shaped(tl.load(logits + at, mask=here, other=0.0).to(tl.float32), multiplier, cap, capped)
        logit = tl.where(here, logit, float("-inf"))
        place = tl.where(logit > greatest, at, place)
        before = greatest
        greatest = tl.maximum(greatest, logit)
        total = total * tl.exp(before - greatest) + tl.exp(logit - greatest)
        of_label = tl.where(at == label, logit, of_label)
        if distilling:
            goal = tl.load(taught + at, mask=here, other=0.0).to(tl.float32)
            goal = _shaped(goal, taught_multiplier, taught_cap, taught_capped)
            before = taught_greatest
            taught_greatest = tl.maximum(taught_greatest, tl.where(here, goal, float("-inf")))
            faded = tl.exp(before - taught_greatest)
            share = tl.where(here, tl.exp(goal - taught_greatest), 0.0)
            taught_total = taught_total * faded + share
            of_taught = of_taught * faded + share * goal
            of_ours = of_ours * faded + share * tl.where(here, logit, 0.0)
    top = tl.max(greatest)
    normaliser = top + tl.log(tl.sum(total * tl.exp(greatest - top)))
    best = tl.min(tl.where(greatest == top, place, vocabulary))  # the first of equals, as on a CPU
    crossed = normaliser - tl.sum(of_label)
    loss = crossed
    taught_normaliser = 0.0
    if distilling:
        taught_top = tl.max(taught_greatest)
        faded = tl.exp(taught_greatest - taught_top)
        whole = tl.sum(taught_total * faded)
        taught_normaliser = taught_top + tl.log(whole)
        divergence = tl.sum((of_taught - of_ours) * faded) / whole - taught_normaliser + normaliser
        loss = (1 - distill) * crossed + distill * divergence
    tl.store(losses + row, loss)
    tl.store(nats + row, crossed)
    tl.store(correct + row, best == label)
    for start in range(0, vocabulary, columns):
        at = start + lane
        here = at < vocabulary
        logit = _shaped(tl.load(logits + at, mask=here, other=0.0).to(tl.float32), multiplier, cap, capped)
        gradient = tl.exp(logit - normaliser) - (1 - distill) * (at == label).to(tl.float32)
        if distilling:
            goal = tl.load(taught + at, mask=here, other=0.0).to(tl.float32)
            goal = _shaped(goal, taught_multiplier, taught_cap, taught_capped)
            gradient -= distill * tl.exp(goal - taught_normaliser)
        if capped:
            gradient *= 1 - (logit / cap) * (logit / cap)
        tl.store(logits + at, gradient * multiplier, mask=here)


def logits_to_gradient(
    logits: Tensor,
    labels: Tensor,
    shape: LogitShape = PLAIN,
    distill: float = 0.0,
    taught: Tensor | None = None,
    taught_shape: LogitShape = PLAIN,
) -> tuple[Tensor, Tensor, Tensor]:
    """As loss.logits_to_gradient; logits and taught [M, V] contiguous."""
    rows, vocabulary = logits.shape
    losses, nats = torch.empty(2, rows, dtype=torch.float32, device=logits.device)
    correct = torch.empty(rows, dtype=torch.bool, device=logits.device)
    _loss_kernel[(rows,)](
        logits,
        logits if taught is None else taught,
        labels,
        losses,
        nats,
        correct,
        vocabulary,
        float(shape.multiplier),
        float(shape.cap),
        float(taught_shape.multiplier),
        float(taught_shape.cap),
        float(distill),
        capped=shape.cap > 0,
        taught_capped=taught_shape.cap > 0,
        distilling=taught is not None,
        columns=COLUMNS,
        num_warps=WARPS,
    )
    return losses, nats, correct
