"""What a run file comes to: its data, its target's sizes, its drafter and its plan, or why it cannot start."""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from dflash_agent import outputs
from dflash_agent.findings import Finding
from dflash_agent.runfile import MIXTURE_WIDTH, Drafter, RunFile, settings, settings_of_then

from dflash_trainer.chats import read_tokenizer, tokenizer_hashes
from dflash_trainer.dataset import read_card
from dflash_trainer.drafter_config import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    DrafterConfig,
    read_drafter_config,
    spaced_layer_ids,
)
from dflash_trainer.errors import CannotStart
from dflash_trainer.heldout import read_heldout
from dflash_trainer.plan import Plan, make_plan
from dflash_trainer.store import Progress, Survey, TokenStore, load_store, survey
from dflash_trainer.target import (
    choose_mask_token,
    embedding_scale,
    logit_shape,
    read_config,
    target_fingerprint,
)


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything that is known before any weight is loaded."""

    plan: Plan
    drafter: DrafterConfig
    identity: dict[str, Any]  # what makes two attempts the same run; kept as OUTPUT/run.json
    doubt: str  # see doubt_about()


def read_data(run: RunFile, cache: Path, progress: Progress) -> TokenStore:
    """The run's token store. Raises CannotStart or TryAgain."""
    return load_store(Path(run.data.dir), longest(run), int(target_config(run).vocab_size), cache, progress)


def target_config(run: RunFile) -> Any:
    """The target's sizes, for a run that this version can train. Raises CannotStart."""
    if run.train.dp_pairs != 1:
        raise CannotStart(f"dp_pairs = {run.train.dp_pairs}: this version trains one pair; set it to 1")
    return read_config(Path(run.target.model))


def longest(run: RunFile) -> int:
    """How many tokens of a row are used at most."""
    return min(run.data.max_length, run.train.token_budget)


def resolve(run: RunFile, data: Survey) -> Inputs:
    """What data and target come to. Raises CannotStart with what is wrong and what to do."""
    directory = Path(run.target.model)
    config = target_config(run)
    doubt = doubt_about(run)
    plan = make_plan(
        np.diff(data.offsets), run.train.token_budget, run.train.seed, run.train.epochs, run.train.max_steps
    )
    used = set(np.flatnonzero(data.used).tolist())
    begun = read_drafter_config(Path(run.drafter.init_from)) if run.drafter.init_from else None
    wanted = run.drafter.mask_token_id if begun is None else begun.mask_token_id
    mask = choose_mask_token(directory, int(config.vocab_size), used, wanted)
    drafter = drafter_config(run, config, mask) if begun is None else taken_over(run, config, begun)
    identity = {"settings": settings(run), "target": target_fingerprint(directory), "data": data.fingerprint}
    if begun is not None:
        identity["init_from"] = target_fingerprint(Path(run.drafter.init_from))
    return Inputs(plan, drafter, identity, doubt)


def doubt_about(run: RunFile) -> str:
    """What makes its data doubtful for its target, by the data's card; empty: nothing.

    Raises CannotStart if it was made with another tokenizer.
    """
    directory = Path(run.target.model)
    known = read_card(Path(run.data.dir)).get("settings", {})
    if "tokenizer" not in known:
        return ""
    try:
        now = tokenizer_hashes(directory, read_tokenizer(directory))
    except (OSError, CannotStart):
        return f"data {run.data.dir} may hold tokens of another tokenizer: that of {directory} cannot be read"
    if known["tokenizer"] != now["tokenizer"]:
        raise CannotStart(
            f"data {run.data.dir} was made with another tokenizer than that of {directory}; make it anew with "
            f"`dflash-train prepare`, or give the target that it was made for"
        )
    if known.get("chat_template", now["chat_template"]) == now["chat_template"]:
        return ""
    return (
        f"data {run.data.dir} was made with another chat template than that of {directory}: what is served by this "
        f"one is guessed worse"
    )


def plan_line(plan: Plan, data: Survey) -> str:
    """The plan in words."""
    padding = plan.epochs[0].padding(np.diff(data.offsets))
    return f"{plan.total_steps} steps in {len(plan.epochs)} epochs, {100 * padding:.1f} % of a batch is padding"


