"""`dflash-train prepare`: prompts or chats → the target's own completions → a dataset to train on.

A drafter learns to predict its target, so it is trained on what the target itself writes. Completions are
appended to OUTPUT/completions.jsonl batch by batch; when stopped, the same command goes on from there and ends
with the same dataset, since the batches are a function of the prompts alone.
"""

import argparse
import contextlib
import hashlib
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from dflash_trainer.errors import CannotStart, TryAgain
from dflash_trainer.host import choose_device
from dflash_trainer.target import load_causal_lm, target_fingerprint
from dflash_trainer.whole import whole_directory

COMPLETIONS_FILE = "completions.jsonl"
SETTINGS_FILE = "completions.settings.json"
DATASET_DIR = "dataset"
CARD_FILE = "card.json"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A chat that ends with the user's turn, as it stands in its file and as the target reads it."""

    index: int  # among the prompts of the file
    kind: str
    ids: tuple[int, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `dflash-train prepare`."""
    add = parser.add_argument
    add("--target-model", type=Path, required=True, metavar="DIR", help="Hugging Face directory of the target")
    add("--prompts", type=Path, required=True, metavar="FILE", help='JSONL: {"prompt": …} or {"messages": […]}')
    add("--output-dir", type=Path, required=True, metavar="DIR", help="gets completions.jsonl and dataset/")
    add("--max-new-tokens", type=int, default=1024, metavar="N", help="longest completion (%(default)s)")
    add("--max-length", type=int, default=4096, metavar="N", help="longest row with its prompt (%(default)s)")
    add("--batch-size", type=int, default=32, metavar="N", help="prompts at a time (%(default)s)")
    add("--temperature", type=float, default=0.0, metavar="X", help="of the sampling; 0 is greedy (%(default)s)")
    add("--limit", type=int, metavar="N", help="only the first N prompts")


def run(args: argparse.Namespace) -> int:
    """Completes the prompts and writes the dataset. Raises CannotStart for bad input, TryAgain for a full disk."""
    for name in ("max_new_tokens", "max_length", "batch_size"):
        if getattr(args, name) < 1:
            raise CannotStart(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least 1")
    if not args.temperature >= 0:
        raise CannotStart(f"--temperature {args.temperature}: must be 0 or more")
    tokenizer = load_tokenizer(args.target_model)
    prompts = read_prompts(args.prompts, tokenizer, args.limit)
    settings = describe(args, tokenizer, prompts)
    output: Path = args.output_dir
    output.mkdir(parents=True, exist_ok=True)
    claim(output, settings)
    with stoppable():
        try:
            write_dataset(output, prompts, complete(args, prompts, output), settings)
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


def read_tokenizer(directory: Path) -> Any:
    """The target's tokenizer. Raises CannotStart if it cannot be loaded."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError) as error:
        detail = " ".join(str(error).split())[:300]
        raise CannotStart(f"target {directory}: its tokenizer cannot be loaded: {detail}") from error


def load_tokenizer(directory: Path) -> Any:
    """The same, with a chat template. Raises CannotStart also if it has none."""
    tokenizer = read_tokenizer(directory)
    if not tokenizer.chat_template:
        raise CannotStart(f"target {directory}: its tokenizer has no chat template; use one tuned to instructions")
    return tokenizer


def read_prompts(path: Path, tokenizer: Any, limit: int | None = None) -> list[Prompt]:
    """The first `limit` prompts of a file, tokenized. Raises CannotStart naming the line that is none."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CannotStart(f"prompts {path} cannot be read: {error}") from error
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()][:limit]
    if not numbered:
        raise CannotStart(f"prompts {path} holds no prompt")
    prompts: list[Prompt] = []
    for number, line in numbered:
        try:
            kind, chat = _parse(line)
            text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # a chat template raises what it likes
            raise CannotStart(
                f'{path}:{number}: {" ".join(str(error).split())}; a line is {{"prompt": "…"}}, or {{"messages": '
                f'[{{"role": "user", "content": "…"}}, …]}} ending with the user\'s turn'
            ) from error
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        prompts.append(Prompt(len(prompts), kind, tuple(ids)))
    return prompts


def _parse(line: str) -> tuple[str, list[dict[str, str]]]:
    """Kind and chat of a line. Raises ValueError."""
    row = json.loads(line)
    if not isinstance(row, dict) or ("prompt" in row) == ("messages" in row):
        raise ValueError("neither or both of prompt and messages")
    chat = row["messages"] if "messages" in row else [{"role": "user", "content": row["prompt"]}]
    if not isinstance(chat, list) or not chat:
        raise ValueError("messages is not a list of turns")
    for turn in chat:
        if not isinstance(turn, dict) or not all(isinstance(turn.get(key), str) for key in ("role", "content")):
            raise ValueError("a turn whose role or content is not text")
    if chat[-1]["role"] != "user" or not chat[-1]["content"].strip():
        raise ValueError("the last turn is not the user's, or empty")
    return str(row.get("kind", "")), [{"role": turn["role"], "content": turn["content"]} for turn in chat]


def describe(args: argparse.Namespace, tokenizer: Any, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """What the completions depend on, but for rounding; files and texts as their sha256."""
    directory: Path = args.target_model
    try:
        return {
            "target": target_fingerprint(directory),
            "target_config": _sha256((directory / "config.json").read_bytes()),
            "tokenizer": _sha256((directory / "tokenizer.json").read_bytes()),
            "chat_template": _sha256(str(tokenizer.chat_template).encode()),
            "prompts": _sha256(json.dumps([prompt.ids for prompt in prompts]).encode()),
            "max_new_tokens": args.max_new_tokens,
            "max_length": args.max_length,
            "temperature": args.temperature,
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
            if there[key] != value
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


def complete(args: argparse.Namespace, prompts: Sequence[Prompt], output: Path) -> dict[int, NDArray[np.int32]]:
    """Prompt index → the target's completion, of every prompt that leaves room for one."""
    fitting = [prompt for prompt in prompts if len(prompt.ids) < args.max_length]
    if len(fitting) < len(prompts):
        print(
            f"{len(prompts) - len(fitting)} prompts skipped: {args.max_length} tokens or longer, which leaves no "
            f"room for a completion; raise --max-length to use them",
            file=sys.stderr,
        )
    # Similar lengths together, for little padding; the longest first, so that want of memory shows at once.
    ordered = sorted(fitting, key=lambda prompt: len(prompt.ids), reverse=True)
    batches = [ordered[i : i + args.batch_size] for i in range(0, len(ordered), args.batch_size)]
    with (output / COMPLETIONS_FILE).open("a+b") as file:
        completions = read_completions(file, output / COMPLETIONS_FILE)
        left = [batch for batch in batches if any(prompt.index not in completions for prompt in batch)]
        if left:
            device = choose_device()
            dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
            model = load_causal_lm(args.target_model, device, dtype)
            for batch in _with_progress(left, sum(map(len, batches)), completions):
                room = [min(args.max_new_tokens, args.max_length - len(prompt.ids)) for prompt in batch]
                torch.manual_seed(batch[0].index)  # only sampling asks for it
                answers = generate(model, [prompt.ids for prompt in batch], max(room), args.temperature)
                for prompt, answer, most in zip(batch, answers, room, strict=True):
                    completions[prompt.index] = np.array(answer[:most], np.int32)
                    row = {"prompt": prompt.index, "completion": answer[:most]}
                    file.write(json.dumps(row).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
    return completions


def read_completions(file: BinaryIO, path: Path) -> dict[int, NDArray[np.int32]]:
    """What is in the file so far; cuts off a last line torn by a crash. Raises CannotStart for a damaged one."""
    file.seek(0)
    content = file.read()
    whole = content[: content.rfind(b"\n") + 1]
    file.truncate(len(whole))
    completions = {}
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            row = json.loads(line)
            completions[int(row["prompt"])] = np.array(row["completion"], np.int32)
        except (ValueError, KeyError, TypeError) as error:
            raise CannotStart(f"{path}:{number} is damaged ({error}); remove the line, and go on") from error
    return completions


def _with_progress(
    left: Sequence[Sequence[Prompt]], total: int, completions: dict[int, NDArray[np.int32]]
) -> Iterator[Sequence[Prompt]]:
    """The batches that are left; a bar on a terminal, else a line after each."""
    began = time.monotonic()
    before = sum(map(len, completions.values()))
    with tqdm(total=total, initial=len(completions), unit="prompt", disable=not sys.stderr.isatty()) as bar:
        for batch in left:
            yield batch
            tokens = sum(map(len, completions.values())) - before
            rate = f"{tokens / (time.monotonic() - began):.0f} tokens/s"
            bar.update(len(completions) - bar.n)
            bar.set_postfix_str(rate)
            if bar.disable:
                print(f"{len(completions)} of {total} prompts, {rate}", file=sys.stderr, flush=True)


@torch.no_grad()
def generate(
    model: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int, temperature: float
) -> list[list[int]]:
    """The model's continuation of each prompt, with the token that ended it.

    Its own distribution, or greedy at temperature 0: no penalty or filter that its generation_config asks for,
    since speculative decoding verifies against the model's plain choice.
    """
    from transformers import GenerationConfig

    stops = stop_ids(model)
    longest = max(map(len, prompts))
    pad = min(stops)
    rows = [[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    seen = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        eos_token_id=sorted(stops),
        pad_token_id=pad,
        max_new_tokens=max_new_tokens,
        **({"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}),
    )
    out = model.generate(
        input_ids=torch.tensor(rows, device=model.device), attention_mask=torch.tensor(seen, device=model.device)
    )
    return [until_stop(row, stops) for row in out[:, longest:].tolist()]


def stop_ids(model: Any) -> set[int]:
    """The tokens that end a turn, by the model's generation configuration. Raises CannotStart."""
    for config in (model.generation_config, model.config.get_text_config()):
        ids = config.eos_token_id
        if ids is not None:
            return set(ids) if isinstance(ids, list) else {ids}
    raise CannotStart("the target names no end token: set eos_token_id in its generation_config.json")


def until_stop(tokens: list[int], stops: set[int]) -> list[int]:
    """The tokens up to the first stop token, and with it."""
    return tokens[: next((i + 1 for i, token in enumerate(tokens) if token in stops), len(tokens))]


def write_dataset(
    output: Path,
    prompts: Sequence[Prompt],
    completions: dict[int, NDArray[np.int32]],
    settings: dict[str, Any],
) -> None:
    """OUTPUT/dataset as datasets.save_to_disk makes it, and a card; appears whole or not at all."""
    from datasets import Dataset, Features, List, Value, disable_progress_bars

    disable_progress_bars()
    chosen = [prompt for prompt in prompts if prompt.index in completions]
    answers = [completions[prompt.index] for prompt in chosen]
    dataset = Dataset.from_dict(
        {
            "input_ids": [
                np.concatenate((np.array(prompt.ids, np.int32), answer))
                for prompt, answer in zip(chosen, answers, strict=True)
            ],
            "loss_mask": [
                np.repeat(np.array([0, 1], np.int8), (len(prompt.ids), len(answer)))
                for prompt, answer in zip(chosen, answers, strict=True)
            ],
        },
        features=Features({"input_ids": List(Value("int32")), "loss_mask": List(Value("int8"))}),
    )
    lengths = [len(prompt.ids) + len(answer) for prompt, answer in zip(chosen, answers, strict=True)]
    supervised = sum(map(len, answers))
    card = {
        "rows": len(chosen),
        "tokens": sum(lengths),
        "supervised_tokens": supervised,
        "supervised_share": round(supervised / sum(lengths), 4),
        "kinds": dict(sorted(Counter(prompt.kind for prompt in chosen).items())),
        "lengths": length_histogram(lengths),
        "settings": settings,
    }
    with whole_directory(output / DATASET_DIR) as unfinished:
        dataset.save_to_disk(unfinished)
        (unfinished / CARD_FILE).write_text(json.dumps(card, indent=2) + "\n")
    print(f"{output / DATASET_DIR}: {len(chosen)} rows, {sum(lengths)} tokens, {supervised} of them supervised")


def length_histogram(lengths: Sequence[int]) -> dict[str, int]:
    """Rows by length in tokens, in ranges that double: "64-127" → rows."""
    counts = Counter(length.bit_length() - 1 for length in lengths)
    return {f"{1 << power}-{(2 << power) - 1}": counts[power] for power in sorted(counts)}
