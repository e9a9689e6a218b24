"""The order of batches and the anchors in them: pure functions of the data, the seed and the epoch.

So a position in the data is a number, a resumed run sees what an unbroken one would have seen, and nothing
depends on how many threads load.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LENGTH_JITTER = 0.1
_BATCHES, _ANCHORS = 0, 1  # keys of the two independent random streams


@dataclass(frozen=True, slots=True)
class Epoch:
    """The batches of an epoch; epoch[i] holds the rows (int64) of batch i. Three arrays, not one for each batch."""

    rows: NDArray[np.int64]  # [rows] batch after batch
    starts: NDArray[np.int64]  # [batches + 1] in `rows`
    sequence: NDArray[np.int64]  # [batches] which of them comes when

    def __len__(self) -> int:
        return len(self.sequence)

    def padding(self, lengths: NDArray[np.int64]) -> float:
        """The share of the batches' positions that is padding; lengths [rows] in tokens."""
        of_rows = lengths[self.rows]
        positions = np.maximum.reduceat(of_rows, self.starts[:-1]) * np.diff(self.starts)
        return 1 - int(of_rows.sum()) / int(positions.sum())

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        batch = self.sequence[index]
        return self.rows[self.starts[batch] : self.starts[batch + 1]]


@dataclass(frozen=True, slots=True)
class Plan:
    """All batches of a run."""

    epochs: tuple[Epoch, ...]
    total_steps: int

    def locate(self, step: int) -> tuple[int, int]:
        """Epoch and index in the epoch of the batch that optimizer step `step` (0-based) uses."""
        for epoch, batches in enumerate(self.epochs):
            if step < len(batches):
                return epoch, step
            step -= len(batches)
        raise IndexError(step)


def make_plan(lengths: NDArray[np.int64], token_budget: int, seed: int, epochs: int, max_steps: int = 0) -> Plan:
    """Batches of similar length for every epoch; lengths [rows] in tokens, each at most token_budget."""
    planned = []
    steps = 0
    for epoch in range(epochs):
        planned.append(plan_epoch(lengths, token_budget, seed, epoch))
        steps += len(planned[-1])
        if 0 < max_steps <= steps:
            break
    return Plan(tuple(planned), min(steps, max_steps) if max_steps else steps)


def plan_epoch(lengths: NDArray[np.int64], token_budget: int, seed: int, epoch: int) -> Epoch:
    """Every row once, in batches whose longest row times their size is at most token_budget.

    Rows are sorted by length with a jitter of 10 %, so that neighbours are alike but differ between epochs;
    the batches are then shuffled.
    """
    rng = np.random.default_rng([seed, epoch, _BATCHES])
    order = np.argsort(lengths * rng.uniform(1 - LENGTH_JITTER, 1 + LENGTH_JITTER, len(lengths)), kind="stable")
    starts = [0]
    start = longest = 0
    for row, length in enumerate(lengths[order].tolist()):
        if length > longest:  # as max() is, of some 10 million rows in every start
            longest = length
        if longest * (row - start + 1) > token_budget:
            starts.append(row)
            start, longest = row, length
    return Epoch(order, np.array([*starts, len(order)]), rng.permutation(len(starts)))


def draw_anchors(mask: NDArray[np.uint8], max_anchors: int, seed: int, epoch: int, row: int) -> NDArray[np.int64]:
    """Anchors of one sequence, ascending: drawn without replacement, anew every epoch.

    mask [tokens] is 1 where a token is supervised; an anchor and its successor both are.
    """
    candidates = np.flatnonzero(mask[:-1] & mask[1:])
    if len(candidates) <= max_anchors:
        return candidates.astype(np.int64)
    rng = np.random.default_rng([seed, epoch, _ANCHORS, row])
    return np.sort(rng.choice(candidates, max_anchors, replace=False)).astype(np.int64)
