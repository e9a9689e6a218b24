"""The token store: a dataset read once into flat arrays, from which batches are cut by slicing.

The arrays are kept as files in the cache directory and mapped into memory, so that the next start reads nothing and
a dataset may be larger than memory. Where the cache cannot be written they are held in memory.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import zipfile
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from dflash_agent.words import size
from numpy.typing import NDArray

from dflash_trainer.dataset import REMEDY, Piece, data_files, pieces, rows_of
from dflash_trainer.errors import CannotStart
from dflash_trainer.host import free_memory
from dflash_trainer.journal import WARNING, log
from dflash_trainer.whole import whole_directory

SHORT = "too short, fewer than 2 tokens"
UNSUPERVISED = "no two supervised tokens in a row"
BYTES_PER_TOKEN = 5  # token and mask
BUILDING = 2  # while the parts are joined in memory, they are there twice
WORKERS = 8  # at most
KEPT = 2  # stores in the cache: a run that changes its data may go back to the one before
FORMAT = 1  # of the files in the cache
TOKENS_FILE, MASK_FILE, ARRAYS_FILE, META_FILE = "tokens.int32", "loss_mask.uint8", "arrays.npz", "store.json"
ARRAYS, NUMBERS = ("offsets", "origin", "used"), ("supervised", "fingerprint", "skipped", "cut")  # of a Survey

Progress = Callable[[int, int], None]  # bytes of the files read so far, and in all
Write = Callable[[NDArray[np.int32], NDArray[np.uint8]], Any]


@dataclass(frozen=True, slots=True)
class Survey:
    """What is known of a dataset's rows without their tokens; rows that are left out do not count."""

    offsets: NDArray[np.int64]  # [rows + 1] sequence i is tokens[offsets[i]:offsets[i+1]]
    origin: NDArray[np.int64]  # [rows] of the dataset, those left out counted
    used: NDArray[np.bool_]  # [V] whether a token occurs
    supervised: int  # tokens
    fingerprint: str  # sha256 of the sha256 of offsets, tokens and mask
    skipped: dict[str, int]  # reason → rows left out
    cut: int  # rows that were longer than max_length

    def summary(self) -> str:
        """One line for people."""
        total = int(self.offsets[-1])
        text = (
            f"{len(self.offsets) - 1} rows, {total} tokens, {self.supervised} of them supervised "
            f"({100 * self.supervised / total:.0f} %)"
        )
        if self.cut:
            text += f"; {self.cut} rows cut to the longest length allowed"
        for reason, count in self.skipped.items():
            text += f"; {count} rows skipped: {reason}"
        return text


@dataclass(frozen=True, slots=True)
class TokenStore:
    """All tokens of a dataset's rows, one after another; the mask is 1 where a token is supervised."""

    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    survey: Survey


@dataclass(frozen=True, slots=True)
class _Part:
    """What is kept of a piece."""

    tokens: NDArray[np.int32]
    mask: NDArray[np.uint8]
    lengths: NDArray[np.int64]
    origin: NDArray[np.int64]
    skipped: dict[str, int]
    cut: int


def load_store(
    directory: Path, max_length: int, vocab_size: int, cache: Path, progress: Progress | None = None
) -> TokenStore:
    """The store of a dataset directory: as it lies in `cache`, or made there.

    Rows that are too short or have no two supervised tokens in a row are skipped and counted; longer ones than
    max_length tokens are cut. Raises CannotStart for data that cannot be trained on.
    """
    place = cache / "store" / _key(data_files(directory), max_length, vocab_size)
    try:
        with _locked(place.parent):
            store = _open(place)
            if store is None:
                _make(place, directory, max_length, vocab_size, progress)
                store = _open(place)
            if store is not None:
                os.utime(place)
                _prune(place.parent)
                return store
            raise OSError(errno.EIO, "what was written there does not come back")
    except OSError as error:
        log(
            f"the token store cannot be kept in {place.parent}: {error.strerror or error}; it is held in memory "
            f"and read again at the next start",
            event="cache-failed",
            priority=WARNING,
        )
    parts: list[tuple[NDArray[np.int32], NDArray[np.uint8]]] = []
    write = _bounded(parts, directory)
    surveyed = survey(directory, max_length, vocab_size, write, progress)
    tokens, masks = zip(*parts, strict=True)
    return TokenStore(np.concatenate(tokens), np.concatenate(masks), surveyed)


def survey(
    directory: Path, max_length: int, vocab_size: int, write: Write | None = None, progress: Progress | None = None
) -> Survey:
    """Reads all rows in threads and hands tokens and masks on, in order. Raises CannotStart, TryAgain."""
    files = data_files(directory)
    total = sum(path.stat().st_size for path in files if path.exists())
    by_tokens, by_mask = hashlib.sha256(), hashlib.sha256()
    lengths, origin = [np.zeros(1, np.int64)], [np.empty(0, np.int64)]
    used = np.zeros(vocab_size, np.bool_)
    skipped: Counter[str] = Counter()
    cut = supervised = 0
    for piece, part in _in_threads(pieces(files), lambda piece: _part(piece, max_length, vocab_size)):
        by_tokens.update(part.tokens.data)
        by_mask.update(part.mask.data)
        if write is not None:
            write(part.tokens, part.mask)
        used[part.tokens] = True
        supervised += int(part.mask.sum(dtype=np.int64))
        lengths.append(part.lengths)
        origin.append(part.origin)
        skipped += Counter(part.skipped)
        cut += part.cut
        if progress is not None:
            progress(piece.bytes_read, total)
    offsets = np.cumsum(np.concatenate(lengths))
    if len(offsets) == 1:
        reasons = "; ".join(f"{count} rows {reason}" for reason, count in skipped.items()) or "it has no rows"
        raise CannotStart(f"data {directory} has no supervised text to train on: {reasons}; {REMEDY}")
    parts = (hashlib.sha256(offsets.data).digest(), by_tokens.digest(), by_mask.digest())
    fingerprint = hashlib.sha256(b"".join(parts)).hexdigest()
    return Survey(offsets, np.concatenate(origin), used, supervised, fingerprint, dict(skipped), cut)


