"""Checkpoints that appear whole or not at all.

A checkpoint is written beside its place, with a manifest of sizes and checksums, made durable, then renamed.
"""

import contextlib
import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from dflash_agent import outputs
from dflash_agent.checkpoints import FORMAT, Checkpoint, Damaged, has_all_files, newest_whole, sha256, verify

from dflash_trainer.whole import sync, whole_directory

FIRST_PAUSE, LONGEST_PAUSE = 60.0, 960.0  # seconds until a save that failed is tried again
STUCK = 1200.0  # seconds without progress after which a save counts as hung: fsync(2) of 10 GB may take that long
_NEW_LINK = f".{outputs.DRAFTER_LINK}.new"


def save(output: Path, step: int, write: Callable[[Path], None], keep_last: int, keep_every: int) -> Path:
    """Writes the checkpoint of `step` through `write(directory)`, points OUTPUT/drafter at it, and prunes.

    On an error (OSError, such as a full disk, or what `write` raises) the older checkpoints are untouched and
    nothing of the new one stays. A whole checkpoint of that step that is there already is kept as it is; a
    damaged one is replaced.
    """
    final = output / outputs.CHECKPOINTS_DIR / outputs.checkpoint_name(step)
    _remove_leftovers(output)
    if not _is_whole(final):
        with whole_directory(final) as unfinished:
            write(unfinished)
            _write_manifest(unfinished, step)
    _point_drafter(output, final)
    _prune(output, step, keep_last, keep_every)
    _remove_leftovers(output)
    return final


def recover(output: Path) -> tuple[Path | None, list[Checkpoint]]:
    """newest_whole for the start of an attempt: also removes what was cut short and mends OUTPUT/drafter."""
    _remove_leftovers(output)
    newest, skipped = newest_whole(output)
    if newest is not None:
        _point_drafter(output, newest)
    return newest, skipped


def _prune(output: Path, step: int, keep_last: int, keep_every: int) -> None:
    """Removes what is older than the newest `keep_last` checkpoints, but for multiples of `keep_every`.

    Counts back from `step`, the one just saved, and only those whose files are all there in full size: a
    newer one is there only if it could not be read, and must not push out what can be. A removal that is cut
    short leaves a damaged one among the oldest, for the next time.
    """
    there = [(s, path) for s, path in outputs.checkpoint_dirs(output) if s <= step]
    full = [s for s, path in there if has_all_files(path)]
    oldest = full[-keep_last:][0]
    for old, directory in there:
        if old < oldest and not (keep_every and old % keep_every == 0):
            shutil.rmtree(directory)


def _remove_leftovers(output: Path) -> None:
    """Removes what a save that was cut short has left."""
    for path in (output / outputs.CHECKPOINTS_DIR).glob(".step-*"):
        shutil.rmtree(path)
    new_link = output / _NEW_LINK
    if new_link.is_symlink():
        new_link.unlink()


def _write_manifest(directory: Path, step: int) -> None:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    entries = {str(p.relative_to(directory)): {"size": p.stat().st_size, "sha256": sha256(p)} for p in files}
    text = json.dumps({"format": FORMAT, "step": step, "files": entries}, indent=1)
    (directory / outputs.MANIFEST_FILE).write_text(text + "\n")


def _is_whole(directory: Path) -> bool:
    try:
        verify(directory)
    except Damaged:
        return False
    return True


def _point_drafter(output: Path, checkpoint: Path) -> None:
    link = output / outputs.DRAFTER_LINK
    aim = checkpoint.relative_to(output) / outputs.DRAFTER_LINK
    if link.is_symlink() and link.readlink() == aim:
        return
    fresh = output / _NEW_LINK
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(aim)
    fresh.replace(link)
    sync(output)


class Saver:
    """Saves in the background, one checkpoint at a time, while training goes on.

    While saves fail, they are tried again after 1, 2, 4, … up to 16 minutes, whatever the interval.
    """

    def __init__(self, output: Path, keep_last: int, keep_every: int, waiting: Callable[[], None]) -> None:
        """`waiting` is called every second or so while the loop waits for a save that makes progress."""
        self.waited = 0.0  # seconds that the loop has stood still for saves, copies included
        self._output = output
        self._keep = (keep_last, keep_every)
        self._waiting = waiting
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._failing_since: float | None = None
        self._pause = FIRST_PAUSE
        self._next_try = 0.0

    def due(self, regular: bool) -> bool:
        """Whether to save now: at the `regular` times, or, as long as saves fail, when the next try is due."""
        return regular if self._failing_since is None else time.monotonic() >= self._next_try

    def submit(self, step: int, snapshot: Callable[[], Callable[[Path], None]]) -> None:
        """Begins to save what snapshot() copies now and returns the writer of; waits first for the save before."""
        self.finish()
        began = time.monotonic()
        write = snapshot()
        self.waited += time.monotonic() - began
        self._thread = threading.Thread(target=self._save, args=(step, write), name="saver")
        self._thread.start()

    def _save(self, step: int, write: Callable[[Path], None]) -> None:
        try:
            save(self._output, step, write, *self._keep)
        except BaseException as error:  # noqa: BLE001 - take_error hands it on
            now = time.monotonic()
            self._failing_since = self._failing_since or now
            self._next_try = now + self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self._error = error
        else:
            self._failing_since, self._pause = None, FIRST_PAUSE

    def finish(self) -> None:
        """Waits for the save under way."""
        if self._thread is None:
            return
        began = moved = time.monotonic()
        before = -1
        while self._thread.is_alive():
            self._thread.join(1.0)
            written, now = self._written(), time.monotonic()
            if written != before:
                before, moved = written, now
            if now - moved < STUCK:
                self._waiting()
        self._thread = None
        self.waited += time.monotonic() - began

    def _written(self) -> int:
        """Bytes of the unfinished checkpoint."""
        total = 0
        for path in (self._output / outputs.CHECKPOINTS_DIR).glob(".step-*/**/*"):
            with contextlib.suppress(OSError):  # it has just been renamed
                total += path.stat().st_size
        return total

    def take_error(self) -> OSError | None:
        """The I/O error of a save that ended, once. Raises any other error, which is a fault of ours."""
        error, self._error = self._error, None
        if error is None or isinstance(error, OSError):
            return error
        raise error

    @property
    def failing_for(self) -> float:
        """Seconds since saves began to fail; 0 if the last one did not."""
        since = self._failing_since
        return 0.0 if since is None else time.monotonic() - since

    @property
    def next_try(self) -> float:
        """Seconds until the next try, while saves fail."""
        return max(0.0, self._next_try - time.monotonic())
