"""Batches and anchors: complete, within budget, the same for the same seed."""

import numpy as np
import pytest
from dflash_trainer.plan import draw_anchors, make_plan, plan_epoch
from hypothesis import given
from hypothesis import strategies as st

LENGTHS = st.lists(st.integers(2, 64), min_size=1, max_size=200).map(lambda x: np.array(x, np.int64))


@given(LENGTHS, st.integers(64, 512), st.integers(0, 5), st.integers(0, 3))
def test_an_epoch_holds_every_row_once_and_no_batch_exceeds_the_budget(
    lengths: "np.ndarray", budget: int, seed: int, epoch: int
) -> None:
    batches = plan_epoch(lengths, budget, seed, epoch)
    assert sorted(np.concatenate(batches)) == list(range(len(lengths)))
    for rows in batches:
        assert len(rows) * lengths[rows].max() <= budget


def test_the_same_seed_and_epoch_give_the_same_plan_and_others_another() -> None:
    lengths = np.random.default_rng(0).integers(2, 60, 300)
    flat = [np.concatenate(plan_epoch(lengths, 256, s, e)).tolist() for s, e in [(1, 0), (1, 0), (1, 1), (2, 0)]]
    assert flat[0] == flat[1]
    assert flat[0] != flat[2]
    assert flat[0] != flat[3]


def test_batches_are_of_similar_length() -> None:
    lengths = np.random.default_rng(0).integers(20, 1000, 2000)
    padded = sum(len(rows) * int(lengths[rows].max()) for rows in plan_epoch(lengths, 8192, 0, 0))
    assert padded < 1.15 * lengths.sum()


def test_a_step_is_found_again_and_max_steps_cuts_the_plan() -> None:
    lengths = np.full(10, 8, np.int64)
    plan = make_plan(lengths, 16, seed=0, epochs=3)
    assert plan.total_steps == 15
    assert [plan.locate(s) for s in (0, 4, 5, 14)] == [(0, 0), (0, 4), (1, 0), (2, 4)]
    with pytest.raises(IndexError):
        plan.locate(15)
    assert make_plan(lengths, 16, seed=0, epochs=3, max_steps=7).total_steps == 7
    assert make_plan(lengths, 16, seed=0, epochs=3, max_steps=99).total_steps == 15


@given(st.lists(st.integers(0, 1), min_size=2, max_size=80), st.integers(1, 20), st.integers(0, 9))
def test_anchors_and_their_successors_are_supervised_and_distinct(mask: list[int], limit: int, row: int) -> None:
    array = np.array(mask, np.uint8)
    anchors = draw_anchors(array, limit, seed=3, epoch=1, row=row)
    possible = [i for i in range(len(mask) - 1) if mask[i] and mask[i + 1]]
    assert len(anchors) == min(limit, len(possible))
    assert set(anchors) <= set(possible)
    assert np.all(np.diff(anchors) > 0)


def test_anchors_are_drawn_anew_every_epoch_and_every_sequence_has_its_own_limit() -> None:
    mask = np.ones(200, np.uint8)
    first, again, next_epoch, other_row = (
        draw_anchors(mask, 16, 0, epoch, row).tolist() for epoch, row in [(0, 5), (0, 5), (1, 5), (0, 6)]
    )
    assert first == again
    assert first != next_epoch
    assert first != other_row
    assert len(first) == len(other_row) == 16


def test_the_share_of_padding_is_that_of_the_batches() -> None:
    lengths = np.random.default_rng(0).integers(2, 3000, 500)
    epoch = plan_epoch(lengths, 8192, 0, 0)
    positions = sum(len(rows) * int(lengths[rows].max()) for rows in epoch)
    assert epoch.padding(lengths) == pytest.approx(1 - lengths.sum() / positions)
    assert 0 < epoch.padding(lengths) < 0.25
