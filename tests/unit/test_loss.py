"""The chunked loss against torch's own cross-entropy, values and gradients."""

import pytest
import torch
import torch.nn.functional as F
from dflash_trainer import loss as module
from dflash_trainer.loss import default_loss_decay, position_weights, weighted_cross_entropy


@pytest.mark.parametrize("rows", [1, 7, 64, 70])
def test_loss_and_gradient_equal_the_plain_form(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOGITS_AT_A_TIME", {"cpu": 16 * 30})
    torch.manual_seed(0)
    hidden = torch.randn(rows, 12, dtype=torch.float64, requires_grad=True)
    head = torch.randn(30, 12, dtype=torch.float64)
    labels = torch.randint(30, (rows,))
    weights = torch.rand(rows)
    ours, correct = weighted_cross_entropy(hidden, head, labels, weights)
    (ours * 3).backward()
    gradient = hidden.grad
    assert gradient is not None
    hidden.grad = None
    logits = hidden @ head.T
    plain = (F.cross_entropy(logits, labels, reduction="none") * weights).sum()
    (plain * 3).backward()
    torch.testing.assert_close(ours.double(), plain, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, hidden.grad, rtol=1e-5, atol=1e-5)  # float32
    assert torch.equal(correct, logits.argmax(-1) == labels)


def test_a_row_without_weight_adds_nothing_and_gets_no_gradient() -> None:
    hidden = torch.randn(2, 8, requires_grad=True)
    head, labels = torch.randn(5, 8), torch.tensor([1, 2])
    loss, _ = weighted_cross_entropy(hidden, head, labels, torch.tensor([1.0, 0.0]))
    alone, _ = weighted_cross_entropy(hidden[:1], head, labels[:1], torch.ones(1))
    assert loss.item() == pytest.approx(alone.item(), abs=1e-5)  # float32
    loss.backward()
    assert hidden.grad is not None
    assert hidden.grad[1].abs().max() == 0
    assert hidden.grad[0].abs().max() > 0


def test_weights_fall_by_position_and_the_anchor_is_not_trained() -> None:
    weights = position_weights(16, 0.0)
    assert weights[0] == 0
    assert weights[1] == 1
    torch.testing.assert_close(weights[8], torch.tensor(-1.0).exp())  # exp(−(8−1)/7)
    assert (weights[1:].diff() < 0).all()


def test_the_published_decays_are_the_defaults() -> None:
    assert default_loss_decay(16) == pytest.approx(7.0)
    assert default_loss_decay(8) == pytest.approx(4.0)
    torch.testing.assert_close(position_weights(8, 2.0)[3], torch.tensor(-1.0).exp())
