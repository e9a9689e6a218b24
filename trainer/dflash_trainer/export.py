"""`dflash-train export`: a drafter as a directory to publish or to serve, with a card of the run that made it.

docs/checkpoint.md says who reads what of it. To and from the format of the speculators library (0.9): the tensors
are the same, the configuration is another; it numbers tapped layers from the embedding on, one higher.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from dflash_agent import outputs
from safetensors import SafetensorError
from safetensors.torch import load_file

from dflash_trainer.drafter import Drafter, load_drafter, save_drafter
from dflash_trainer.drafter_config import CONFIG_FILE, WEIGHTS_FILE, DrafterConfig, find_drafter
from dflash_trainer.errors import CannotStart
from dflash_trainer.whole import whole_directory

FORMATS = ("transformers", "speculators")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
SPECULATORS_VERSION = "0.9.0"
OF_THE_TARGET = ("embed_tokens.", "lm_head.", "verifier_lm_head.", "verifier_norm.")  # that library may keep them
OWN_VOCABULARY = ("t2d", "d2t")
SECOND = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")  # what DFlash 2 adds
CARD_FILE = "README.md"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `dflash-train export`."""
    add = parser.add_argument
    add("drafter", type=Path, metavar="DRAFTER", help="its directory, or that of a checkpoint or of a run's output")
    add("output", type=Path, metavar="DIR", help="where it goes")
    add("--format", choices=FORMATS, default=FORMATS[0], help="whose it is (%(default)s, which servers read)")
    add("--dtype", choices=[*DTYPES], default="bfloat16", help="of the weights (%(default)s)")
    add("--target-model", type=Path, metavar="DIR", help="the target, to convert to or from speculators")


def run(args: argparse.Namespace) -> int:
    """Writes the directory. Raises CannotStart if the drafter is none, or the directory is not empty."""
    output: Path = args.output
    if output.exists() and any(output.iterdir()):
        raise CannotStart(f"{output} is not empty; choose another directory")
    source = find_drafter(args.drafter)
    target = None if args.target_model is None else target_sizes(args.target_model)
    drafter = from_speculators(source, target) if is_speculators(source) else load_drafter(source)
    state, config = drafter.state_dict(), drafter.config
    figures = figures_of(args.drafter)
    with whole_directory(output) as unfinished:
        save_drafter(state, config, unfinished, DTYPES[args.dtype])
        if args.format == "speculators":
            if target is None:
                raise CannotStart("--format speculators names the target: give --target-model")
            values = to_speculators(config.to_json(args.dtype), str(args.target_model), target["architectures"])
            (unfinished / CONFIG_FILE).write_text(json.dumps(values, indent=2) + "\n")
        (unfinished / CARD_FILE).write_text(card(config, figures))
    print(f"{output}: {len(state)} tensors of {args.dtype}, {CONFIG_FILE} and a card, for {args.format}")
    return 0


def target_sizes(directory: Path) -> dict[str, Any]:
    """What is needed of a target's configuration. Raises CannotStart."""
    try:
        whole = json.loads((directory / CONFIG_FILE).read_text())
        text = whole.get("text_config", whole)
        return {
            "architectures": whole.get("architectures", []),
            "num_hidden_layers": int(text["num_hidden_layers"]),
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CannotStart(f"target {directory}: {error}; give a Hugging Face model directory") from error


def is_speculators(directory: Path) -> bool:
    """Whether a directory is in that library's format."""
    try:
        return "speculators_model_type" in json.loads((directory / CONFIG_FILE).read_text())
    except (OSError, ValueError, TypeError):
        return False


def to_speculators(values: dict[str, Any], target: str, architectures: list[str]) -> dict[str, Any]:
    """Our configuration in that library's terms. Raises CannotStart for what it has no word for."""
    own = dict(values["dflash_config"])
    layers, mask = own.pop("target_layer_ids"), own.pop("mask_token_id")
    second = {name: own.pop(name) for name in SECOND if name in own}
    if own or "is_causal" in values:
        words = ", ".join([*own, *(["is_causal"] if "is_causal" in values else [])])
        raise CannotStart(f"speculators has no word for {words} of this drafter; export it for transformers")
    apart = ("architectures", "block_size", "dflash_config", "num_target_layers")
    kind = "dflash2" if second else "dflash"
    return {
        "architectures": ["DFlash2DraftModel" if second else "DFlashSpeculator"],
        "speculators_model_type": kind,
        "speculators_version": SPECULATORS_VERSION,
        "dtype": values["dtype"],
        "block_size": values["block_size"],
        "draft_vocab_size": values["vocab_size"],
        "aux_hidden_state_layer_ids": [layer + 1 for layer in layers],
        "mask_token_id": mask,
        "sliding_window_non_causal": False,
        **second,
        "transformer_layer_config": {name: value for name, value in values.items() if name not in apart},
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": values["block_size"] - 1}],
            "verifier": {"name_or_path": target, "architectures": architectures},
        },
    }


