"""The DFlash drafter: decoder layers whose keys and values also come from the target's hidden states.

arXiv 2602.06036; the checkpoint is the one that the published `dflash` package, SGLang and vLLM load. The
drafter has no embedding and no head: it uses the target's, frozen.
"""

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as serialize
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, FlexKernelOptions, flex_attention

from dflash_trainer.compiling import compiled
from dflash_trainer.errors import CannotStart

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INIT_STD = 0.02


_compiled = functools.cache(compiled)


def spaced_layer_ids(target_layers: int, draft_layers: int) -> tuple[int, ...]:
    """DFlash's choice of tapped layers: evenly spaced from 1 to L−3; the middle one for a single draft layer.

    >>> spaced_layer_ids(64, 5)
    (1, 16, 31, 46, 61)
    """
    if draft_layers == 1:
        return (target_layers // 2,)
    return tuple(round(1 + i * (target_layers - 4) / (draft_layers - 1)) for i in range(draft_layers))


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """Sizes of a drafter. `target_layer_ids` are 0-based, "after layer i" of the target."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    vocab_size: int
    max_position_embeddings: int
    num_target_layers: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]

    def to_json(self, dtype: str) -> dict[str, Any]:
        """config.json as its readers expect it: both spellings of RoPE, full rotation, no mrope."""
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "dtype": dtype,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "attention_bias": False,
            "attention_dropout": 0.0,
            "layer_types": ["full_attention"] * self.num_hidden_layers,
            "use_sliding_window": False,
            "tie_word_embeddings": False,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_position_embeddings,
            "num_target_layers": self.num_target_layers,
            "block_size": self.block_size,
            "dflash_config": {
                "target_layer_ids": list(self.target_layer_ids),
                "mask_token_id": self.mask_token_id,
            },
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "DrafterConfig":
        """The sizes in a config.json. Raises KeyError for one that is missing."""
        rope = values.get("rope_parameters") or {}
        fields = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        fields["rope_theta"] = float(rope["rope_theta"] if "rope_theta" in rope else values["rope_theta"])
        fields["mask_token_id"] = values["dflash_config"]["mask_token_id"]
        fields["target_layer_ids"] = tuple(values["dflash_config"]["target_layer_ids"])
        return cls(**fields)


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last axis; the mean is taken in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * normed.to(x.dtype)


def rotary_angles(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin [B, 1, S, head_dim], float32, of positions [B, S]."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions[:, None, :, None].float() * (1.0 / theta**exponent)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, heads, S, head_dim] turned by its positions' angles, in halves as Qwen and Llama do."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-second, first), dim=-1) * sin.to(x.dtype)


class Attention(nn.Module):
    """Queries from the blocks; keys and values from [context, blocks] through the same projections."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        hidden, dim = config.hidden_size, config.head_dim
        self.head_dim = dim
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * dim, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * dim, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * dim, hidden, bias=False)
        self.q_norm = RMSNorm(dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(dim, config.rms_norm_eps)

    def forward(
        self, x: Tensor, context: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | BlockMask | None
    ) -> Tensor:
        queries = x.shape[1]
        q = self.q_norm(self._heads(self.q_proj(x)))
        keys = torch.cat((self.k_proj(context), self.k_proj(x)), dim=1)
        values = torch.cat((self.v_proj(context), self.v_proj(x)), dim=1)
        k, v = self.k_norm(self._heads(keys)), self._heads(values)
        q = rotate(q, cos[:, :, -queries:], sin[:, :, -queries:])
        k = rotate(k, cos, sin)
        if isinstance(mask, BlockMask):
            # TRITON: the choice that AUTO makes for fewer than 128 queries fails to compile with dynamic shapes.
            options: FlexKernelOptions = {"BACKEND": "TRITON"}
            out = flex_attention(q, k, v, block_mask=mask, enable_gqa=True, kernel_options=options)
        else:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        mixed: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return mixed

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)  # [B, heads, S, head_dim]


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Pre-norm attention and MLP. The context is normed once, by `hidden_norm`, for all layers."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x: Tensor, context: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | BlockMask | None
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, cos, sin, mask)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Drafter(nn.Module):
    """Draft layers over blocks of [anchor token, mask, mask, …], conditioned on the target's states."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def reset_parameters(self, seed: int) -> None:
        """Fresh weights: normal with standard deviation 0.02, norms at one; the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.dim() == 1:
                nn.init.ones_(parameter)
            else:
                fresh = torch.empty(parameter.shape).normal_(0.0, INIT_STD, generator=generator)
                parameter.data.copy_(fresh)

    @torch.no_grad()
    def calm_output(self, head: Tensor) -> None:
        """Scales the fresh final norm so that logits through `head` [V, H] start with a standard deviation of 1.

        A head may be large, since it was trained behind a norm with small gains: SmolLM2's gives a fresh drafter
        logits so spread that its loss starts at 53 nats, where knowing nothing costs ln V = 10.8.
        """
        spread = head.float().std() * self.config.hidden_size**0.5
        self.norm.weight.fill_(1 / max(spread.item(), 1.0))

    def forward(
        self, noise: Tensor, positions: Tensor, context: Tensor, mask: Tensor | BlockMask | None = None
    ) -> Tensor:
        """Hidden states after the final norm [B, Q, H], to be fed to the target's head.

        noise [B, Q, H]: the target's embeddings of the blocks' tokens. positions [B, Q] int64: of each of them
        in its sequence. context [B, T, n·H]: the tapped states, concatenated, at positions 0…T−1. mask: see
        mask.py; None lets every query see everything, which is right for one block after its whole context.

        With a BlockMask the layers are compiled, as FlexAttention has to be; what surrounds it joins the kernels.
        """
        layer_forward: Callable[..., Tensor] = (
            _compiled(Layer.forward) if isinstance(mask, BlockMask) else Layer.forward
        )
        injected = self.hidden_norm(self.fc(context))
        before = torch.arange(context.shape[1], device=positions.device).expand(positions.shape[0], -1)
        cos, sin = rotary_angles(
            torch.cat((before, positions), dim=1), self.config.head_dim, self.config.rope_theta
        )
        x = noise
        for layer in self.layers:
            x = layer_forward(layer, x, injected, cos, sin, mask)
        out: Tensor = self.norm(x)
        return out


