"""The run file: one schema for the agent, the trainer, their flags and the manual.

A run is a TOML file with the tables [target], [data], [output], [train], [drafter], [eval] and [preflight]; each
key has a flag of the same meaning, and flags override the file. What is unknown, of a wrong type or out of range is
refused. [preflight] is the agent's: the trainer has no flags for it.
"""

import argparse
import difflib
import json
import os
import re
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from pathlib import Path, PurePosixPath
from typing import Any

RUNS_DIR = Path("/etc/dflash/runs")
STATE_DIR = Path("/var/lib/dflash/runs")
RUN_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,47}")
DTYPES = ("auto", "float32", "bfloat16", "float8")
SLOW_KERNELS = ("refuse", "allow")
COMPILE = ("auto", "never")
ATTENTION = ("auto", "dense")
POSITION_WEIGHTS = ("decay", "dpace")
MIXTURE_WIDTH = 3  # times the hidden size: the drafter's MLP where the target has experts only
ON_DIRTY = ("wait", "fail", "reap")
ALL_GPUS, NO_GPUS = "auto", "none"
_DEVICE = re.compile(r"\d{1,3}|GPU-[0-9a-fA-F-]{4,}|(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.0)?")
_SPAN = re.compile(r"(\d+)\s*(s|sec|min|m|h)\s*")
_SPANS = {"s": 1, "sec": 1, "min": 60, "m": 60, "h": 3600}

Check = Callable[[Any], str | None]  # None if the value is allowed, else what is


class ConfigError(Exception):
    """A run that is not described rightly; str() is one line naming the place, the value and the remedy."""


def _at_least(least: float) -> Check:
    return lambda value: None if value >= least else f"must be at least {least}"


def _one_of(words: tuple[str, ...]) -> Check:
    return lambda value: None if value in words else f"must be one of {', '.join(words)}"


def _share(value: float) -> str | None:
    return None if 0 <= value < 1 else "must be a share: 0 or more, less than 1"


def _up_to_one(value: float) -> str | None:
    return None if 0 <= value <= 1 else "must be from 0 to 1"


def _above_zero(value: float) -> str | None:
    return None if 0 < value < float("inf") else "must be above 0"


def _a_path(value: str) -> str | None:
    path = PurePosixPath(value)
    good = path.is_absolute() and ".." not in path.parts and "\0" not in value
    return None if good else "must be an absolute path without '..'"


def _a_path_or_empty(value: str) -> str | None:
    return _a_path(value) if value else None


def _layer_ids(value: tuple[int, ...]) -> str | None:
    ascending = list(value) == sorted(set(value))
    return None if ascending and all(i >= 0 for i in value) else "must be layer ids from 0 on, ascending"


def _devices(value: str) -> str | None:
    words = value.split(",")
    if value in (ALL_GPUS, NO_GPUS) or all(_DEVICE.fullmatch(word) for word in words):
        return None
    if any(word.startswith("MIG-") for word in words):
        return "names part of a GPU; a run needs whole ones"
    return "must be auto, none, or indices, UUIDs (GPU-…) or bus ids (3b:00.0) with commas and no spaces"


def _a_span(value: str) -> str | None:
    rest = _SPAN.sub("", value)
    return None if value.strip() and not rest.strip() else "must be a time like 90s, 2min or 1h 30min"


def seconds(span: str) -> float:
    """The length of a checked time like those of systemd.time(7).

    >>> seconds("1h 30min"), seconds("90s")
    (5400.0, 90.0)
    """
    return float(sum(int(number) * _SPANS[unit] for number, unit in _SPAN.findall(span)))


def _key(flag: str, text: str, check: Check, default: Any = MISSING, free: bool = False) -> Any:
    """A field. `free` ones may change between two attempts of a run; the others shape its result."""
    metadata = {"flag": flag, "help": text, "check": check, "free": free}
    return field(metadata=metadata) if default is MISSING else field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class Target:
    """The frozen model whose output the drafter learns to predict."""

    model: str = _key("--target-model", "Hugging Face directory of the target", _a_path, free=True)
    dtype: str = _key(
        "--target-dtype",
        "auto (bfloat16 on a GPU, float32 on a CPU), float32, bfloat16, or float8 for large matrix products",
        _one_of(DTYPES),
        "auto",
    )
    slow_kernels: str = _key(
        "--slow-kernels",
        "whether a GPU may run linear attention without flash-linear-attention: refuse or allow",
        _one_of(SLOW_KERNELS),
        "refuse",
        free=True,
    )
    compile: str = _key(
        "--target-compile",
        "whether its layers are compiled: auto (on a GPU) or never",
        _one_of(COMPILE),
        "auto",
        free=True,
    )


