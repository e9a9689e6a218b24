"""Linear layers on float8: what is replaced, and how near the products stay."""

import pytest
import torch
from dflash_trainer.errors import CannotStart
from dflash_trainer.float8 import Float8Linear, check_float8, scaled, to_float8
from torch import nn


@pytest.mark.parametrize("bias", [False, True])
def test_a_product_is_within_float8s_precision_whatever_the_sizes_of_its_rows(bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(512, 256, bias=bias)
    linear.weight.data *= torch.logspace(-4, 4, 256)[:, None]  # outputs of sizes far apart
    x = torch.randn(3, 7, 512) * torch.logspace(-6, 3, 7)[None, :, None]
    linear, x = linear.bfloat16().requires_grad_(False), x.bfloat16()
    plain, eight = linear(x).float(), Float8Linear(linear)(x).float()
    assert eight.shape == plain.shape
    for token in range(7):
        for outputs in (slice(0, 8), slice(-8, None)):
            a, b = eight[:, token, outputs], plain[:, token, outputs]
            assert (a - b).norm() < 0.08 * b.norm(), (token, outputs)


def test_the_greatest_value_is_kept_and_a_row_of_zeros_stays_one() -> None:
    rows = torch.tensor([[1e4, -3e5, 2.0], [0.0, 0.0, 0.0]])
    eight, scale = scaled(rows)
    assert eight.float().abs().max() == torch.finfo(torch.float8_e4m3fn).max
    torch.testing.assert_close((eight.float() * scale)[0, 1], rows[0, 1])
    assert (eight[1].float() == 0).all()


def test_large_products_are_replaced_and_small_ones_are_not() -> None:
    layer = nn.ModuleDict(
        {
            "large": nn.Linear(256, 512),
            "inner": nn.ModuleDict({"deep": nn.Linear(512, 256, bias=False)}),
            "few outputs": nn.Linear(512, 48),
            "uneven": nn.Linear(300, 512),
            "norm": nn.LayerNorm(256),
        }
    ).requires_grad_(False)
    assert to_float8(nn.ModuleList([layer])) == 2
    kinds = {name: type(module) for name, module in layer.named_modules()}
    assert kinds["large"] is kinds["inner.deep"] is Float8Linear
    assert kinds["few outputs"] is kinds["uneven"] is nn.Linear
    held = sum(buffer.numel() * buffer.element_size() for buffer in layer.buffers())
    assert held == 2 * 256 * 512 + 4 * (512 + 256)  # a byte for a weight, and the scales


def test_a_gpu_without_float8_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    for capability in ((8, 0), (7, 5)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        with pytest.raises(CannotStart, match=r"^NVIDIA A100 has no float8 products .*; set dtype = ") as caught:
            check_float8(torch.device("cuda"))
        assert "\n" not in str(caught.value)
    for capability in ((8, 9), (9, 0), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        check_float8(torch.device("cuda"))
    check_float8(torch.device("cpu"))
