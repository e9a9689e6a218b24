"""The learning rate's course and what weight decay spares."""

import itertools

import pytest
import torch
from dflash_trainer.optim import learning_rate, make_optimizer


def test_it_warms_up_linearly_peaks_and_falls_to_nearly_zero() -> None:
    rates = [learning_rate(s, 1000, 6e-4, 0.04) for s in range(1000)]
    assert rates[0] == pytest.approx(6e-4 / 40)
    assert max(rates) == rates[39] == pytest.approx(6e-4)
    assert all(a >= b for a, b in itertools.pairwise(rates[40:]))
    assert rates[520] == pytest.approx(3e-4)
    assert rates[-1] < 1e-8


@pytest.mark.parametrize("total", [1, 2, 3])
def test_very_short_runs_still_move(total: int) -> None:
    assert all(learning_rate(s, total, 1.0, 0.04) > 0 for s in range(total))


def test_norms_are_not_decayed() -> None:
    matrix, norm = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    optimizer = make_optimizer([matrix, norm], 0.1, 0.5)
    matrix.grad, norm.grad = torch.zeros(2, 2), torch.zeros(2)
    optimizer.step()
    assert norm.tolist() == [1, 1]
    assert matrix.max() < 1