@dataclass(frozen=True, slots=True)
class Data:
    """The tokenized completions to train on."""

    dir: str = _key(
        "--data-dir", "dataset directory: input_ids, and loss_mask, assistant_masks or labels", _a_path, free=True
    )
    max_length: int = _key("--max-length", "tokens of a sequence that are used", _at_least(2), 4096)


@dataclass(frozen=True, slots=True)
class Output:
    """What the run writes."""

    dir: str = _key(
        "--output-dir",
        "where checkpoints and metrics go; empty: /var/lib/dflash/runs/NAME",
        _a_path_or_empty,
        "",
        True,
    )
    save_interval: int = _key("--save-interval", "steps between checkpoints", _at_least(1), 5000, True)
    keep_last: int = _key("--keep-last", "newest checkpoints to keep", _at_least(1), 3, True)
    keep_every: int = _key(
        "--keep-every", "keep every checkpoint whose step this divides, for good; 0: none", _at_least(0), 0, True
    )
    save_patience: str = _key(
        "--save-patience", "how long training goes on while no checkpoint can be saved", _a_span, "1h", True
    )
    log_interval: int = _key("--log-interval", "steps between lines of the log", _at_least(1), 10, True)


@dataclass(frozen=True, slots=True)
class Train:
    """How it trains."""

    epochs: int = _key("--epochs", "times the data is gone through", _at_least(1), 6)
    max_steps: int = _key("--max-steps", "end after this many steps; 0: after all epochs", _at_least(0), 0)
    lr: float = _key("--lr", "peak learning rate", _above_zero, 6e-4)
    warmup: float = _key("--warmup", "share of the steps with a rising learning rate", _share, 0.04)
    weight_decay: float = _key("--weight-decay", "AdamW's weight decay", _at_least(0), 0.0)
    clip: float = _key("--clip", "largest norm of the gradient", _above_zero, 1.0)
    token_budget: int = _key("--token-budget", "tokens in a batch, padding included", _at_least(2), 8192)
    max_anchors: int = _key("--max-anchors", "most blocks drawn from one sequence", _at_least(1), 512)
    distill: float = _key(
        "--distill",
        "share of the loss that is the divergence from the target's distribution; the rest is that of hard labels",
        _up_to_one,
        0.0,
    )
    position_weights: str = _key(
        "--position-weights",
        "decay (fixed, falling by loss_decay), or dpace (by the drafter's confidence, arXiv 2605.18810)",
        _one_of(POSITION_WEIGHTS),
        "decay",
    )
    attention: str = _key(
        "--attention",
        "the drafter's: auto (FlexAttention on a GPU), or dense, slower, which needs no compiler",
        _one_of(ATTENTION),
        "auto",
        free=True,
    )
    seed: int = _key("--seed", "of weights, order and anchors", _at_least(0), 0)
    dp_pairs: int = _key("--dp-pairs", "pairs of a target and a drafter, each on GPUs of its own", _at_least(1), 1)


@dataclass(frozen=True, slots=True)
class Drafter:
    """The drafter's shape; sizes left at 0 are the target's."""

    layers: int = _key("--draft-layers", "decoder layers", _at_least(1), 5)
    block_size: int = _key("--block-size", "tokens of a block, its anchor included", _at_least(2), 16)
    init_from: str = _key(
        "--init-from",
        "directory of a drafter whose weights it begins with; its shape and mask token are then that one's",
        _a_path_or_empty,
        "",
    )
    loss_decay: float = _key(
        "--loss-decay", "decay γ of the loss by position; 0: by block size, 7 for 16", _at_least(0), 0.0
    )
    heads: int = _key("--heads", "attention heads; 0: the target's", _at_least(0), 0)
    kv_heads: int = _key("--kv-heads", "key and value heads; 0: the target's", _at_least(0), 0)
    head_dim: int = _key("--head-dim", "size of a head; 0: the target's", _at_least(0), 0)
    intermediate: int = _key("--intermediate", "size inside the MLP; 0: the target's", _at_least(0), 0)
    mask_token_id: int = _key(
        "--mask-token-id", "id that stands for a token to predict; -1: a reserved one is chosen", _at_least(-1), -1
    )
    target_layer_ids: tuple[int, ...] = _key(
        "--target-layer-ids", "target layers whose states the drafter sees; empty: evenly spaced", _layer_ids, ()
    )
    sliding_window: int = _key(
        "--sliding-window", "positions that sliding layers see, causally; 0: no such layers", _at_least(0), 0
    )
    sliding_layers: tuple[int, ...] = _key(
        "--sliding-layers", "which layers slide; empty: all but the last, if there is a window", _layer_ids, ()
    )
    conv_kernel_size: int = _key(
        "--conv-kernel-size", "taps of DFlash 2's convolutions; 0: none (published: 2)", _at_least(0), 0
    )
    conv_group_size: int = _key(
        "--conv-group-size", "channels that share what a convolution derives from them", _at_least(1), 16
    )
    selector_rank: int = _key("--selector-rank", "rank of DFlash 2's candidate selector; 0: none", _at_least(0), 0)
    selector_top_k: int = _key(
        "--selector-top-k", "candidates that it chooses from at each position", _at_least(2), 16
    )


