"""The token store: a dataset directory read once into flat arrays, from which batches are cut by slicing."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dflash_trainer.errors import CannotStart

COLUMNS = ("input_ids", "loss_mask")
REMEDY = "make the dataset with `dflash-train prepare`"


@dataclass(frozen=True, slots=True)
class TokenStore:
    """Sequence i is tokens[offsets[i]:offsets[i+1]]; its loss mask is 1 where a token is supervised."""

    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    fingerprint: str
    skipped: dict[str, int]  # reason → rows left out
    cut: int  # rows that were longer than max_length

    def summary(self) -> str:
        """One line for people."""
        total = len(self.tokens)
        supervised = int(self.loss_mask.sum())
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

    Rows that are too short or have no two supervised tokens in a row are skipped and counted.
    """
    table = _read_table(directory)
    tokens, offsets = _flatten(table, "input_ids", directory)
    mask, mask_offsets = _flatten(table, "loss_mask", directory)
    lengths = np.diff(offsets)
    differing = np.flatnonzero(lengths != np.diff(mask_offsets))
    if len(differing):
        row = int(differing[0])
        raise CannotStart(
            f"data {directory}: row {row} has {lengths[row]} input_ids and {np.diff(mask_offsets)[row]} loss_mask "
            f"entries; they must be as many; {REMEDY}"
        )
    outside = np.flatnonzero((tokens < 0) | (tokens >= vocab_size))
    if len(outside):
        at = int(outside[0])
        row = int(np.searchsorted(offsets, at, side="right")) - 1
        raise CannotStart(
            f"data {directory}: row {row} has token {tokens[at]} at position {at - int(offsets[row])}, but the "
            f"target's vocabulary has {vocab_size}; tokenize the data with the target's own tokenizer"
        )
    return _select(tokens.astype(np.int32), (mask != 0).astype(np.uint8), offsets, max_length, directory)


def _select(
    tokens: NDArray[np.int32],
    mask: NDArray[np.uint8],
    offsets: NDArray[np.int64],
    max_length: int,
    directory: Path,
) -> TokenStore:
    """The rows that can be trained on, cut to max_length."""
    lengths = np.diff(offsets)
    used = np.minimum(lengths, max_length)
    pairs = np.zeros(len(tokens) + 1, np.int64)  # pairs[i]: supervised pairs that begin before token i
    np.cumsum(mask[:-1] & mask[1:], out=pairs[1:-1]) if len(tokens) > 1 else None
    pairs[-1] = pairs[-2] if len(pairs) > 1 else 0
    ends = np.maximum(offsets[:-1] + used - 1, offsets[:-1])
    trainable = pairs[ends] - pairs[offsets[:-1]] > 0
    short = lengths < 2
    skipped = {
        "too short, fewer than 2 tokens": int(short.sum()),
        "no two supervised tokens in a row": int((~short & ~trainable).sum()),
    }
    skipped = {reason: count for reason, count in skipped.items() if count}
    keep = np.flatnonzero(~short & trainable)
    if not len(keep):
        reasons = "; ".join(f"{count} rows: {reason}" for reason, count in skipped.items()) or "it has no rows"
        raise CannotStart(f"data {directory} has nothing to train on, no supervised text: {reasons}; {REMEDY}")
    new_offsets = np.zeros(len(keep) + 1, np.int64)
    np.cumsum(used[keep], out=new_offsets[1:])
    # index of every kept token in the old arrays: its row's old start plus its place in the row
    place = np.arange(new_offsets[-1]) - np.repeat(new_offsets[:-1], used[keep])
    index = np.repeat(offsets[:-1][keep], used[keep]) + place
    kept_tokens, kept_mask = tokens[index], mask[index]
    digest = hashlib.sha256()
    for array in (new_offsets, kept_tokens, kept_mask):
        digest.update(np.ascontiguousarray(array).data)
    cut = int((lengths[keep] > max_length).sum())
    return TokenStore(kept_tokens, kept_mask, new_offsets, digest.hexdigest(), skipped, cut)


def _read_table(directory: Path) -> "pa.Table":
    state = directory / "state.json"
    try:
        names = [entry["filename"] for entry in json.loads(state.read_text())["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CannotStart(
            f"data {directory} is not a dataset directory: state.json cannot be read "
            f"({type(error).__name__}: {error}); give one made by datasets.save_to_disk, or {REMEDY}"
        ) from error
    tables = []
    for name in names:
        try:
            with pa.memory_map(str(directory / name)) as source:
                tables.append(_only_columns(pa.ipc.open_stream(source).read_all(), directory / name))
        except (OSError, pa.ArrowInvalid) as error:
            detail = " ".join(str(error).split())
            raise CannotStart(f"data {directory}: {name} cannot be read: {detail}; copy it again, or {REMEDY}") from error
    if not tables:
        raise CannotStart(f"data {directory}: state.json names no data file; {REMEDY}")
    return pa.concat_tables(tables)


def _only_columns(table: "pa.Table", path: Path) -> "pa.Table":
    missing = [column for column in COLUMNS if column not in table.column_names]
    if missing:
        raise CannotStart(
            f"data {path}: no column {' and '.join(missing)}, only {', '.join(table.column_names)}; {REMEDY}"
        )
    return table.select(COLUMNS)


def _flatten(table: "pa.Table", column: str, directory: Path) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Values of a list column one after another, and where each row begins (one entry more than rows)."""
    values, lengths = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for chunk in table.column(column).chunks:
        is_list = pa.types.is_list(chunk.type) or pa.types.is_large_list(chunk.type)
        if pa.types.is_fixed_size_list(chunk.type):
            chunk, is_list = chunk.cast(pa.list_(chunk.type.value_type)), True
        kind = chunk.type.value_type if is_list else chunk.type
        if not is_list or not (pa.types.is_integer(kind) or pa.types.is_boolean(kind)) or chunk.null_count:
            raise CannotStart(f"data {directory}: column {column} is {chunk.type}, not lists of integers; {REMEDY}")
        flat = chunk.flatten()
        if flat.null_count:
            raise CannotStart(f"data {directory}: column {column} has empty values inside its lists; {REMEDY}")
        values.append(np.asarray(flat.cast(pa.int8()) if pa.types.is_boolean(kind) else flat))
        lengths.append(np.diff(np.asarray(chunk.offsets)).astype(np.int64))
    joined = np.concatenate(lengths)
    offsets = np.zeros(len(joined) + 1, np.int64)
    np.cumsum(joined, out=offsets[1:])
    return np.concatenate(values[1:] or values), offsets