def drafter_config(run: RunFile, target: Any, mask_token_id: int) -> DrafterConfig:
    """The drafter that a run asks for; every size that it leaves open is the target's.

    Rotation is full and plain whatever the target's is: servers run the drafter so.
    """
    wanted = run.drafter
    layers = int(target.num_hidden_layers)
    taps = wanted.target_layer_ids or spaced_layer_ids(layers, wanted.layers)
    for i in taps:
        if not 0 <= i < layers - 1:  # of the last layer, servers take the state after the final norm
            raise CannotStart(
                f"target_layer_ids: {i} cannot be tapped; the target has {layers} layers, use ids from 0 to "
                f"{layers - 2}"
            )
    heads = wanted.heads or int(target.num_attention_heads)
    kv_heads = wanted.kv_heads or int(target.num_key_value_heads)
    if heads % kv_heads:
        raise CannotStart(f"heads = {heads} is no multiple of kv_heads = {kv_heads}; change one of them")
    head_dim = getattr(target, "head_dim", None) or int(target.hidden_size) // int(target.num_attention_heads)
    rope = getattr(target, "rope_parameters", None) or {}
    rope = rope.get(FULL_ATTENTION, rope)  # Gemma 3 has one for each type of layer
    theta: Any = rope.get("rope_theta") or getattr(target, "rope_theta", 10000.0)
    return DrafterConfig(
        hidden_size=int(target.hidden_size),
        num_hidden_layers=wanted.layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=wanted.head_dim or int(head_dim),
        intermediate_size=wanted.intermediate
        or int(getattr(target, "intermediate_size", None) or MIXTURE_WIDTH * target.hidden_size),
        rms_norm_eps=float(getattr(target, "rms_norm_eps", None) or 1e-6),
        rope_theta=float(theta),
        vocab_size=int(target.vocab_size),
        max_position_embeddings=int(target.max_position_embeddings),
        num_target_layers=layers,
        block_size=wanted.block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=taps,
        layer_types=_layer_types(wanted),
        sliding_window=wanted.sliding_window,
        input_embedding_scale=embedding_scale(target),
        output_multiplier=logit_shape(target).multiplier,
        final_logit_softcapping=logit_shape(target).cap,
        **_second(wanted, int(target.hidden_size)),
    )


def _layer_types(wanted: Drafter) -> tuple[str, ...]:
    """Which layers slide, as a configuration says it. Raises CannotStart."""
    if not wanted.sliding_window:
        if wanted.sliding_layers:
            raise CannotStart(
                "sliding_layers without sliding_window: set how many positions they see, such as 2048"
            )
        return ()
    beyond = [i for i in wanted.sliding_layers if i >= wanted.layers]
    if beyond:
        raise CannotStart(
            f"sliding_layers: {beyond[0]} is none of the drafter's; use ids up to {wanted.layers - 1}"
        )
    slide = wanted.sliding_layers or range(wanted.layers - 1)
    return tuple(SLIDING_ATTENTION if i in slide else FULL_ATTENTION for i in range(wanted.layers))


def _second(wanted: Drafter, hidden_size: int) -> dict[str, Any]:
    """The sizes of DFlash 2's parts, if there are any. Raises CannotStart."""
    if not wanted.conv_kernel_size and not wanted.selector_rank:
        return {}
    if not (wanted.conv_kernel_size and wanted.selector_rank):
        raise CannotStart(
            "DFlash 2 has convolutions and a selector: set conv_kernel_size and selector_rank, or neither"
        )
    if hidden_size % wanted.conv_group_size:
        raise CannotStart(
            f"conv_group_size = {wanted.conv_group_size} does not divide the hidden size, {hidden_size}; change it"
        )
    names = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    return {name: getattr(wanted, name) for name in names}


TAKEN_OVER = {  # keys of [drafter] that init_from's checkpoint decides, and what its configuration calls them
    "layers": "num_hidden_layers",
    "block_size": "block_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "intermediate": "intermediate_size",
    "mask_token_id": "mask_token_id",
    "target_layer_ids": "target_layer_ids",
    "sliding_window": "sliding_window",
    "conv_kernel_size": "conv_kernel_size",
    "conv_group_size": "conv_group_size",
    "selector_rank": "selector_rank",
    "selector_top_k": "selector_top_k",
}