@dataclass(frozen=True, slots=True)
class Eval:
    """The acceptance length on held-out prompts while it trains."""

    prompts: str = _key(
        "--eval-prompts",
        "JSON lines as for `dflash-train prepare`; empty: no evaluation",
        _a_path_or_empty,
        "",
        True,
    )
    interval: int = _key("--eval-interval", "steps between evaluations", _at_least(1), 1000, True)
    limit: int = _key("--eval-limit", "how many of the prompts, the first ones", _at_least(1), 16, True)
    max_new_tokens: int = _key("--eval-new-tokens", "tokens written for each", _at_least(2), 128, True)
    budget: str = _key(
        "--eval-budget", "time of an evaluation after which no other prompt is begun", _a_span, "60s", True
    )


@dataclass(frozen=True, slots=True)
class Preflight:
    """What the agent sees to before each start."""

    devices: str = _key(
        "--devices", "GPUs: auto (clean ones), none, or indices, UUIDs or bus ids", _devices, ALL_GPUS, True
    )
    on_dirty: str = _key(
        "--on-dirty",
        "when they are not clean: wait, fail, or reap (end what user dflash has left behind, then wait)",
        _one_of(ON_DIRTY),
        "wait",
        True,
    )
    wait: str = _key("--preflight-wait", "how long an attempt waits for clean GPUs", _a_span, "2min", True)


@dataclass(frozen=True, slots=True)
class RunFile:
    """One run."""

    name: str
    target: Target
    data: Data
    output: Output
    train: Train
    drafter: Drafter
    eval: Eval
    preflight: Preflight


TABLES: dict[str, Any] = {
    "target": Target,
    "data": Data,
    "output": Output,
    "train": Train,
    "drafter": Drafter,
    "eval": Eval,
    "preflight": Preflight,
}
OF_THE_AGENT = ("preflight",)


def check_name(name: str) -> str:
    """The name of a run if it is one; no path is ever made of anything else. Raises ConfigError."""
    if not RUN_NAME.fullmatch(name):
        raise ConfigError(f"run name {name!r}: use 1 to 48 of a-z, 0-9 and '-', beginning with a letter or digit")
    return name


def path_of(name: str) -> Path:
    """Where the run file of `name` is. Raises ConfigError for what cannot be a name."""
    return RUNS_DIR / f"{check_name(name)}.toml"


def load(path: Path, overrides: Mapping[str, object] | None = None) -> RunFile:
    """The run in a file, named after it; overrides are keyed like "train.lr". Raises ConfigError."""
    name = check_name(path.name.removesuffix(".toml"))
    try:
        with path.open("rb") as file:
            tables = tomllib.load(file)
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist; make it with `dflashctl new {name} …`") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    values = {}
    for table, content in tables.items():
        if table not in TABLES:
            raise ConfigError(f"{path}: unknown table [{table}]; {nearest(table, TABLES)}")
        if not isinstance(content, dict):
            raise ConfigError(f"{path}: {table} = {content!r}: must be a table, [{table}]")
        for key, value in content.items():
            values[f"{table}.{key}"] = value
    return _build(name, values | dict(overrides or {}), str(path))


def from_flags(name: str, values: Mapping[str, object]) -> RunFile:
    """The run that flags alone describe, keyed like "train.lr". Raises ConfigError."""
    return _build(check_name(name), values, "command line")