def from_speculators(directory: Path, target: dict[str, Any] | None) -> Drafter:
    """The drafter in a directory of that library's. Raises CannotStart."""
    if target is None:
        raise CannotStart(f"{directory} is of the speculators library: give --target-model")
    try:
        values = json.loads((directory / CONFIG_FILE).read_text())
        layer: dict[str, Any] = values["transformer_layer_config"]
        own = {
            "target_layer_ids": [int(i) - 1 for i in values["aux_hidden_state_layer_ids"]],
            "mask_token_id": int(values["mask_token_id"]),
        }
        own |= {name: values[name] for name in SECOND if name in values}
        slides = "sliding_attention" in (layer.get("layer_types") or ())
        causal = {"is_causal": False} if slides and values.get("sliding_window_non_causal") else {}
        plain = layer | causal | {"block_size": values["block_size"], "dflash_config": own}
        config = DrafterConfig.from_json(plain | {"num_target_layers": target["num_hidden_layers"]})
        state = load_file(directory / WEIGHTS_FILE)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CannotStart(
            f"{directory} is no drafter that can be converted: {type(error).__name__}: {error}; give one of "
            f"speculators' DFlash"
        ) from error
    if any(name in state for name in OWN_VOCABULARY):
        raise CannotStart(f"{directory} has a vocabulary of its own (t2d, d2t), which DFlash's readers do not know")
    state = {name: tensor for name, tensor in state.items() if not name.startswith(OF_THE_TARGET)}
    with torch.device("meta"):
        drafter = Drafter(config)
    try:
        drafter.load_state_dict(state, assign=True)
    except RuntimeError as error:
        raise CannotStart(
            f"{directory}: weights do not fit {CONFIG_FILE}: {' '.join(str(error).split())}"
        ) from error
    return drafter


def figures_of(directory: Path) -> dict[str, Any]:
    """What the files of the run that made a drafter tell: settings, data, the last metrics; empty without them."""
    for output in (directory, *directory.parents, *directory.resolve().parents):
        marker = output / outputs.RUN_FILE
        if marker.exists():
            break
    else:
        return {}
    try:
        found = {"settings": json.loads(marker.read_text())["settings"], "last": outputs.last_metrics(output) or {}}
        lines = (output / outputs.METRICS_FILE).read_text().splitlines()
    except (OSError, ValueError, KeyError):
        return {}
    for line in lines:
        if '"acceptance_length"' in line:
            try:
                found["evaluated"] = json.loads(line)
            except ValueError:
                continue
    return found


def card(config: DrafterConfig, figures: dict[str, Any]) -> str:
    """README.md as model hubs show it."""
    settings, last, evaluated = (figures.get(name, {}) for name in ("settings", "last", "evaluated"))
    drafted = config.block_size - 1
    rows = [
        ("layers", config.num_hidden_layers),
        ("block size", config.block_size),
        ("target layers seen", ", ".join(map(str, config.target_layer_ids))),
        ("mask token", config.mask_token_id),
    ]
    rows += [(key.partition(".")[2], value) for key, value in settings.items() if key.startswith("train.")]
    if last:
        rows += [("step", f"{last['step']} of {last['total_steps']}"), ("loss", f"{last['loss']:.3f} nats")]
        rows += [("positions predicted right", f"{100 * last['accuracy']:.1f} %")] * ("accuracy" in last)
    if evaluated:
        text = f"{evaluated['acceptance_length']:.2f} tokens a step, {evaluated['eval_prompts']} prompts, greedy"
        rows.append((f"acceptance length at step {evaluated['step']}", text))
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    return f"""---
library_name: transformers
tags:
- dflash
- speculative-decoding
- draft-model
---

# A DFlash drafter

A block-diffusion drafter ([DFlash](https://arxiv.org/abs/2602.06036)) for speculative decoding. It uses embedding
and head of its target, a model of {config.num_target_layers} layers with a hidden size of {config.hidden_size}.

| | |
|---|---|
{table}

## How to serve it

    python -m sglang.launch_server --model-path TARGET --speculative-algorithm DFLASH \\
        --speculative-draft-model-path THIS_DIRECTORY

    vllm serve TARGET --speculative-config \\
        '{{"method": "dflash", "model": "THIS_DIRECTORY", "num_speculative_tokens": {drafted}}}'

Trained with dflash-train.
"""
