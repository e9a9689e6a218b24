"""torch.compile as the layers of target and drafter use it."""

import warnings
from collections.abc import Callable
from typing import Any

import torch

RECOMPILE_LIMIT = (
    64  # torch's own is 8; beyond it a function runs uncompiled, and FlexAttention holds all scores then
)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled when first called, for any size; one row, one tile of queries and the like are cases of their own.

    Layers whose forward is one piece of code share what was compiled for the first of them.
    """
    import torch._dynamo as dynamo  # a second or two, and nothing without a GPU needs it

    dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, RECOMPILE_LIMIT)
    # What it recommends would round the angles of positions; the large products are of bfloat16 anyway.
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")
    result: Callable[..., Any] = torch.compile(function, dynamic=True)
    return result
