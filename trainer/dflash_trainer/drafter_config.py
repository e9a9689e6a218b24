"""A drafter's configuration: its sizes, and config.json as DFlash's readers have it (docs/checkpoint.md)."""

import json
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from dflash_agent import outputs

from dflash_trainer.errors import CannotStart
from dflash_trainer.loss import LogitShape
from dflash_trainer.mask import Visibility

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"
NESTED = (  # in the config.json's dflash_config, where the published package looks first
    "target_layer_ids",
    "mask_token_id",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
)


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
    """Sizes of a drafter. `target_layer_ids` are 0-based, "after layer i" of the target.

    The `conv_…` and `selector_…` sizes are DFlash 2's, 0 in a drafter that has no such part.
    """

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
    layer_types: tuple[str, ...] = ()  # of each layer; empty: FULL_ATTENTION
    sliding_window: int = 0  # of the layers with SLIDING_ATTENTION
    is_causal: bool | None = None  # inside a block; None: sliding layers are, the others not
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float = 0.0
    conv_kernel_size: int = 0
    conv_group_size: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0

    @property
    def logit_shape(self) -> LogitShape:
        """What becomes of the products with the head."""
        return LogitShape(self.output_multiplier, self.final_logit_softcapping)

    @property
    def sights(self) -> tuple[Visibility, ...]:
        """What each layer sees."""
        kinds = self.layer_types or (FULL_ATTENTION,) * self.num_hidden_layers
        sliding = [kind == SLIDING_ATTENTION for kind in kinds]
        return tuple(
            Visibility(slides if self.is_causal is None else self.is_causal, self.sliding_window * slides)
            for slides in sliding
        )

    def to_json(self, dtype: str) -> dict[str, Any]:
        """config.json as its readers expect it: both spellings of RoPE, full rotation, no mrope."""
        return {
            "architectures": ["DFlash2DraftModel" if self.conv_kernel_size else "DFlashDraftModel"],
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
            "layer_types": list(self.layer_types or (FULL_ATTENTION,) * self.num_hidden_layers),
            "use_sliding_window": SLIDING_ATTENTION in self.layer_types,
            "sliding_window": self.sliding_window or None,
            **({} if self.is_causal is None else {"is_causal": self.is_causal}),
            "tie_word_embeddings": False,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_position_embeddings,
            "num_target_layers": self.num_target_layers,
            "block_size": self.block_size,
            "dflash_config": {
                spec.name: getattr(self, spec.name)
                for spec in fields(self)
                if spec.name in NESTED and getattr(self, spec.name) != spec.default
            },
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "DrafterConfig":
        """The sizes in a config.json. Raises KeyError for one that is missing, ValueError for what is unknown."""
        rope = values.get("rope_parameters") or {}
        nested = values["dflash_config"]
        readable = (*NESTED, "block_size")  # newer checkpoints have it there
        turned = {"rope_type": "default", "partial_rotary_factor": 1.0, "rope_scaling": None}
        said = {"rope_scaling": values.get("rope_scaling")} | rope
        strange = [name for name, value in nested.items() if name not in readable and value is not None]
        strange += [n for n, value in said.items() if n != "rope_theta" and value not in (None, turned.get(n))]
        if strange:  # such a drafter would be another one here
            raise ValueError(f"what it says of {', '.join(sorted(strange))} is not known here")
        found = {name: values[name] for name in cls.__dataclass_fields__ if values.get(name) is not None}
        found |= {name: nested[name] for name in readable if nested.get(name) is not None}
        found["rope_theta"] = float(rope["rope_theta"] if "rope_theta" in rope else values["rope_theta"])
        found |= {name: tuple(found[name]) for name in ("target_layer_ids", "layer_types") if name in found}
        missing = [spec.name for spec in fields(cls) if spec.default is MISSING and spec.name not in found]
        if missing:
            raise KeyError(missing[0])
        if unknown := {*found.get("layer_types", ())} - {FULL_ATTENTION, SLIDING_ATTENTION}:
            raise ValueError(f"unknown layer_types {', '.join(sorted(unknown))}")
        if SLIDING_ATTENTION not in found.get("layer_types", ()):
            found.pop("sliding_window", None)
            found.pop("layer_types", None)
        elif "sliding_window" not in found:
            raise ValueError("sliding_window is missing, and some of its layer_types slide")
        return cls(**found)


def find_drafter(directory: Path) -> Path:
    """Where a drafter is: in the directory itself, or, for a checkpoint or a run's output, below it."""
    below = directory / outputs.DRAFTER_LINK
    return below if (below / CONFIG_FILE).exists() and not (directory / CONFIG_FILE).exists() else directory


def read_drafter_config(directory: Path) -> DrafterConfig:
    """The configuration in a directory written by save_drafter, or published. Raises CannotStart."""
    try:
        return DrafterConfig.from_json(json.loads((directory / CONFIG_FILE).read_text()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise no_drafter(directory, error) from error


def no_drafter(directory: Path, error: Exception) -> CannotStart:
    """The error for a directory whose files cannot be read as a drafter's."""
    return CannotStart(
        f"{directory} is not a drafter that can be read: {type(error).__name__}: {error}; give a directory that "
        f"holds {CONFIG_FILE} and {WEIGHTS_FILE}, such as OUTPUT/drafter of a run"
    )
