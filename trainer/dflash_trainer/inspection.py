"""`dflash-train inspect`: what a dataset holds, as a person needs to see it before days are spent on it."""

import argparse
import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dflash_trainer.chats import read_tokenizer
from dflash_trainer.dataset import data_files
from dflash_trainer.errors import CannotStart
from dflash_trainer.host import cache_directory
from dflash_trainer.metrics import Reading
from dflash_trainer.store import TokenStore, load_store
from dflash_trainer.target import read_config

BINS, WIDTH = 12, 40  # of the length plot
SHOWN = 3  # rows, of samples and of what a problem names
LONGEST_SAMPLE = 4000  # characters
MARKS = ("⟦", "⟧")
COLOURS = ("\033[1;32m", "\033[0m")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    parser.add_argument("dataset", type=Path, help="dataset directory")
    parser.add_argument("--target-model", type=Path, required=True, metavar="DIR", help="whose tokens it holds")
    parser.add_argument("--max-length", type=int, default=4096, help="as the run's (%(default)s)")
    parser.add_argument("--row", type=int, nargs="*", metavar="N", help="show these rows, not some of all")


def run(args: argparse.Namespace) -> int:
    """Prints it; 1 if there are problems. Raises CannotStart for data that cannot be trained on, TryAgain."""
    tokenizer = read_tokenizer(args.target_model)
    vocabulary = int(read_config(args.target_model).vocab_size)
    with Reading(args.dataset) as reading:
        store = load_store(args.dataset, args.max_length, vocabulary, cache_directory(), reading.read_so_far)
    origin = store.survey.origin
    print(f"{args.dataset}: {len(data_files(args.dataset))} files; {store.survey.summary()}\n")
    print("\n".join(length_plot(np.diff(store.survey.offsets))))
    found = list(problems(store, tokenizer.eos_token_id))
    print("\n" + "\n".join(found or ["no problems found"]))
    if args.row is None:
        rows: Sequence[int] = np.linspace(0, len(origin) - 1, min(SHOWN, len(origin))).astype(int).tolist()
    else:
        places = {int(number): row for row, number in enumerate(origin)}
        for number in args.row:
            if number not in places:
                raise CannotStart(
                    f"{args.dataset} has no row {number} that is trained on; give one up to {origin[-1]}"
                )
        rows = [places[number] for number in args.row]
    marks = COLOURS if sys.stdout.isatty() and "NO_COLOR" not in os.environ else MARKS
    for row in rows:
        tokens, mask = row_of(store, row)
        print(f"\nrow {origin[row]}: {len(tokens)} tokens, {int(mask.sum())} supervised {'…'.join(MARKS)}:")
        print(marked(tokens, mask, lambda ids: str(tokenizer.decode(ids)), marks))
    return 1 if found else 0


def row_of(store: TokenStore, row: int) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    """Tokens and mask of a row."""
    part = slice(store.survey.offsets[row], store.survey.offsets[row + 1])
    return store.tokens[part], store.loss_mask[part]


def length_plot(lengths: NDArray[np.int64]) -> list[str]:
    """How many rows have how many tokens, as lines with bars.

    >>> print(*length_plot(np.array([1, 2, 2, 12])), sep=chr(10))
    tokens   rows
      1–1      1  ████████████████████
      2–2      2  ████████████████████████████████████████
     12–12     1  ████████████████████
    median 2, nine of ten up to 9, longest 12
    """
    low, high = int(lengths.min()), int(lengths.max())
    step = -(-(high - low + 1) // BINS)
    counts = np.bincount((lengths - low) // step)
    digits = len(str(high))
    size = max(4, len(str(counts.max())))
    lines = [f"{'tokens':<{2 * digits + 4}} {'rows':>{size}}"]
    for i in np.flatnonzero(counts):
        begin, end = low + i * step, min(high, low + (i + 1) * step - 1)
        bar = "█" * max(1, round(WIDTH * counts[i] / counts.max()))
        lines.append(f" {begin:>{digits}}–{end:<{digits}}  {counts[i]:>{size}}  {bar}")
    median, most = np.percentile(lengths, [50, 90])
    return [*lines, f"median {median:.0f}, nine of ten up to {most:.0f}, longest {high}"]


def problems(store: TokenStore, end: int | None) -> Iterator[str]:
    """What a person would want to mend, a line for each kind; `end` is the token that ends a turn."""
    seen: dict[bytes, int] = {}
    again, whole, endless = [], [], []
    ends = end is not None and bool((store.tokens == end).any())
    for row, number in enumerate(store.survey.origin.tolist()):
        tokens, mask = row_of(store, row)
        if seen.setdefault(hashlib.blake2b(tokens.data, digest_size=16).digest(), row) != row:
            again.append(number)
        if mask.all():
            whole.append(number)
        if ends:
            last = int(np.flatnonzero(mask)[-1])
            if (
                end not in tokens[max(0, last - 1) : last + 2]
            ):  # templates put a line feed after it, supervised or not
                endless.append(number)
    for numbers, what in (
        (again, "hold the same tokens as one before"),
        (whole, "are supervised from the first token to the last: prompts are learned too"),
        (
            endless,
            f"do not end their last supervised part with the token {end}: cut short, or the end is not learned",
        ),
    ):
        if numbers:
            share = 100 * len(numbers) / len(store.survey.origin)
            named = ", ".join(map(str, numbers[:SHOWN]))
            yield f"{len(numbers)} rows ({share:.1f} %) {what}: {named}{', …' * (len(numbers) > SHOWN)}"


def marked(
    tokens: NDArray[np.int32],
    mask: NDArray[np.uint8],
    decode: Callable[[list[int]], str],
    marks: tuple[str, str],
) -> str:
    """The text of a row with each supervised part between the marks; control characters but line ends are shown."""
    borders = np.flatnonzero(np.diff(mask != 0)) + 1
    text = ""
    for part in np.split(np.arange(len(tokens)), borders):
        words = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in decode(tokens[part].tolist()))
        room = LONGEST_SAMPLE - len(text)
        words = words if len(words) <= room else words[: max(0, room)] + " …"
        text += f"{marks[0]}{words}{marks[1]}" if mask[part[0]] else words
        if len(text) > LONGEST_SAMPLE:
            break
    return text
