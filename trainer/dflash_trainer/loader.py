"""One batch, cut out of the token store by slicing: the same for the same step, whoever cuts it."""

from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from dflash_trainer.plan import Plan, draw_anchors
from dflash_trainer.store import TokenStore


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one optimizer step, padded to the longest; B rows, T tokens, N blocks of S positions a row.

    M positions are trained. Which ones is known here, on the host: to ask a GPU for them would wait for it.
    """

    step: int
    epoch: int
    tokens: int  # without padding
    row_ids: tuple[int, ...]  # [B] of the data set
    input_ids: Tensor  # [B, T] int64
    anchors: Tensor  # [B, N] int64; 0 for a padding block
    block_ids: Tensor  # [B, N·S] int64: anchor token, mask, mask, …
    positions: Tensor  # [B, N·S] int64: of each in its sequence
    trained: Tensor  # [M] int64: where in [B, N·S], flattened; ascending
    labels: Tensor  # [M] int64
    weights: Tensor  # [M] float32, above zero
    counts: tuple[int, ...]  # [S] how many are trained at each position of a block
    ends: tuple[int, ...]  # [B + 1] row i's are those from ends[i] to ends[i+1]
    total_weight: float  # what the sum over all rows of the step is divided by

    def rows(self, begin: int, end: int) -> "Batch":
        """Some of its rows, out of the same step."""
        first, last = self.ends[begin], self.ends[end]
        by_row = ("row_ids", "input_ids", "anchors", "block_ids", "positions")
        return replace(
            self,
            **{name: getattr(self, name)[begin:end] for name in by_row},
            trained=self.trained[first:last] - begin * self.block_ids.shape[1],
            labels=self.labels[first:last],
            weights=self.weights[first:last],
            ends=tuple(at - first for at in self.ends[begin : end + 1]),
        )

    def to(self, device: torch.device) -> "Batch":
        """The batch on a device; the copy does not wait for the host."""
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, value in moved.items():
            if isinstance(value, Tensor):
                pinned = value.pin_memory() if device.type == "cuda" else value
                moved[name] = pinned.to(device, non_blocking=True)
        return Batch(**moved)


@dataclass(frozen=True, slots=True)
class Cutter:
    """What every batch of a run is cut with."""

    store: TokenStore
    plan: Plan
    seed: int
    max_anchors: int
    mask_token_id: int
    position_weights: np.ndarray[tuple[int], np.dtype[np.float32]]  # [S]
    by_block: bool = False  # the loss is the mean over blocks, not over all weights

    def cut(self, step: int) -> Batch:
        """The batch of a 0-based optimizer step."""
        epoch, index = self.plan.locate(step)
        rows = self.plan.epochs[epoch][index]
        offsets = self.store.survey.offsets
        size = len(self.position_weights)
        lengths = offsets[rows + 1] - offsets[rows]
        drawn = [
            draw_anchors(
                self.store.loss_mask[offsets[r] : offsets[r + 1]], self.max_anchors, self.seed, epoch, int(r)
            )
            for r in rows
        ]
        shape = (len(rows), int(lengths.max()))
        blocks = max(len(anchors) for anchors in drawn)
        ids = np.zeros(shape, np.int64)
        anchors = np.zeros((len(rows), blocks), np.int64)
        weights = np.zeros((len(rows), blocks, size), np.float32)
        labels = np.zeros((len(rows), blocks, size), np.int64)
        block_ids = np.full((len(rows), blocks, size), self.mask_token_id, np.int64)
        for i, (row, own) in enumerate(zip(rows, drawn, strict=True)):
            tokens = self.store.tokens[offsets[row] : offsets[row + 1]]
            supervised = self.store.loss_mask[offsets[row] : offsets[row + 1]]
            ids[i, : len(tokens)] = tokens
            anchors[i, : len(own)] = own
            at = own[:, None] + np.arange(size)
            inside = at < len(tokens)
            at = np.minimum(at, len(tokens) - 1)
            labels[i, : len(own)] = tokens[at]
            weights[i, : len(own)] = self.position_weights * (inside & (supervised[at] != 0))
            block_ids[i, : len(own), 0] = tokens[own]
        positions = anchors[:, :, None] + np.arange(size)
        flat = (len(rows), blocks * size)
        trained = np.flatnonzero(weights)
        return Batch(
            step=step,
            epoch=epoch,
            tokens=int(lengths.sum()),
            row_ids=tuple(self.store.survey.origin[rows].tolist()),
            input_ids=torch.from_numpy(ids),
            anchors=torch.from_numpy(anchors),
            block_ids=torch.from_numpy(block_ids.reshape(flat)),
            positions=torch.from_numpy(positions.reshape(flat)),
            trained=torch.from_numpy(trained),
            labels=torch.from_numpy(labels.reshape(-1)[trained]),
            weights=torch.from_numpy(weights.reshape(-1)[trained]),
            counts=tuple(np.bincount(trained % size, minlength=size).tolist()),
            ends=tuple(np.searchsorted(trained, np.arange(len(rows) + 1) * blocks * size).tolist()),
            total_weight=float(weights.any(-1).sum() if self.by_block else weights.sum()),
        )
