"""The DFlash drafter: decoder layers whose keys and values also come from the target's hidden states.

arXiv 2602.06036; the checkpoint is the one that the published `dflash` package, SGLang and vLLM load. The
drafter has no embedding and no head: it uses the target's, frozen.
"""

import functools
import json
from collections.abc import Callable, Mapping
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
from dflash_trainer.drafter_config import CONFIG_FILE, WEIGHTS_FILE, DrafterConfig, no_drafter, read_drafter_config
from dflash_trainer.errors import CannotStart
from dflash_trainer.mask import FULL, Visibility, dense_mask

INIT_STD = 0.02
Mask = Tensor | BlockMask | None
Remembered = tuple[Tensor, Tensor]  # a layer's keys and values of the context, each [B, kv heads, T, head_dim]

_compiled = functools.cache(compiled)


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

    def remember(self, context: Tensor, cos: Tensor, sin: Tensor) -> Remembered:
        """Keys and values of injected states [B, T, H] at positions with these angles."""
        k, v = self._heads(self.k_proj(context)), self._heads(self.v_proj(context))
        return rotate(self.k_norm(k), cos, sin), v

    def forward(self, x: Tensor, context: Tensor | Remembered, cos: Tensor, sin: Tensor, mask: Mask) -> Tensor:
        queries = x.shape[1]
        q = self.q_norm(self._heads(self.q_proj(x)))
        q = rotate(q, cos[:, :, -queries:], sin[:, :, -queries:])
        if isinstance(context, tuple):
            own = self.remember(x, cos, sin)
            k, v = (torch.cat(pair, dim=2) for pair in zip(context, own, strict=True))
        else:
            keys = torch.cat((self.k_proj(context), self.k_proj(x)), dim=1)
            values = torch.cat((self.v_proj(context), self.v_proj(x)), dim=1)
            k, v = rotate(self.k_norm(self._heads(keys)), cos, sin), self._heads(values)
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


class Convolution(nn.Module):
    """DFlash 2's grouped dynamic causal convolution: along the positions of a block, before and after a sublayer.

    Each channel's taps are its own fixed ones plus what its group's are at this position.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.group_size = config.conv_group_size
        self.base_kernel = nn.Parameter(torch.empty(2, config.conv_kernel_size, config.hidden_size))
        taps = 2 * config.conv_kernel_size * (config.hidden_size // config.conv_group_size)
        self.kernel_projection = nn.Linear(config.hidden_size, taps, bias=False)

    def prepare(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [R, S, H] convolved, and the taps for finish()."""
        taps = self.kernel_projection(x).unflatten(-1, (2, self.base_kernel.shape[1], -1))
        return self._convolved(x, taps[..., 0, :, :], 0), taps[..., 1, :, :]

    def finish(self, x: Tensor, taps: Tensor) -> Tensor:
        """What the sublayer made of it, convolved."""
        return self._convolved(x, taps, 1)

    def _convolved(self, x: Tensor, taps: Tensor, which: int) -> Tensor:
        out = torch.zeros_like(x)
        for back in range(taps.shape[-2]):
            before = F.pad(x[:, : x.shape[1] - back], (0, 0, back, 0))
            weights = self.base_kernel[which, back].to(x.dtype) + taps[..., back, :].repeat_interleave(
                self.group_size, -1
            )
            out = out + weights * before
        return out


class Selector(nn.Module):
    """DFlash 2's candidate selector: which of a position's likeliest tokens follows the token chosen before it."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.top_k = config.selector_top_k
        self.predecessor_codebook = nn.Parameter(torch.empty(config.vocab_size, config.selector_rank))
        self.successor_codebook = nn.Parameter(torch.empty(config.vocab_size, config.selector_rank))
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)

    def forward(self, hidden: Tensor, before: Tensor, candidates: Tensor, unary: Tensor) -> Tensor:
        """Scores [M, K] of `candidates` [M, K], whose logits are `unary`, after the tokens `before` [M]."""
        wanted = F.embedding(before, self.predecessor_codebook) * self.hidden_projection(hidden)
        pairs: Tensor = F.embedding(candidates, self.successor_codebook) @ wanted[..., None]
        return unary + pairs.squeeze(-1)


class Layer(nn.Module):
    """Pre-norm attention and MLP. The context is normed once, by `hidden_norm`, for all layers."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention_conv = Convolution(config) if config.conv_kernel_size else None
        self.mlp_conv = Convolution(config) if config.conv_kernel_size else None

    def forward(
        self, x: Tensor, context: Tensor | Remembered, cos: Tensor, sin: Tensor, mask: Mask, block: int
    ) -> Tensor:
        def attend(normed: Tensor) -> Tensor:
            out: Tensor = self.self_attn(normed, context, cos, sin, mask)
            return out

        x = x + _between(self.attention_conv, self.input_layernorm(x), block, attend)
        return x + _between(self.mlp_conv, self.post_attention_layernorm(x), block, self.mlp)


