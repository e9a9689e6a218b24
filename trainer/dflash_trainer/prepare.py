"""`dflash-train prepare`: prompts or chats → the target's own completions → a dataset to train on.

A drafter learns to predict its target, so it is trained on what the target itself writes, here or in a server, or
wrote before. When stopped, the same command goes on from there and ends with the same dataset.
"""

import argparse
import contextlib
import hashlib
import itertools
import json
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from dflash_trainer.chats import (
    Chat,
    Prompt,
    Row,
    answered_rows,
    as_prompts,
    load_tokenizer,
    read_chats,
    template_arguments,
    tokenizer_hashes,
)
from dflash_trainer.completions import complete, stop_ids_of
from dflash_trainer.dataset import CARD_FILE
from dflash_trainer.errors import CannotStart, TryAgain
from dflash_trainer.target import target_fingerprint
from dflash_trainer.whole import whole_directory

SETTINGS_FILE = "completions.settings.json"
HELDOUT_FILE = "heldout.jsonl"
DATASET_DIR = "dataset"


@dataclass(frozen=True, slots=True)
class Split:
    """The chats of a file, and why some are not trained on."""

    chats: list[Chat]
    held_out: list[Chat]
    repeated: int  # ask what a held-out one, or one of --without, asks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `dflash-train prepare`."""
    add = parser.add_argument
    add("--target-model", type=Path, required=True, metavar="DIR", help="Hugging Face directory of the target")
    add("--prompts", type=Path, required=True, metavar="FILE", help="JSON lines: prompt, messages or conversations")
    add("--output-dir", type=Path, required=True, metavar="DIR", help="gets completions.jsonl and dataset/")
    add(
        "--responses",
        choices=("write", "keep"),
        default="write",
        help="have the target write the last answer of each chat, or keep all answers as they are (%(default)s)",
    )
    add("--max-new-tokens", type=int, default=1024, metavar="N", help="longest completion (%(default)s)")
    add("--max-length", type=int, default=4096, metavar="N", help="longest row with its prompt (%(default)s)")
    add("--batch-size", type=int, default=32, metavar="N", help="prompts at a time (%(default)s)")
    add("--temperature", type=float, default=0.0, metavar="X", help="of the sampling; 0 is greedy (%(default)s)")
    add("--limit", type=int, metavar="N", help="only the first N prompts")
    add("--heldout", type=float, default=0.0, metavar="SHARE", help="of the prompts to keep for eval (%(default)s)")
    add("--without", type=Path, metavar="FILE", help="leave out what these prompts ask too")
    add(
        "--chat-template-kwargs",
        type=template_arguments,
        default={},
        metavar="JSON",
        help='for the chat template, as servers take them: {"enable_thinking": false}',
    )
    add("--server", metavar="URL", help="let this server complete them (OpenAI's interface: vLLM, SGLang)")
    add("--server-model", metavar="NAME", help="its name there; default: the first that it lists")
    add("--concurrency", type=int, default=64, metavar="N", help="questions to the server at a time (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Completes the prompts and writes the dataset. Raises CannotStart for bad input, TryAgain for a full disk."""
    for name in ("max_new_tokens", "max_length", "batch_size", "concurrency"):
        if getattr(args, name) < 1:
            raise CannotStart(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least 1")
    if not args.temperature >= 0:
        raise CannotStart(f"--temperature {args.temperature}: must be 0 or more")
    if not 0 <= args.heldout < 1:
        raise CannotStart(f"--heldout {args.heldout}: must be a share: 0 or more, less than 1")
    tokenizer = load_tokenizer(args.target_model)
    split = split_chats(read_chats(args.prompts, args.limit), args.heldout, args.without)
    output: Path = args.output_dir
    more = {"heldout": len(split.held_out), "repeated": split.repeated, "server": args.server}
    with stoppable():
        try:
            if args.responses == "keep":
                rows, left_out = kept_rows(args, tokenizer, split.chats)
                settings = describe(args, tokenizer, [row.ids for row in rows])
            else:
                prompts = as_prompts(split.chats, tokenizer, args.chat_template_kwargs, args.prompts)
                settings = describe(args, tokenizer, [prompt.ids for prompt in prompts])
            output.mkdir(parents=True, exist_ok=True)
            claim(output, settings)
            write_heldout(output, split.held_out)
            if args.responses != "keep":
                rows, left_out = written_rows(prompts, complete(args, prompts, tokenizer, output))
            write_dataset(output, rows, {"settings": settings, **more, "left_out": left_out})
        except KeyboardInterrupt:
            print("stopped; the same command goes on from here", file=sys.stderr)
            return 130
        except torch.OutOfMemoryError as error:
            raise TryAgain(
                "GPU out of memory; the same command with a lower --batch-size goes on from here"
            ) from error
        except OSError as error:
            raise TryAgain(
                f"output {output}: {error}; mend that, and the same command goes on from here"
            ) from error
    return 0


def split_chats(chats: Sequence[Chat], share: float, without: Path | None) -> Split:
    """Which chats are trained on; the held-out ones by what they ask, so that more prompts change none's side."""
    known = {key for chat in read_chats(without) for key in chat.keys} if without else set()
    held_out = [chat for chat in chats if int(chat.key, 16) < share * 2**256]
    first = {chat.key: chat for chat in reversed(held_out)}
    left = [chat for chat in chats if not chat.keys & (first.keys() | known)]
    repeated = len(chats) - len(left) - len(first)
    if not left:
        raise CannotStart(
            f"no prompt is left to train on: {len(first)} held out, {repeated} that ask the same or are in "
            f"--without; lower --heldout, or give more prompts"
        )
    return Split(left, list(first.values())[::-1], repeated)


def write_heldout(output: Path, chats: Sequence[Chat]) -> None:
    """OUTPUT/heldout.jsonl, for `dflash-train eval` and [eval] of a run."""
    if not chats:
        return
    rows = [
        {"kind": chat.kind, "messages": chat.asked} | ({"tools": chat.tools} if chat.tools else {})
        for chat in chats
    ]
    unsure = output / f".{HELDOUT_FILE}.new"
    unsure.write_text("".join(json.dumps(row) + "\n" for row in rows))
    unsure.replace(output / HELDOUT_FILE)


def kept_rows(args: argparse.Namespace, tokenizer: Any, chats: Sequence[Chat]) -> tuple[list[Row], dict[str, int]]:
    """The rows of chats that are taken as they are, and how many are left out, by reason."""
    stops = stop_ids_of(args.target_model)
    rows, left_out = [], Counter[str]()
    for chat in tqdm(chats, unit="chat", disable=not sys.stderr.isatty()):
        if chat.turns[-1]["role"] != "assistant":
            left_out["no answer at the end"] += 1
            continue
        found = answered_rows(tokenizer, chat, args.chat_template_kwargs, stops, args.prompts)
        left_out["the chat template asks in another way than it shows answers"] += not found
        for row in found:
            cut = Row(row.kind, row.ids[: args.max_length], row.mask[: args.max_length])
            if any(a and b for a, b in itertools.pairwise(cut.mask)):
                rows.append(cut)
            else:
                left_out["no two tokens of the assistant in a row"] += 1
    if not rows:
        reasons = "; ".join(f"{count} with {reason}" for reason, count in left_out.items() if count)
        raise CannotStart(f"prompts {args.prompts} have no answers to keep: {reasons}; use --responses write")
    return rows, {reason: count for reason, count in left_out.items() if count}


def written_rows(
    prompts: Sequence[Prompt], completions: Mapping[int, NDArray[np.int32] | None]
) -> tuple[list[Row], dict[str, int]]:
    """Prompts with what the target wrote, and how many are left out, by reason."""
    rows = []
    for prompt in prompts:
        answer = completions.get(prompt.index)
        if answer is not None:
            mask = (0,) * len(prompt.ids) + (1,) * len(answer)
            rows.append(Row(prompt.kind, (*prompt.ids, *answer.tolist()), mask))
    unknown = sum(answer is None for answer in completions.values())
    short = len(prompts) - len(completions)
    reasons = {"no room for a completion": short, "the server's text is not that of its tokens": unknown}
    return rows, {reason: count for reason, count in reasons.items() if count}


def describe(args: argparse.Namespace, tokenizer: Any, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """What the rows depend on, but for rounding; files and texts as their sha256."""
    directory: Path = args.target_model
    try:
        return {
            "target": target_fingerprint(directory),
            "target_config": _sha256((directory / "config.json").read_bytes()),
            **tokenizer_hashes(directory, tokenizer),
            "prompts": _sha256(json.dumps(prompts).encode()),
            "max_new_tokens": args.max_new_tokens,
            "max_length": args.max_length,
            "temperature": args.temperature,
            "responses": args.responses,
            "chat_template_kwargs": json.dumps(args.chat_template_kwargs, sort_keys=True),
        }
    except OSError as error:
        raise CannotStart(f"target {directory}: {error}; give a Hugging Face model directory") from error


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def claim(output: Path, settings: dict[str, Any]) -> None:
    """Marks the output as made with these settings. Raises CannotStart if it was begun with others."""
    path = output / SETTINGS_FILE
    if not path.exists():
        unsure = path.with_suffix(".tmp")
        unsure.write_text(json.dumps(settings, indent=2) + "\n")
        unsure.replace(path)
        return
    try:
        there = json.loads(path.read_text())
        differing = [
            f"another {key}" if isinstance(value, str) else f"{key} {there[key]}, now {value}"
            for key, value in settings.items()
            if there.get(key, value) != value  # a key that an earlier version did not write
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise CannotStart(f"{path} is damaged ({error!r}); choose another --output-dir") from error
    if differing:
        raise CannotStart(
            f"output {output} was begun with {'; '.join(differing)}; restore that, or choose another --output-dir"
        )


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Lets SIGTERM end the work as Ctrl-C does, by KeyboardInterrupt."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def write_dataset(output: Path, rows: Sequence[Row], more: dict[str, Any]) -> None:
    """OUTPUT/dataset as datasets.save_to_disk makes it, and a card; appears whole or not at all."""
    from datasets import Dataset, Features, List, Value, disable_progress_bars

    disable_progress_bars()
    dataset = Dataset.from_dict(
        {
            "input_ids": [np.array(row.ids, np.int32) for row in rows],
            "loss_mask": [np.array(row.mask, np.int8) for row in rows],
        },
        features=Features({"input_ids": List(Value("int32")), "loss_mask": List(Value("int8"))}),
    )
    lengths = [len(row.ids) for row in rows]
    supervised = sum(sum(row.mask) for row in rows)
    card = {
        "rows": len(rows),
        "tokens": sum(lengths),
        "supervised_tokens": supervised,
        "supervised_share": round(supervised / sum(lengths), 4),
        "kinds": dict(sorted(Counter(row.kind for row in rows).items())),
        "lengths": length_histogram(lengths),
        **more,
    }
    with whole_directory(output / DATASET_DIR) as unfinished:
        dataset.save_to_disk(unfinished)
        (unfinished / CARD_FILE).write_text(json.dumps(card, indent=2) + "\n")
    print(f"{output / DATASET_DIR}: {len(rows)} rows, {sum(lengths)} tokens, {supervised} of them supervised")
    for reason, count in more["left_out"].items():
        print(f"left out: {count}: {reason}")
    if more["heldout"]:
        print(f"{output / HELDOUT_FILE}: {more['heldout']} prompts")
    if more["repeated"]:
        print(f"left out: {more['repeated']} prompts that a held-out one asks too")


def length_histogram(lengths: Sequence[int]) -> dict[str, int]:
    """Rows by length in tokens, in ranges that double: "64-127" → rows."""
    counts = Counter(length.bit_length() - 1 for length in lengths)
    return {f"{1 << power}-{(2 << power) - 1}": counts[power] for power in sorted(counts)}