def save_drafter(state: dict[str, Tensor], config: DrafterConfig, directory: Path, dtype: torch.dtype) -> None:
    """Writes a Hugging Face directory that DFlash's readers load. `state` is the drafter's state_dict."""
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config.to_json(str(dtype).removeprefix("torch.")), indent=2)
    (directory / CONFIG_FILE).write_text(text + "\n")
    tensors = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in state.items()}
    # By way of bytes: safetensors' own writer hides a full disk behind an error of its own.
    (directory / WEIGHTS_FILE).write_bytes(serialize(tensors, metadata={"format": "pt"}))


def load_drafter(
    directory: Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> Drafter:
    """The drafter in a directory written by save_drafter. Raises CannotStart if it is not one."""
    try:
        config = DrafterConfig.from_json(json.loads((directory / CONFIG_FILE).read_text()))
        state = load_file(directory / WEIGHTS_FILE)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CannotStart(
            f"{directory} is not a drafter: {type(error).__name__}: {error}; give a directory that holds "
            f"{CONFIG_FILE} and {WEIGHTS_FILE}, such as OUTPUT/drafter of a run"
        ) from error
    with torch.device("meta"):
        drafter = Drafter(config)
    try:
        drafter.load_state_dict(state, assign=True)
    except RuntimeError as error:
        detail = " ".join(str(error).split())
        raise CannotStart(f"{directory}: weights do not fit {CONFIG_FILE}: {detail}") from error
    return drafter.to(device, dtype)
