"""A batch against what the method says, position by position."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import MASK_TOKEN, VOCABULARY, load_store, save_dataset
from dflash_trainer.loader import Batch, Cutter
from dflash_trainer.loss import position_weights
from dflash_trainer.plan import make_plan

BLOCK = 4


def cutter(directory: Path, max_anchors: int = 8) -> Cutter:
    store = load_store(directory, 256, VOCABULARY)
    plan = make_plan(np.diff(store.survey.offsets), 256, seed=0, epochs=2)
    return Cutter(store, plan, 0, max_anchors, MASK_TOKEN, position_weights(BLOCK, 2.0).numpy())


def spread(batch: Batch, values: torch.Tensor) -> torch.Tensor:
    """Values [M] of the trained positions where they belong, [B, N·S]; zero elsewhere."""
    full = torch.zeros(batch.block_ids.numel(), dtype=values.dtype)
    full[batch.trained] = values
    return full.view(batch.block_ids.shape)


def test_every_position_of_every_block_is_what_the_method_says(dataset_dir: Path) -> None:
    made = cutter(dataset_dir)
    store, decay = made.store, position_weights(BLOCK, 2.0)
    for step in range(made.plan.total_steps):
        batch = made.cut(step)
        weights, labels = spread(batch, batch.weights), spread(batch, batch.labels)
        epoch, index = made.plan.locate(step)
        for i, row in enumerate(made.plan.epochs[epoch][index]):
            tokens = store.tokens[store.survey.offsets[row] : store.survey.offsets[row + 1]]
            mask = store.loss_mask[store.survey.offsets[row] : store.survey.offsets[row + 1]]
            assert batch.input_ids[i, : len(tokens)].tolist() == tokens.tolist()
            for j, anchor in enumerate(batch.anchors[i].tolist()):
                block = slice(j * BLOCK, (j + 1) * BLOCK)
                assert batch.positions[i, block].tolist() == [anchor + k for k in range(BLOCK)]
                if anchor == 0 and not weights[i, block].any():
                    continue  # padding
                assert batch.block_ids[i, block].tolist() == [tokens[anchor]] + [MASK_TOKEN] * (BLOCK - 1)
                for k in range(BLOCK):
                    trained = k > 0 and anchor + k < len(tokens) and mask[anchor + k]
                    weight = weights[i, j * BLOCK + k]
                    assert weight == (decay[k] if trained else 0)
                    if trained:
                        assert labels[i, j * BLOCK + k] == tokens[anchor + k]


def test_the_first_supervised_tokens_are_trained(tmp_path: Path) -> None:
    directory = save_dataset(tmp_path / "d", {"input_ids": [[9, 8, 7, 6]], "loss_mask": [[0, 1, 1, 1]]})
    batch = cutter(directory).cut(0)
    assert batch.anchors.tolist() == [[1, 2]]
    assert batch.labels.tolist() == [7, 6, 6]


def test_a_batch_is_the_same_whenever_it_is_cut(dataset_dir: Path) -> None:
    one, two = cutter(dataset_dir), cutter(dataset_dir)
    two.cut(0)
    for name in Batch.__slots__:
        first, second = getattr(one.cut(3), name), getattr(two.cut(3), name)
        assert torch.equal(first, second) if isinstance(first, torch.Tensor) else first == second


def test_the_limit_of_anchors_is_by_sequence_and_not_by_batch(dataset_dir: Path) -> None:
    made = cutter(dataset_dir, max_anchors=6)
    batch = made.cut(0)
    assert len(batch.anchors) > 1
    assert batch.anchors.shape[1] == 6
    assert ((spread(batch, batch.weights).unflatten(1, (-1, BLOCK)) > 0).any(-1).sum(1) == 6).all()


def test_any_rows_of_a_batch_are_what_they_are_in_the_whole(dataset_dir: Path) -> None:
    whole = cutter(dataset_dir).cut(0)
    rows = len(whole.input_ids)
    assert rows > 3
    assert whole.total_weight == pytest.approx(float(whole.weights.sum()))
    for begin, end in itertools.combinations(range(rows + 1), 2):
        piece = whole.rows(begin, end)
        assert piece.row_ids == whole.row_ids[begin:end]
        assert len(piece.ends) == end - begin + 1
        assert piece.total_weight == whole.total_weight
        for name in ("input_ids", "anchors", "block_ids", "positions"):
            assert torch.equal(getattr(piece, name), getattr(whole, name)[begin:end])
        for name in ("labels", "weights"):
            expected = spread(whole, getattr(whole, name))[begin:end]
            assert torch.equal(spread(piece, getattr(piece, name)), expected)


def test_a_step_beyond_the_plan_is_an_error(dataset_dir: Path) -> None:
    made = cutter(dataset_dir)
    with pytest.raises(IndexError):
        made.cut(made.plan.total_steps)
