"""A target whose large matrix products run on float8 weights and activations, as many servers run it.

Each row of a weight, and each token's activations when they come, are scaled to the range of float8 e4m3.
Embedding, LM head, norms and products with few outputs keep their type.
"""

import torch
from torch import Tensor, nn

from dflash_trainer.errors import CannotStart

TYPE = torch.float8_e4m3fn
LARGEST = torch.finfo(TYPE).max  # 448
FEWEST = 256  # outputs or inputs: products with fewer cost nothing
CAPABILITY = (8, 9)  # Ada; Hopper is 9.0
STEP = 16  # the sizes of both are multiples of it, as the GPU's instructions want


class Float8Linear(nn.Module):
    """A frozen linear layer: weight [N, K] as float8, with a scale for each of its rows."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight, scale = scaled(linear.weight)
        self.weight = nn.Buffer(weight)
        self.scale = nn.Buffer(scale.T.contiguous())  # [1, N]
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] to [..., N] of the same type."""
        rows, scale = scaled(x.flatten(0, -2))
        out = product(rows, scale, self.weight, self.scale, x.dtype).view(*x.shape[:-1], -1)
        return out if self.bias is None else out + self.bias


def product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """a [M, K] times b [N, K] transposed, both float8, with scales float32 [M, 1] and [1, N]; [M, N] of `dtype`."""
    # Of torch's own functions for this the one that its compiler knows; it has no public name.
    out: Tensor = torch._scaled_mm(a, b.T, scale_a=a_scale, scale_b=b_scale, out_dtype=dtype, use_fast_accum=True)
    return out


def scaled(rows: Tensor) -> tuple[Tensor, Tensor]:
    """rows [M, K] as float8 [M, K] and float32 [M, 1], whose product they are."""
    scale = rows.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / LARGEST
    return (rows.float() / scale).to(TYPE), scale


def check_float8(device: torch.device) -> None:
    """Raises CannotStart for a GPU without instructions for float8."""
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY:
        raise CannotStart(
            f"{torch.cuda.get_device_name(device)} has no float8 products (compute capability "
            f'{capability[0]}.{capability[1]}, from 8.9 on); set dtype = "auto" in [target]'
        )


@torch.no_grad()
def to_float8(layers: nn.Module) -> int:
    """Replaces the large linear layers among these, one by one, and returns how many."""
    found = [
        (parent, name, child)
        for parent in layers.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear)
        and min(child.weight.shape) >= FEWEST
        and not any(n % STEP for n in child.weight.shape)
    ]
    for parent, name, child in found:
        setattr(parent, name, Float8Linear(child))
    return len(found)
