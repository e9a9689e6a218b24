"""The part of the loss between its two matrix products, on a GPU: two passes over the logits, in place (Triton)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 4096  # a program works on so many of a row at once
WARPS = 8


@triton.jit  # type: ignore[untyped-decorator]
def _softmax_kernel(  # type: ignore[no-untyped-def]  # Triton reads annotations, and knows its own only
    logits,
    labels,
    weights,
    losses,
    correct,
    vocabulary,
    columns: tl.constexpr,
):
    """A row: each lane keeps the greatest logit that it met, where, and the sum of exponentials beside it."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocabulary
    label = tl.load(labels + row).to(tl.int32)
    weight = tl.load(weights + row)
    lane = tl.arange(0, columns)
    greatest = tl.full((columns,), -3e38, tl.float32)  # not -inf: less itself it is no number
    place = tl.zeros((columns,), tl.int32)
    total = tl.zeros((columns,), tl.float32)
    of_label = tl.zeros((columns,), tl.float32)
    for start in range(0, vocabulary, columns):
        at = start + lane
        logit = tl.load(logits + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32)
        place = tl.where(logit > greatest, at, place)
        before = greatest
        greatest = tl.maximum(greatest, logit)
        total = total * tl.exp(before - greatest) + tl.exp(logit - greatest)
        of_label = tl.where(at == label, logit, of_label)
    top = tl.max(greatest)
    normaliser = top + tl.log(tl.sum(total * tl.exp(greatest - top)))
    best = tl.min(tl.where(greatest == top, place, vocabulary))  # the first of equals, as on a CPU
    tl.store(losses + row, weight * (normaliser - tl.sum(of_label)))
    tl.store(correct + row, best == label)
    for start in range(0, vocabulary, columns):
        at = start + lane
        here = at < vocabulary
        logit = tl.load(logits + at, mask=here, other=float("-inf")).to(tl.float32)
        gradient = weight * (tl.exp(logit - normaliser) - (at == label).to(tl.float32))
        tl.store(logits + at, gradient, mask=here)


def logits_to_gradient(logits: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """As loss.logits_to_gradient; logits [M, V] contiguous."""
    rows, vocabulary = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    correct = torch.empty(rows, dtype=torch.bool, device=logits.device)
    _softmax_kernel[(rows,)](logits, labels, weights, losses, correct, vocabulary, columns=COLUMNS, num_warps=WARPS)
    return losses, correct
