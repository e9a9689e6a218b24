"""Completions of prompts, by the target itself or by a server that runs it; kept as they come, for `prepare`.

They are appended to OUTPUT/completions.jsonl batch by batch. What is there is not made again, and the batches are a
function of the prompts alone: so an interrupted work goes on and ends with the same completions.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from dflash_trainer.chats import Prompt
from dflash_trainer.errors import CannotStart
from dflash_trainer.host import choose_device
from dflash_trainer.target import load_causal_lm, read_config

COMPLETIONS_FILE = "completions.jsonl"
TELL = 10.0  # seconds between lines of progress


def complete(
    args: argparse.Namespace, prompts: Sequence[Prompt], tokenizer: Any, output: Path
) -> dict[int, NDArray[np.int32] | None]:
    """Prompt index → the target's completion, of every prompt that leaves room for one; None if it is not known."""
    fitting = [prompt for prompt in prompts if len(prompt.ids) < args.max_length]
    if len(fitting) < len(prompts):
        print(
            f"{len(prompts) - len(fitting)} prompts skipped: {args.max_length} tokens or longer, which leaves no "
            f"room for a completion; raise --max-length to use them",
            file=sys.stderr,
        )
    with (output / COMPLETIONS_FILE).open("a+b") as file:
        completions = read_completions(file, output / COMPLETIONS_FILE)
        by = by_server if args.server else by_target
        for answers in _with_progress(by(args, fitting, tokenizer, completions), len(fitting), completions):
            for index, answer in answers.items():
                completions[index] = None if answer is None else np.array(answer, np.int32)
                file.write(json.dumps({"prompt": index, "completion": answer}).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
    return completions


Answers = Iterator[dict[int, list[int] | None]]


def by_target(
    args: argparse.Namespace, prompts: Sequence[Prompt], _tokenizer: Any, there: Container[int]
) -> Answers:
    """What the target itself writes, batch by batch; batches that are there are left out."""
    # Similar lengths together, for little padding; the longest first, so that want of memory shows at once.
    ordered = sorted(prompts, key=lambda prompt: len(prompt.ids), reverse=True)
    batches = [ordered[i : i + args.batch_size] for i in range(0, len(ordered), args.batch_size)]
    left = [batch for batch in batches if any(prompt.index not in there for prompt in batch)]
    if not left:
        return
    device = choose_device()
    model = load_causal_lm(args.target_model, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    for batch in left:
        room = [min(args.max_new_tokens, args.max_length - len(prompt.ids)) for prompt in batch]
        torch.manual_seed(batch[0].index)  # only sampling asks for it
        answers = generate(model, [prompt.ids for prompt in batch], max(room), args.temperature)
        yield {p.index: answer[:most] for p, answer, most in zip(batch, answers, room, strict=True)}


def by_server(
    args: argparse.Namespace, prompts: Sequence[Prompt], tokenizer: Any, there: Container[int]
) -> Answers:
    """What a server writes, answer by answer."""
    from dflash_trainer import server

    questions = [
        server.Question(prompt.index, prompt.ids, min(args.max_new_tokens, args.max_length - len(prompt.ids)))
        for prompt in prompts
        if prompt.index not in there
    ]
    stops = stop_ids_of(args.target_model)
    if questions:
        for key, answer in server.complete(
            args.server, args.server_model, questions, tokenizer, stops, args.temperature, args.concurrency
        ):
            yield {key: answer}


def read_completions(file: BinaryIO, path: Path) -> dict[int, NDArray[np.int32] | None]:
    """What is in the file so far; cuts off a last line torn by a crash. Raises CannotStart for a damaged one."""
    file.seek(0)
    content = file.read()
    whole = content[: content.rfind(b"\n") + 1]
    file.truncate(len(whole))
    completions: dict[int, NDArray[np.int32] | None] = {}
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            row = json.loads(line)
            answer = row["completion"]
            completions[int(row["prompt"])] = None if answer is None else np.array(answer, np.int32)
        except (ValueError, KeyError, TypeError) as error:
            raise CannotStart(f"{path}:{number} is damaged ({error}); remove the line, and go on") from error
    return completions


def _with_progress(work: Answers, total: int, completions: Mapping[int, NDArray[np.int32] | None]) -> Answers:
    """The same answers; a bar on a terminal, else a line now and then."""

    def tokens() -> int:
        return sum(len(answer) for answer in completions.values() if answer is not None)

    began = told = time.monotonic()
    before = tokens()
    with tqdm(total=total, initial=len(completions), unit="prompt", disable=not sys.stderr.isatty()) as bar:
        for answers in work:
            yield answers
            bar.update(len(completions) - bar.n)
            now = time.monotonic()
            if len(answers) > 1 or now - told > TELL or len(completions) == total:
                told = now
                rate = f"{(tokens() - before) / (now - began):.0f} tokens/s"
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
    return _stops(model.generation_config, model.config.get_text_config())


def stop_ids_of(directory: Path) -> set[int]:
    """The same of a target that is not loaded. Raises CannotStart."""
    from transformers import GenerationConfig

    config = read_config(directory)
    try:
        return _stops(GenerationConfig.from_pretrained(directory, local_files_only=True), config)
    except OSError:  # it has none
        return _stops(config)


def _stops(*configs: Any) -> set[int]:
    for config in configs:
        ids = config.eos_token_id
        if ids is not None:
            return set(ids) if isinstance(ids, list) else {ids}
    raise CannotStart("the target names no end token: set eos_token_id in its generation_config.json")


def until_stop(tokens: list[int], stops: set[int]) -> list[int]:
    """The tokens up to the first stop token, and with it."""
    return tokens[: next((i + 1 for i, token in enumerate(tokens) if token in stops), len(tokens))]