def taken_over(run: RunFile, target: Any, begun: DrafterConfig) -> DrafterConfig:
    """The configuration of the drafter that a run begins with.

    Raises CannotStart if it is of another target, or if [drafter] says something else that is not the default.
    """
    where = f"init_from {run.drafter.init_from}"
    theirs = {"hidden_size": target.hidden_size, "num_target_layers": target.num_hidden_layers}
    for name, value in theirs.items():
        if getattr(begun, name) != value:
            raise CannotStart(
                f"{where} is of a target with {name} {getattr(begun, name)}, but {run.target.model} has {value}; "
                f"give a drafter of this target"
            )
    has = {name: getattr(begun, theirs) for name, theirs in TAKEN_OVER.items()}
    has["sliding_layers"] = tuple(i for i, kind in enumerate(begun.layer_types) if kind == SLIDING_ATTENTION)
    for spec in fields(Drafter):
        wanted, there = getattr(run.drafter, spec.name), has.get(spec.name)
        if there is not None and wanted not in (spec.default, there):
            raise CannotStart(f"{where} has {spec.name} {there}, [drafter] {wanted}; remove that, or set it alike")
    return begun


def claim_output(run: RunFile, identity: dict[str, Any], fresh: bool) -> Path:
    """The output directory, made, marked as this run's, and locked for as long as this process lives.

    With `fresh`, what an earlier run left there is put aside, not deleted. Raises CannotStart if it belongs to
    a run with other settings, and names them, or if another process trains into it.
    """
    output = Path(run.output.dir)
    marker = output / outputs.RUN_FILE
    try:
        output.mkdir(parents=True, exist_ok=True)
        outputs.lock(output, f"run {run.name} (pid {os.getpid()})")
        if fresh:
            outputs.set_aside(output)
        if marker.exists():
            _compare(output, json.loads(marker.read_text()), identity, run.name)
            return output
        unsure = marker.with_suffix(".tmp")
        unsure.write_text(json.dumps(identity, indent=2) + "\n")
        unsure.replace(marker)
    except outputs.InUse as error:
        raise CannotStart(
            f"output {output} is in use by {error}; stop that first, or choose another output directory"
        ) from None
    except OSError as error:
        if error.errno in outputs.PASSING_ERRNOS:
            raise
        raise CannotStart(
            f"output {output} cannot be written: {error.strerror}; make it writable for the user that trains"
        ) from error
    except ValueError as error:
        raise CannotStart(
            f"{marker} is damaged ({error}); put the old output aside with `dflashctl fresh {run.name}` or --fresh"
        ) from error
    return output


def _compare(output: Path, there: dict[str, Any], now: dict[str, Any], name: str) -> None:
    old, new = settings_of_then(there["settings"]), now["settings"]
    differing = [
        f"{key} {old.get(key)!r} there, {new.get(key)!r} now"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]
    differing += [f"the {part} is another one" for part in ("target", "data") if there[part] != now[part]]
    if differing:
        raise CannotStart(
            f"output {output} belongs to a run with different settings: {'; '.join(differing)}; restore them, "
            f"choose another output directory, or begin anew with --fresh (`dflashctl fresh {name}`), which "
            f"puts the old files aside"
        )


def check(run: RunFile) -> Iterable[Finding]:
    """The deep checks of `dflash-train check`: what `resolve` finds, in lines. Starts and writes nothing."""
    try:
        data = survey(Path(run.data.dir), longest(run), int(target_config(run).vocab_size))
        inputs = resolve(run, data)
    except CannotStart as error:
        code = "data-unreadable" if run.data.dir in str(error) else "config"
        yield Finding(code, "refuse", str(error))
        return
    skipped = sum(data.skipped.values())
    text = f"data {run.data.dir}: {data.summary()}"
    yield Finding("data-unreadable", "warn", text) if skipped else Finding("data", "ok", text)
    if inputs.doubt:
        yield Finding("data", "warn", inputs.doubt, "make it anew: dflash-train prepare")
    sizes = inputs.drafter
    yield Finding(
        "config",
        "ok",
        f"plan: {plan_line(inputs.plan, data)}; drafter of "
        f"{sizes.num_hidden_layers} layers on target layers {', '.join(map(str, sizes.target_layer_ids))}, "
        f"block {sizes.block_size}, mask token {sizes.mask_token_id}",
    )
    if run.eval.prompts:
        try:
            held = read_heldout(run)
        except CannotStart as error:
            yield Finding("config", "refuse", str(error))
            return
        text = f"{len(held.prompts)} held-out prompts every {held.interval} steps"
        yield Finding("config", "ok", f"evaluation: {text}, {held.max_new_tokens} tokens each")
    marker = Path(run.output.dir) / outputs.RUN_FILE
    if marker.exists():
        try:
            _compare(marker.parent, json.loads(marker.read_text()), inputs.identity, run.name)
        except (CannotStart, ValueError, KeyError, OSError) as error:
            yield Finding("config", "refuse", str(error))