def _in_threads(source: Iterator[Piece], work: Callable[[Piece], _Part]) -> Iterator[tuple[Piece, _Part]]:
    """Each piece and what work makes of it, in order; a few are under way at a time."""
    workers = min(WORKERS, len(os.sched_getaffinity(0)))
    under_way: deque[tuple[Piece, Future[_Part]]] = deque()
    with ThreadPoolExecutor(workers, "token store") as pool:
        try:
            for piece in source:
                under_way.append((piece, pool.submit(work, piece)))
                if len(under_way) > 2 * workers:
                    first, made = under_way.popleft()
                    yield first, made.result()
            while under_way:
                first, made = under_way.popleft()
                yield first, made.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _part(piece: Piece, max_length: int, vocab_size: int) -> _Part:
    """The rows of a piece that can be trained on, cut to their longest length."""
    rows = rows_of(piece, vocab_size)
    sizes = rows.sizes
    used = np.minimum(sizes, max_length)
    short = sizes < 2
    pairs = _supervised_pairs(rows.supervised, sizes, used)
    keep = ~short & (pairs > 0)
    if keep.all() and (used == sizes).all():
        tokens, mask = rows.ids, rows.supervised
    else:
        within = np.arange(len(rows.ids)) - np.repeat(np.cumsum(sizes) - sizes, sizes) < max_length
        chosen = np.repeat(keep, sizes) & within
        tokens, mask = rows.ids[chosen], rows.supervised[chosen]
    return _Part(
        np.ascontiguousarray(tokens, np.int32),
        np.ascontiguousarray(mask, np.uint8),
        used[keep],
        piece.first_row + np.flatnonzero(keep),
        {SHORT: int(short.sum()), UNSUPERVISED: int((~short & (pairs == 0)).sum())},
        int((keep & (sizes > max_length)).sum()),
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


def _key(files: list[Path], max_length: int, vocab_size: int) -> str:
    """A name for what a store is made of; other contents of a file show in its size or time of change."""
    states = []
    for path in files:
        state = path.stat() if path.exists() else None
        states.append([str(path.absolute()), state and state.st_size, state and state.st_mtime_ns])
    return hashlib.sha256(json.dumps([FORMAT, max_length, vocab_size, states]).encode()).hexdigest()[:16]


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time makes a store here. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make(place: Path, directory: Path, max_length: int, vocab_size: int, progress: Progress | None) -> None:
    """Makes the files of a store. Raises CannotStart or OSError; nothing is left then."""
    with (
        whole_directory(place) as new,
        (new / TOKENS_FILE).open("wb") as tokens_file,
        (new / MASK_FILE).open("wb") as mask_file,
    ):

        def write(tokens: NDArray[np.int32], mask: NDArray[np.uint8]) -> None:
            tokens_file.write(tokens.data)
            mask_file.write(mask.data)

        made = survey(directory, max_length, vocab_size, write, progress)
        np.savez(new / ARRAYS_FILE, **{name: getattr(made, name) for name in ARRAYS})
        meta = {"data": str(directory)} | {name: getattr(made, name) for name in NUMBERS}
        (new / META_FILE).write_text(json.dumps(meta, indent=2) + "\n")


def _open(place: Path) -> TokenStore | None:
    """A store in the cache, mapped; None if it is not there whole."""
    try:
        meta = json.loads((place / META_FILE).read_text())
        with np.load(place / ARRAYS_FILE) as arrays:
            known = Survey(**{name: arrays[name] for name in ARRAYS} | {name: meta[name] for name in NUMBERS})
        tokens = np.memmap(place / TOKENS_FILE, np.int32, "r")
        mask = np.memmap(place / MASK_FILE, np.uint8, "r")
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    if not len(tokens) == len(mask) == known.offsets[-1]:
        return None
    return TokenStore(np.asarray(tokens), np.asarray(mask), known)


def _prune(folder: Path) -> None:
    """Removes the stores used longest ago, and what a crash left; who has one mapped keeps it."""
    folders = sorted((path for path in folder.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
    kept = [path for path in folders if not path.name.startswith(".")][-KEPT:]
    for path in {*folders} - {*kept}:
        shutil.rmtree(path, ignore_errors=True)


def _bounded(parts: list[tuple[NDArray[np.int32], NDArray[np.uint8]]], directory: Path) -> Write:
    """Collects parts for as long as there is room for them; raises CannotStart when there is not."""
    free, reason = free_memory()
    held = 0

    def write(tokens: NDArray[np.int32], mask: NDArray[np.uint8]) -> None:
        nonlocal held
        held += BUILDING * BYTES_PER_TOKEN * len(tokens)
        if held > free:
            raise CannotStart(
                f"data {directory} needs more than {size(held)} of host memory to load, and {size(free)} are free "
                f"({reason}); make room for it in the cache directory, free memory, raise MemoryMax= of the "
                f"unit, or train on less data"
            )
        parts.append((tokens, mask))

    return write
