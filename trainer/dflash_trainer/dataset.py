"""Rows of a dataset as people have it: Arrow files as datasets.save_to_disk makes them, parquet, or JSON lines.

Each row has `input_ids` and says which of them are supervised, in one of the columns MASKS.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from dflash_agent import dataset, outputs
from numpy.typing import NDArray

from dflash_trainer.errors import CannotStart, TryAgain

REMEDY = "make the dataset with `dflash-train prepare`"
IDS = "input_ids"
LABELS = "labels"
MASKS = ("loss_mask", "assistant_masks", LABELS)  # the first that is there counts
UNSUPERVISED_LABEL = -100
CARD_FILE = "card.json"
ROWS = 1000  # of a parquet file at a time
JSON_BLOCK = 16 << 20  # bytes at a time; a row may not be longer
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"  # how an Arrow stream ends, by its format


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of a file, not looked into yet."""

    path: Path
    first_row: int  # of the dataset
    batch: Any  # pyarrow.RecordBatch of the ids and one column of MASKS
    bytes_read: int  # of all files, with this piece


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows one after another, each sizes[i] tokens long."""

    ids: NDArray[Any]
    supervised: NDArray[np.bool_]
    sizes: NDArray[np.int64]


def data_files(directory: Path) -> list[Path]:
    """The files of a dataset directory, in order. Raises CannotStart or TryAgain."""
    try:
        return dataset.data_files(directory)
    except (OSError, ValueError) as error:
        _raise_if_passing(directory, error)
        detail = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
        raise CannotStart(
            f"data {directory} is not a dataset directory: {detail}; give one made by datasets.save_to_disk or one "
            f"of *.parquet or *.jsonl files, or {REMEDY}"
        ) from error


def read_card(directory: Path) -> dict[str, Any]:
    """What `dflash-train prepare` wrote of a dataset; empty for one that it did not make."""
    try:
        card = json.loads((directory / CARD_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return card if isinstance(card, dict) and isinstance(card.get("settings"), dict) else {}


def pieces(files: list[Path]) -> Iterator[Piece]:
    """All rows of these files, in order.

    Raises CannotStart for a file that is not whole or lacks a column; TryAgain.
    """
    before = row = 0
    readers = {".parquet": _parquet, ".jsonl": _json_lines}
    for path in files:
        try:
            for batch, position in readers.get(path.suffix, _arrow)(path):
                yield Piece(path, row, batch, before + position)
                row += len(batch)
            before += path.stat().st_size
        except (OSError, pa.ArrowException) as error:
            _raise_if_passing(path, error)
            detail = " ".join(str(error).split())
            raise CannotStart(f"data {path} cannot be read: {detail}; copy it again, or {REMEDY}") from error


def _arrow(path: Path) -> Iterator[tuple[Any, int]]:
    """Record batches of an Arrow stream, and how many bytes of the file have been read."""
    with path.open("rb") as file:
        file.seek(-min(len(_END_OF_STREAM), path.stat().st_size), 2)
        if file.read() != _END_OF_STREAM:
            raise CannotStart(
                f"data {path} is cut short: {path.stat().st_size} bytes without an end mark; copy it again, or "
                f"{REMEDY}"
            )
    with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as reader:
        columns = _columns(reader.schema.names, path)
        for batch in reader:
            yield batch.select(columns), source.tell()


def _parquet(path: Path) -> Iterator[tuple[Any, int]]:
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        columns = _columns(file.schema_arrow.names, path)
        size, rows, done = path.stat().st_size, file.metadata.num_rows, 0
        for batch in file.iter_batches(ROWS, columns=columns):
            done += len(batch)
            yield batch, size * done // rows


def _json_lines(path: Path) -> Iterator[tuple[Any, int]]:
    from pyarrow import json as arrow_json

    with (
        pa.OSFile(str(path)) as source,
        arrow_json.open_json(source, arrow_json.ReadOptions(block_size=JSON_BLOCK)) as reader,
    ):
        columns = _columns(reader.schema.names, path)
        for batch in reader:
            yield batch.select(columns), source.tell()


def _columns(names: list[str], path: Path) -> list[str]:
    """The two columns that are read. Raises CannotStart if one is missing."""
    masks = [column for column in MASKS if column in names]
    missing = [IDS] * (IDS not in names) + [" or ".join(MASKS)] * (not masks)
    if missing:
        raise CannotStart(
            f"data {path} has no column {' and '.join(missing)}, only {', '.join(names) or 'none'}; {REMEDY}"
        )
    return [IDS, masks[0]]


def rows_of(piece: Piece, vocab_size: int) -> Rows:
    """The rows of a piece. Raises CannotStart at the first whose columns differ or that has an impossible token."""
    mask_name = piece.batch.schema.names[1]
    ids, sizes = _lists(piece, IDS)
    mask, mask_sizes = _lists(piece, mask_name)
    for i in np.flatnonzero(sizes != mask_sizes)[:1]:
        raise CannotStart(
            f"data {piece.path}: row {piece.first_row + i} has {sizes[i]} {IDS} but {mask_sizes[i]} {mask_name} "
            f"entries; there must be one for each token; {REMEDY}"
        )
    for at in np.flatnonzero((ids < 0) | (ids >= vocab_size))[:1]:
        raise CannotStart(
            f"data {piece.path}: {_place(piece, sizes, at, ids)}, but the target's vocabulary is {vocab_size} "
            f"(0 to {vocab_size - 1}); tokenize with the target's tokenizer"
        )
    if mask_name != LABELS:
        return Rows(ids, mask != 0, sizes)
    supervised = mask != UNSUPERVISED_LABEL
    for at in np.flatnonzero(supervised & (mask != ids))[:1]:
        raise CannotStart(
            f"data {piece.path}: {_place(piece, sizes, at, ids)}, and its label is {mask[at]}; a label is its own "
            f"position's token or {UNSUPERVISED_LABEL}, not the next one's; {REMEDY}"
        )
    return Rows(ids, supervised, sizes)


def _place(piece: Piece, sizes: NDArray[np.int64], at: Any, ids: NDArray[Any]) -> str:
    """What is at a place of the rows, in words."""
    ends = np.cumsum(sizes)
    i = np.searchsorted(ends, at, side="right")
    return f"row {piece.first_row + i} has token {ids[at]} at position {at - ends[i] + sizes[i]}"


def _lists(piece: Piece, column: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """The values of a list column one after another, and the length of each row's."""
    array = piece.batch.column(column)
    kind = array.type
    sized = pa.types.is_fixed_size_list(kind)
    if not (sized or pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not (
        pa.types.is_integer(kind.value_type) or pa.types.is_boolean(kind.value_type)
    ):
        raise CannotStart(f"data {piece.path}: column {column} holds {kind}, not lists of integers; {REMEDY}")
    values = array.flatten()
    if array.null_count or values.null_count:
        last = piece.first_row + len(array) - 1
        raise CannotStart(
            f"data {piece.path}: column {column} has a null in rows {piece.first_row} to {last}; remove it, or "
            f"{REMEDY}"
        )
    if pa.types.is_boolean(kind.value_type):
        values = values.cast(pa.uint8())
    sizes = np.full(len(array), kind.list_size) if sized else np.diff(np.asarray(array.offsets))
    return np.asarray(values), sizes.astype(np.int64)


def _raise_if_passing(path: Path, error: Exception) -> None:
    """Raises TryAgain for an error of the file system that may be gone at the next attempt."""
    if isinstance(error, OSError) and error.errno in outputs.PASSING_ERRNOS:
        raise TryAgain(f"data {path} cannot be read now: {error.strerror}; mend the file system") from error
