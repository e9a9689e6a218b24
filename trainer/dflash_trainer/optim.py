"""AdamW and its learning rate, as published for DFlash (arXiv 2602.06036)."""

import math
from collections.abc import Iterable

import torch
from torch import nn


def learning_rate(step: int, total_steps: int, peak: float, warmup: float) -> float:
    """The rate of 0-based `step`: linear over the first share `warmup` of all steps, then cosine to zero."""
    warm = max(1, round(warmup * total_steps))
    if step < warm:
        return peak * (step + 1) / warm
    progress = (step - warm) / max(1, total_steps - warm)
    return peak * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def make_optimizer(parameters: Iterable[nn.Parameter], lr: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW in fused form. Weight decay spares the norms, as is usual."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, fused=True)