def add_flags(parser: argparse.ArgumentParser, without: Collection[str] = ()) -> None:
    """A flag for every key but those of some tables. vars() of the result holds those given, as "train.lr"."""
    parsers: dict[type, Callable[[str], Any]] = {str: str, int: int, float: float, tuple: _parse_ids}
    for key, spec in schema():
        if key.partition(".")[0] in without:
            continue
        is_path = spec.metadata["check"] in (_a_path, _a_path_or_empty)
        kind = _kind(spec)
        parser.add_argument(
            spec.metadata["flag"],
            dest=key,
            default=argparse.SUPPRESS,
            metavar="DIR" if is_path else {str: "TEXT", int: "N", float: "X", tuple: "I,J,…"}[kind],
            type=os.path.abspath if is_path else parsers[kind],
            help=spec.metadata["help"].replace("%", "%%"),
        )


def schema() -> Iterator[tuple[str, "Field[Any]"]]:
    """Every key, like "train.lr", and its field: metadata holds flag, help, check and free."""
    for table, kind in TABLES.items():
        for spec in fields(kind):
            yield f"{table}.{spec.name}", spec


def value_of(run: RunFile, key: str) -> Any:
    """The value of a key like "train.lr"."""
    table, _, name = key.partition(".")
    return getattr(getattr(run, table), name)


def settings(run: RunFile) -> dict[str, Any]:
    """The keys that shape the result, as JSON has them: equal for all attempts of a run."""
    return _as_json({key: value_of(run, key) for key, spec in schema() if not spec.metadata["free"]})


def settings_of_then(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that an earlier version wrote down: for a key that it did not know it did what the default does."""
    defaults = {
        key: spec.default for key, spec in schema() if not spec.metadata["free"] and spec.default is not MISSING
    }
    return _as_json(defaults) | dict(recorded)


def _as_json(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}


def render(run: RunFile) -> str:
    """The run file: every key with what it means and its default."""
    lines = [f"# DFlash run {run.name}: see dflash-run(5). Check it with: dflashctl verify {run.name}"]
    for table, kind in TABLES.items():
        lines += ["", f"[{table}]"]
        for spec in fields(kind):
            default = "" if spec.default is MISSING else f" (default {_toml(spec.default)})"
            lines.append(f"# {spec.metadata['help']}{default}")
            lines.append(f"{spec.name} = {_toml(getattr(getattr(run, table), spec.name))}")
    return "\n".join(lines) + "\n"


def _build(name: str, values: Mapping[str, object], where: str) -> RunFile:
    known = dict(schema())
    tables: dict[str, dict[str, object]] = {table: {} for table in TABLES}
    for key, value in values.items():
        table, _, short = key.partition(".")
        if key not in known:
            names = [k.partition(".")[2] for k in known if k.startswith(table + ".")]
            raise ConfigError(f"{where}: unknown key {short} in [{table}]; {nearest(short, names)}")
        tables[table][short] = _convert(where, key, known[key], value)
    for key, spec in known.items():
        table, _, short = key.partition(".")
        if spec.default is MISSING and short not in tables[table]:
            raise ConfigError(f"{where}: {short} in [{table}] is missing; set it, or give {spec.metadata['flag']}")
    run = RunFile(name=name, **{table: kind(**tables[table]) for table, kind in TABLES.items()})
    if not run.output.dir:
        run = replace(run, output=replace(run.output, dir=str(STATE_DIR / name)))
    return run


def _convert(where: str, key: str, spec: "Field[Any]", value: object) -> object:
    table, _, short = key.partition(".")
    place = f"{where}: {short} = {json.dumps(value, default=str, ensure_ascii=False)} in [{table}]"
    kind = _kind(spec)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if kind is tuple and isinstance(value, list) and all(type(i) is int for i in value):
        value = tuple(value)
    if spec.metadata["check"] is _devices:  # TOML's own list, and a lone index, are as good
        words = value if isinstance(value, list) else [value]
        if words and all(type(word) in (str, int) for word in words):
            value = ",".join(map(str, words))
    if type(value) is not kind:
        wanted = {str: "text in quotes", int: "a whole number", float: "a number", tuple: "a list of whole numbers"}
        raise ConfigError(f"{place}: must be {wanted[kind]}")
    problem = spec.metadata["check"](value)
    if problem:
        raise ConfigError(f"{place}: {problem}")
    return value


def _kind(spec: "Field[Any]") -> type:
    return spec.type if isinstance(spec.type, type) else tuple


def _parse_ids(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip())


def nearest(word: str, known: Any) -> str:
    """What to say to a word that is not known."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"


def _toml(value: object) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(map(str, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)  # a JSON string is a TOML basic string
    return repr(value)
