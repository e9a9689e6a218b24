"""The token store: a dataset directory read once into flat arrays, from which batches are cut by slicing."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from dflash_agent import outputs
from dflash_agent.words import size
from numpy.typing import NDArray

from dflash_trainer.errors import CannotStart
from dflash_trainer.host import free_memory

COLUMNS = ("input_ids", "loss_mask")
REMEDY = "make the dataset with `dflash-train prepare`"
SHORT = "too short, fewer than 2 tokens"
UNSUPERVISED = "no two supervised tokens in a row"
BYTES_PER_TOKEN, BYTES_PER_ROW = 5, 16  # token and mask; offset and origin
BUILDING = 2  # while the parts are joined, they are there twice
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"  # how an Arrow stream ends, by its format


@dataclass(frozen=True, slots=True)
class TokenStore:
    """Sequence i is tokens[offsets[i]:offsets[i+1]]; its loss mask is 1 where a token is supervised."""

    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    offsets: NDArray[np.int64]  # [rows + 1]
    fingerprint: str  # sha256 of the three arrays
    skipped: dict[str, int]  # reason → rows left out
    cut: int  # rows that were longer than max_length
    origin: NDArray[np.int64]  # [rows] of the data set, those left out counted

    def summary(self) -> str:
        """One line for people."""
        total = len(self.tokens)
        supervised = int(self.loss_mask.sum(dtype=np.int64))
        text = (
            f"{len(self.offsets) - 1} rows, {total} tokens, {supervised} of them supervised "
            f"({100 * supervised / total:.0f} %)"
        )
        if self.cut:
            text += f"; {self.cut} rows cut to the longest length allowed"
        for reason, count in self.skipped.items():
            text += f"; {count} rows skipped: {reason}"
        return text


def load_store(directory: Path, max_length: int, vocab_size: int) -> TokenStore:
    """Reads a directory made by datasets.save_to_disk. Raises CannotStart for data that cannot be trained on.

    Rows that are too short or have no two supervised tokens in a row are skipped and counted; longer ones than
    max_length tokens are cut.
    """
    _check_memory(directory)
    tokens, masks, lengths = [np.empty(0, np.int32)], [np.empty(0, np.uint8)], [np.zeros(1, np.int64)]
    origin = [np.empty(0, np.int64)]
    skipped: Counter[str] = Counter()
    row = cut = 0
    for path in _data_files(directory):
        for batch in _record_batches(path):
            ids, sizes = _lists(batch, "input_ids", path, row)
            mask, mask_sizes = _lists(batch, "loss_mask", path, row)
            _check(ids, sizes, mask_sizes, vocab_size, path, row)
            supervised = mask != 0
            used = np.minimum(sizes, max_length)
            short = sizes < 2
            pairs = _supervised_pairs(supervised, sizes, used)
            keep = ~short & (pairs > 0)
            within = np.arange(len(ids)) - np.repeat(np.cumsum(sizes) - sizes, sizes) < max_length
            chosen = np.repeat(keep, sizes) & within
            tokens.append(ids[chosen].astype(np.int32))
            masks.append(supervised[chosen].astype(np.uint8))
            lengths.append(used[keep])
            origin.append(row + np.flatnonzero(keep))
            cut += int((keep & (sizes > max_length)).sum())
            skipped += Counter({SHORT: int(short.sum()), UNSUPERVISED: int((~short & (pairs == 0)).sum())})
            row += len(sizes)
    offsets = np.cumsum(np.concatenate(lengths))
    if len(offsets) == 1:
        reasons = "; ".join(f"{count} rows {reason}" for reason, count in skipped.items()) or "it has no rows"
        raise CannotStart(f"data {directory} has no supervised text to train on: {reasons}; {REMEDY}")
    arrays = np.concatenate(tokens), np.concatenate(masks), offsets
    return TokenStore(*arrays, _fingerprint(*arrays), dict(skipped), cut, np.concatenate(origin))


def _check_memory(directory: Path) -> None:
    """Raises CannotStart if the store would not fit into the host's memory, or into the unit's share of it."""
    rows = tokens = 0
    for path in _data_files(directory):
        for batch in _record_batches(path):
            rows += len(batch)
            values = batch.column("input_ids")
            tokens += len(values.flatten()) if hasattr(values, "flatten") else 0  # what is no list is refused later
    needed = BUILDING * (tokens * BYTES_PER_TOKEN + rows * BYTES_PER_ROW)
    free, reason = free_memory()
    if needed > free:
        raise CannotStart(
            f"data {directory} needs {size(needed)} of host memory to load, and {size(free)} are free ({reason}); "
            f"free memory, raise MemoryMax= of the unit, or train on less data"
        )


def _supervised_pairs(
    supervised: NDArray[np.bool_], sizes: NDArray[np.int64], used: NDArray[np.int64]
) -> NDArray[np.int64]:
    """In the first used[i] tokens of each row: how many are supervised and so is the one that follows."""
    before = np.zeros(len(supervised) + 1, np.int64)  # pairs that begin before each token, also across rows
    np.cumsum(supervised[:-1] & supervised[1:], out=before[1:-1])
    starts = np.cumsum(sizes) - sizes
    pairs: NDArray[np.int64] = before[starts + np.maximum(used - 1, 0)] - before[starts]
    return pairs


def _check(
    ids: NDArray[Any],
    sizes: NDArray[np.int64],
    mask_sizes: NDArray[np.int64],
    vocab_size: int,
    path: Path,
    first_row: int,
) -> None:
    """Raises CannotStart at the first row whose columns differ in length or that has an impossible token."""
    for i in np.flatnonzero(sizes != mask_sizes)[:1]:
        raise CannotStart(
            f"data {path}: row {first_row + i} has {sizes[i]} input_ids but {mask_sizes[i]} loss_mask entries; "
            f"there must be one for each token; {REMEDY}"
        )
    for at in np.flatnonzero((ids < 0) | (ids >= vocab_size))[:1]:
        ends = np.cumsum(sizes)
        i = np.searchsorted(ends, at, side="right")
        raise CannotStart(
            f"data {path}: row {first_row + i} has token {ids[at]} at position {at - ends[i] + sizes[i]}, but the "
            f"target's vocabulary is {vocab_size} (0 to {vocab_size - 1}); tokenize with the target's tokenizer"
        )


def _data_files(directory: Path) -> list[Path]:
    """The Arrow files of a dataset directory, in order."""
    splits = directory / "dataset_dict.json"
    if splits.exists():
        names = sorted(path.parent.name for path in directory.glob("*/state.json"))
        raise CannotStart(
            f"data {directory} holds several datasets ({', '.join(names)}); give the directory of one of them"
        )
    try:
        state = json.loads((directory / "state.json").read_text())
        return [directory / entry["filename"] for entry in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        _raise_if_passing(error)
        raise CannotStart(
            f"data {directory} is not a dataset directory: state.json cannot be read "
            f"({type(error).__name__}: {error}); give one made by datasets.save_to_disk, or {REMEDY}"
        ) from error


def _record_batches(path: Path) -> Iterator[Any]:
    """The record batches of an Arrow stream file. Raises CannotStart if it is not a whole one."""
    try:
        with path.open("rb") as file:
            file.seek(-min(len(_END_OF_STREAM), path.stat().st_size), 2)
            if file.read() != _END_OF_STREAM:
                raise CannotStart(
                    f"data {path} is cut short: {path.stat().st_size} bytes without an end mark; copy it again, or "
                    f"{REMEDY}"
                )
        with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as reader:
            missing = [column for column in COLUMNS if column not in reader.schema.names]
            if missing:
                raise CannotStart(
                    f"data {path} has no column {' and '.join(missing)}, only {', '.join(reader.schema.names)}; "
                    f"{REMEDY}"
                )
            yield from reader
    except (OSError, pa.ArrowException) as error:
        _raise_if_passing(error)
        detail = " ".join(str(error).split())
        raise CannotStart(f"data {path} cannot be read: {detail}; copy it again, or {REMEDY}") from error


def _raise_if_passing(error: Exception) -> None:
    """Raises an error of the file system that may be gone at the next attempt."""
    if isinstance(error, OSError) and error.errno in outputs.PASSING_ERRNOS:
        raise error


def _lists(batch: Any, column: str, path: Path, first_row: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """The values of a list column one after another, and the length of each row's."""
    array = batch.column(column)
    kind = array.type
    sized = pa.types.is_fixed_size_list(kind)
    if not (sized or pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not (
        pa.types.is_integer(kind.value_type) or pa.types.is_boolean(kind.value_type)
    ):
        raise CannotStart(f"data {path}: column {column} holds {kind}, not lists of integers; {REMEDY}")
    values = array.flatten()
    if array.null_count or values.null_count:
        raise CannotStart(
            f"data {path}: column {column} has a null in rows {first_row} to {first_row + len(array) - 1}; "
            f"remove it, or {REMEDY}"
        )
    if pa.types.is_boolean(kind.value_type):
        values = values.cast(pa.uint8())
    sizes = np.full(len(array), kind.list_size) if sized else np.diff(np.asarray(array.offsets))
    return np.asarray(values), sizes.astype(np.int64)


def _fingerprint(tokens: NDArray[np.int32], mask: NDArray[np.uint8], offsets: NDArray[np.int64]) -> str:
    digest = hashlib.sha256()
    for array in (offsets, tokens, mask):
        digest.update(array.data)
    return digest.hexdigest()