def _between(conv: Convolution | None, x: Tensor, block: int, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
    """A sublayer between the two halves of a convolution along blocks of so many positions."""
    if conv is None:
        return sublayer(x)
    blocks = (-1, block, x.shape[-1])
    narrowed, taps = conv.prepare(x.reshape(blocks))
    return conv.finish(sublayer(narrowed.view_as(x)).reshape(blocks), taps).view_as(x)


class Drafter(nn.Module):
    """Draft layers over blocks of [anchor token, mask, mask, …], conditioned on the target's states."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.candidate_selector = Selector(config) if config.selector_rank else None

    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        """Fresh weights: normal with standard deviation 0.02, norms at one; the same for the same seed.

        Convolutions begin by changing nothing.
        """
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.dim() == 1:
                nn.init.ones_(parameter)
            else:
                parameter.copy_(torch.empty(parameter.shape).normal_(0.0, INIT_STD, generator=generator))
        for part in self.modules():
            if isinstance(part, Convolution):
                part.base_kernel.zero_()[:, 0] = 1.0
                part.kernel_projection.weight.zero_()

    @torch.no_grad()
    def calm_output(self, head: Tensor) -> None:
        """Scales the fresh final norm so that logits through `head` [V, H] start with a standard deviation of 1.

        A head may be large, since it was trained behind a norm with small gains: SmolLM2's gives a fresh drafter
        logits so spread that its loss starts at 53 nats, where knowing nothing costs ln V = 10.8.
        """
        spread = head.float().std() * self.config.hidden_size**0.5
        self.norm.weight.fill_(1 / max(spread.item(), 1.0))

    def embed(self, ids: Tensor, embedding: Tensor) -> Tensor:
        """What the blocks' tokens ids [B, Q] come in as [B, Q, H]; embedding [V, H] is the target's."""
        noise = F.embedding(ids, embedding)
        scale = self.config.input_embedding_scale
        return noise if scale == 1 else noise * scale

    def logits(self, hidden: Tensor, head: Tensor) -> Tensor:
        """Logits [..., V], before any selector, of hidden states [..., H]; head [V, H] is the target's."""
        return self.config.logit_shape(hidden.to(head.dtype) @ head.T)

    def draft(self, hidden: Tensor, anchor: int, head: Tensor, choose: Callable[[Tensor], Tensor]) -> Tensor:
        """The tokens [Q] that it drafts after token `anchor`, from the hidden states [Q, H] of the positions there.

        head [V, H] is the target's. choose: logits [..., V] → tokens [...]. With a selector each is chosen in view
        of the one before it, among its candidates: the others' logits are −∞ then.
        """
        logits = self.logits(hidden, head).float()
        if self.candidate_selector is None:
            return choose(logits)
        unary, candidates = logits.topk(self.candidate_selector.top_k)
        path = [torch.tensor(anchor, device=hidden.device)]
        for position in range(len(hidden)):
            scores = self.candidate_selector(hidden[position], path[-1], candidates[position], unary[position])
            others = torch.full_like(logits[0], float("-inf"))
            path.append(choose(others.scatter(0, candidates[position], scores.float())))
        return torch.stack(path[1:])

    def own_type(self, device: torch.device) -> torch.dtype:
        """What it computes in: the type of its weights, or autocast's."""
        autocast = torch.is_autocast_enabled(device.type)
        return torch.get_autocast_dtype(device.type) if autocast else self.norm.weight.dtype

    def remember(self, context: Tensor, begin: int) -> list[Remembered]:
        """Keys and values, by layer, of tapped states [B, T, n·H] at positions from `begin` on, for forward()."""
        positions = torch.arange(begin, begin + context.shape[1], device=context.device)[None]
        cos, sin = rotary_angles(positions, self.config.head_dim, self.config.rope_theta)
        injected = self.hidden_norm(self.fc(context))
        layers: list[Any] = list(self.layers)
        return [layer.self_attn.remember(injected, cos, sin) for layer in layers]

    def forward(
        self,
        noise: Tensor,
        positions: Tensor,
        context: Tensor | list[Remembered],
        masks: Mapping[Visibility, Mask] | None = None,
    ) -> Tensor:
        """Hidden states after the final norm [B, Q, H], to be fed to the target's head.

        noise [B, Q, H]: see embed(). positions [B, Q] int64: of each in its sequence. context [B, T, n·H]: the
        tapped states, concatenated, at positions 0…T−1, or what remember() made of them. masks: see masks(); None:
        one block after its context.

        With a BlockMask the layers are compiled, as FlexAttention has to be; what surrounds it joins the kernels.
        """
        sights = self.config.sights
        block = self.config.block_size
        if masks is None:
            block = positions.shape[1]
            length = context[0][0].shape[2] if isinstance(context, list) else context.shape[1]
            masks = {sight: self._alone(positions, length, sight) for sight in set(sights)}
        compiles = any(isinstance(mask, BlockMask) for mask in masks.values())
        layer_forward: Callable[..., Tensor] = _compiled(Layer.forward) if compiles else Layer.forward
        if isinstance(context, list):
            injected, turned = context, positions
        else:
            injected = [self.hidden_norm(self.fc(context))] * len(self.layers)
            before = torch.arange(context.shape[1], device=positions.device).expand(positions.shape[0], -1)
            turned = torch.cat((before, positions), dim=1)
        cos, sin = rotary_angles(turned, self.config.head_dim, self.config.rope_theta)
        x = noise
        for layer, seen, sight in zip(self.layers, injected, sights, strict=True):
            x = layer_forward(layer, x, seen, cos, sin, masks[sight], block)
        out: Tensor = self.norm(x)
        return out

    def masks(
        self, anchors: Tensor, context_length: int, make: Callable[..., Mask] = dense_mask
    ) -> dict[Visibility, Mask]:
        """Of blocks at anchors [B, N], by mask.dense_mask or flex_mask, for each of config.sights."""
        size = self.config.block_size
        return {sight: make(anchors, context_length, size, sight) for sight in set(self.config.sights)}

    @staticmethod
    def _alone(positions: Tensor, context_length: int, sight: Visibility) -> Tensor | None:
        """The mask of one block after its whole context; None if it sees everything."""
        return None if sight == FULL else dense_mask(positions[:, :1], context_length, positions.shape[1], sight)


def check_state(state: dict[str, Tensor], config: DrafterConfig) -> None:
    """Raises CannotStart for a tensor too many, too few or of another shape than the configuration says."""
    with torch.device("meta"):
        wanted = {name: tensor.shape for name, tensor in Drafter(config).state_dict().items()}
    for name in sorted(wanted.keys() | state.keys()):
        if name not in state:
            raise CannotStart(f"the drafter lacks {name}; nothing is written")
        if name not in wanted:
            raise CannotStart(f"the drafter has {name}, which no reader expects; nothing is written")
        if state[name].shape != wanted[name]:
            raise CannotStart(
                f"{name} is {list(state[name].shape)}, and {CONFIG_FILE} makes it {list(wanted[name])}; nothing is "
                f"written"
            )


def save_drafter(state: dict[str, Tensor], config: DrafterConfig, directory: Path, dtype: torch.dtype) -> None:
    """Writes a Hugging Face directory that DFlash's readers load. `state` is the drafter's state_dict.

    Raises CannotStart for a state that does not fit the configuration.
    """
    check_state(state, config)
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config.to_json(str(dtype).removeprefix("torch.")), indent=2)
    (directory / CONFIG_FILE).write_text(text + "\n")
    tensors = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in state.items()}
    # By way of bytes: safetensors' own writer hides a full disk behind an error of its own.
    (directory / WEIGHTS_FILE).write_bytes(serialize(tensors, metadata={"format": "pt"}))


def load_drafter(
    directory: Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> Drafter:
    """The drafter in a directory written by save_drafter, or published. Raises CannotStart if it is not one."""
    config = read_drafter_config(directory)
    try:
        state = load_file(directory / WEIGHTS_FILE)
    except (OSError, SafetensorError) as error:
        raise no_drafter(directory, error) from error
    with torch.device("meta"):
        drafter = Drafter(config)
    try:
        drafter.load_state_dict(state, assign=True)
    except RuntimeError as error:
        detail = " ".join(str(error).split())
        raise CannotStart(f"{directory}: weights do not fit {CONFIG_FILE}: {detail}") from error
    return drafter.to(device, dtype)
