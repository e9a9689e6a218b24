"""The chunked losses against torch's own, values and gradients; the weights of positions."""

import pytest
import torch
import torch.nn.functional as F
from dflash_trainer import loss as module
from dflash_trainer.loss import (
    PLAIN,
    LogitShape,
    default_loss_decay,
    dpace_weights,
    position_losses,
    position_weights,
)

SHAPES = (PLAIN, LogitShape(0.5), LogitShape(1.5, 4.0))


@pytest.mark.parametrize("rows", [1, 7, 64, 70])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("distill", [0.0, 0.3, 1.0])
def test_losses_and_gradient_equal_the_plain_form(
    rows: int, shape: LogitShape, distill: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOGITS_AT_A_TIME", {"cpu": 16 * 30})
    torch.manual_seed(0)
    hidden = torch.randn(rows, 12, dtype=torch.float64, requires_grad=True)
    head, taught = torch.randn(30, 12, dtype=torch.float64), torch.randn(rows, 12, dtype=torch.float64)
    labels, weights = torch.randint(30, (rows,)), torch.rand(rows)
    losses, nats, correct = position_losses(hidden, head, labels, shape, distill, taught, LogitShape(0.7, 5.0))
    (losses * weights).sum().backward()
    gradient, hidden.grad = hidden.grad, None
    logits = shape.multiplier * (hidden @ head.T)
    logits = shape.cap * (logits / shape.cap).tanh() if shape.cap else logits
    hard = F.cross_entropy(logits, labels, reduction="none")
    goal = (5.0 * (0.7 * (taught @ head.T) / 5.0).tanh()).log_softmax(-1)
    soft = F.kl_div(logits.log_softmax(-1), goal, reduction="none", log_target=True).sum(-1)
    plain = (1 - distill) * hard + distill * soft
    (plain * weights).sum().backward()
    torch.testing.assert_close(losses.double(), plain, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(nats.double(), hard, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, hidden.grad, rtol=1e-5, atol=1e-5)  # float32
    assert torch.equal(correct, logits.argmax(-1) == labels)


def test_a_row_without_weight_gets_no_gradient() -> None:
    hidden = torch.randn(2, 8, requires_grad=True)
    losses, _, _ = position_losses(hidden, torch.randn(5, 8), torch.tensor([1, 2]))
    (losses * torch.tensor([1.0, 0.0])).sum().backward()
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


def test_dpace_weights_are_sums_of_products_of_smoothed_confidences() -> None:
    nats = torch.tensor([0.2, 1.0, 3.0, 0.5, 2.0])
    trained = torch.tensor([1, 2, 3, 5, 7])  # of two blocks of four; position 6 is not trained
    q = (0.5 * torch.exp(-nats) + 0.5).tolist()
    first = [q[0], q[0] * q[1], q[0] * q[1] * q[2]]
    second = [q[3], q[3] * q[4]]
    expected = [sum(first), sum(first[1:]), first[2], sum(second), second[1]]
    torch.testing.assert_close(dpace_weights(nats, trained, 2, 4), torch.tensor(expected))


def test_dpace_moves_weight_to_later_positions_as_the_first_become_sure() -> None:
    trained = torch.arange(1, 8)
    unsure = dpace_weights(torch.full((7,), 5.0), trained, 1, 8)
    sure = dpace_weights(torch.tensor([0.0] * 4 + [5.0] * 3), trained, 1, 8)
    assert unsure[0] / unsure[6] > 3 * sure[0] / sure[6]
    assert (unsure.diff() <= 0).all()
