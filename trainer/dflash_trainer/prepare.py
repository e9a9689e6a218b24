"""`dflash-train prepare`: prompts or chats → the target's own completions → a dataset to train on.

A drafter learns to predict its target, so it is trained on what the target itself writes. Completions are
appended to OUTPUT/completions.jsonl batch by batch; a run that was stopped goes on from there.
"""

import argparse
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from dflash_trainer.errors import CannotStart
from dflash_trainer.target import load_causal_lm

COMPLETIONS_FILE = "completions.jsonl"
SETTINGS_FILE = "completions.settings.json"
CARD_FILE = "card.json"
DATASET_DIR = "dataset"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A chat that ends with the user's turn, and where it stands in its file."""

    index: int
    kind: str
    messages: tuple[dict[str, str], ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `dflash-train prepare`."""
    parser.add_argument("--target-model", type=Path, required=True, metavar="DIR", help="Hugging Face directory")
    parser.add_argument(
        "--prompts", type=Path, required=True, metavar="FILE", help='JSONL: {"prompt": …} or {"messages": […]}'
    )
    parser.add_argument(
        "--output-dir", type=Path, required=True, metavar="DIR", help="gets completions and dataset/"
    )
    parser.add_argument(
        "--max-new-tokens", type=int, default=512, metavar="N", help="longest completion (%(default)s)"
    )
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help="prompts at a time (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0: greedy (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the sampling (%(default)s)")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N prompts")


def run(args: argparse.Namespace) -> int:
    """Completes every prompt and writes the dataset. Raises CannotStart for bad input."""
    for name in ("max_new_tokens", "batch_size"):
        if getattr(args, name) < 1:
            raise CannotStart(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least 1")
    prompts = read_prompts(args.prompts)[: args.limit]
    output: Path = args.output_dir
    output.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(args.target_model)
    settings = {
        "target": _hash(args.target_model / "config.json"),
        "tokenizer": _hash(args.target_model / "tokenizer.json"),
        "prompts": hashlib.sha256(json.dumps([asdict(p) for p in prompts]).encode()).hexdigest(),
        "max_new_tokens": args.max_new_tokens,
        "temperature": args.temperature,
        "seed": args.seed,
    }
    claim(output, settings)
    done = read_completions(output)
    left = [prompt for prompt in prompts if prompt.index not in done]
    if left:
        complete(args, tokenizer, left, output)
        done = read_completions(output)
    write_dataset(output, tokenizer, prompts, done, settings)
    return 0


def load_tokenizer(directory: Path) -> Any:
    """The target's tokenizer. Raises CannotStart if it has no chat template."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError) as error:
        detail = " ".join(str(error).split())[:300]
        raise CannotStart(f"target {directory}: its tokenizer cannot be loaded: {detail}") from error
    if not tokenizer.chat_template:
        raise CannotStart(
            f"target {directory}: its tokenizer has no chat template; use an instruction-tuned target"
        )
    return tokenizer


def read_prompts(path: Path) -> list[Prompt]:
    """Every line of a prompts file. Raises CannotStart naming the line that is none."""
    prompts: list[Prompt] = []
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CannotStart(f"prompts {path} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            messages = row["messages"] if "messages" in row else [{"role": "user", "content": row["prompt"]}]
            chat = tuple({"role": str(m["role"]), "content": m["content"]} for m in messages)
        except (ValueError, KeyError, TypeError) as error:
            raise CannotStart(
                f'{path}:{number}: not {{"prompt": "…"}} or {{"messages": [{{"role", "content"}}, …]}} '
                f"({type(error).__name__}: {error})"
            ) from error
        if not chat or chat[-1]["role"] != "user" or not all(isinstance(m["content"], str) for m in chat):
            raise CannotStart(f"{path}:{number}: a chat must be text and end with the user's turn")
        prompts.append(Prompt(len(prompts), str(row.get("kind", "")), chat))
    if not prompts:
        raise CannotStart(f"prompts {path} holds no prompt")
    return prompts


def prompt_ids(tokenizer: Any, prompt: Prompt) -> list[int]:
    """The chat as the target sees it, up to where it begins to answer."""
    text = tokenizer.apply_chat_template(list(prompt.messages), add_generation_prompt=True, tokenize=False)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def claim(output: Path, settings: dict[str, Any]) -> None:
    """Marks the output as made with these settings. Raises CannotStart if it was begun with others."""
    path = output / SETTINGS_FILE
    if path.exists():
        there = json.loads(path.read_text())
        differing = [key for key in settings if there.get(key) != settings[key]]
        if differing:
            raise CannotStart(
                f"{output} was begun with another {', '.join(differing)}; go on with the same, or choose another "
                f"--output-dir"
            )
    else:
        path.write_text(json.dumps(settings, indent=2) + "\n")


def read_completions(output: Path) -> dict[int, list[int]]:
    """Prompt index → tokens of its completion, of those done so far; a line torn by a crash does not count."""
    path = output / COMPLETIONS_FILE
    done = {}
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            done[int(row["prompt"])] = [int(i) for i in row["completion"]]
    return done


def complete(args: argparse.Namespace, tokenizer: Any, prompts: list[Prompt], output: Path) -> None:
    """Lets the target answer the prompts, those of similar length together, and appends what it wrote."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_causal_lm(args.target_model, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    tokenized = sorted(((prompt_ids(tokenizer, p), p) for p in prompts), key=lambda pair: len(pair[0]))
    with (
        (output / COMPLETIONS_FILE).open("a+") as file,
        tqdm(total=len(prompts), unit="prompt", disable=not sys.stderr.isatty()) as bar,
    ):
        _end_torn_line(file)
        for start in range(0, len(tokenized), args.batch_size):
            batch = tokenized[start : start + args.batch_size]
            seed = hash((args.seed, *(p.index for _, p in batch)))
            answers = generate(model, [ids for ids, _ in batch], args.max_new_tokens, args.temperature, seed)
            for (_, prompt), answer in zip(batch, answers, strict=True):
                file.write(json.dumps({"prompt": prompt.index, "completion": answer}) + "\n")
            file.flush()
            os.fsync(file.fileno())
            bar.update(len(batch))
            if bar.disable:
                print(f"{start + len(batch)} of {len(prompts)} prompts", file=sys.stderr, flush=True)


@torch.no_grad()
def generate(
    model: Any, prompts: list[list[int]], max_new_tokens: int, temperature: float, seed: int
) -> list[list[int]]:
    """The model's continuation of each prompt, with the token that ended it."""
    stops = stop_ids(model)
    longest = max(map(len, prompts))
    pad = min(stops)
    ids = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts], device=model.device)
    seen = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    torch.manual_seed(seed % 2**63)
    sampling = (
        {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        if temperature
        else {"do_sample": False}
    )
    out = model.generate(
        input_ids=ids,
        attention_mask=seen,
        max_new_tokens=max_new_tokens,
        pad_token_id=pad,
        eos_token_id=sorted(stops),
        repetition_penalty=1.0,
        **sampling,
    )
    return [list(_until_stop(row, stops)) for row in out[:, longest:].tolist()]


def stop_ids(model: Any) -> set[int]:
    """The tokens that end a turn, by the model's generation configuration."""
    for config in (model.generation_config, model.config.get_text_config()):
        ids = config.eos_token_id
        if ids is not None:
            return set(ids) if isinstance(ids, list) else {ids}
    raise CannotStart("the target names no end token: set eos_token_id in its generation_config.json")


def _until_stop(row: list[int], stops: set[int]) -> Iterator[int]:
    for token in row:
        yield token
        if token in stops:
            return


def _end_torn_line(file: Any) -> None:
    position = file.tell()
    if position:
        file.seek(position - 1)
        if file.read(1) != "\n":
            file.write("\n")


def write_dataset(
    output: Path, tokenizer: Any, prompts: list[Prompt], done: dict[int, list[int]], settings: dict[str, Any]
) -> None:
    """OUTPUT/dataset as datasets.save_to_disk makes it, with a card; appears whole or not at all."""
    from datasets import Dataset, Features, Sequence, Value, disable_progress_bars

    disable_progress_bars()
    rows = [(prompt_ids(tokenizer, p), done[p.index]) for p in prompts]
    lengths = sorted(len(before) + len(answer) for before, answer in rows)
    supervised = sum(len(answer) for _, answer in rows)
    card = {
        "rows": len(rows),
        "tokens": sum(lengths),
        "supervised_tokens": supervised,
        "supervised_share": round(supervised / sum(lengths), 4),
        "kinds": {kind: sum(p.kind == kind for p in prompts) for kind in sorted({p.kind for p in prompts})},
        "length": {q: lengths[min(len(lengths) - 1, len(lengths) * q // 100)] for q in (0, 25, 50, 75, 95, 100)},
        "settings": settings,
    }
    dataset = Dataset.from_dict(
        {
            "input_ids": [before + answer for before, answer in rows],
            "loss_mask": [[0] * len(before) + [1] * len(answer) for before, answer in rows],
        },
        features=Features({"input_ids": Sequence(Value("int32")), "loss_mask": Sequence(Value("int8"))}),
    )
    final, unfinished = output / DATASET_DIR, output / f".{DATASET_DIR}.writing"
    shutil.rmtree(unfinished, ignore_errors=True)
    dataset.save_to_disk(unfinished)
    (unfinished / CARD_FILE).write_text(json.dumps(card, indent=2) + "\n")
    if final.exists():
        shutil.rmtree(final)
    unfinished.rename(final)
    print(f"{final}: {card['rows']} rows, {card['tokens']} tokens, {supervised} of them supervised")


def _hash(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise CannotStart(
            f"{path} cannot be read: {error.strerror}; give the target's Hugging Face directory"
        ) from error
