"""The layout of a run's output directory, for the trainer that writes it and the agent that reads it.

OUTPUT/run.json                     what makes two attempts the same run
OUTPUT/checkpoints/step-00000240/   state.pt, drafter/, manifest.json
OUTPUT/drafter                      link to the newest checkpoint's drafter, for servers
OUTPUT/metrics.jsonl, tensorboard/  the numbers
OUTPUT/pieces.json                  how many tokens a GPU's memory suffices for, if not for whole batches
OUTPUT/complete.json                the last step, once it is done, and the settings that it was done with
OUTPUT/.lock                        locked by the process that trains, which it names
OUTPUT/previous-20261201T120000Z/   what `fresh` put aside
"""

import contextlib
import errno
import fcntl
import json
import os
import re
import time
from pathlib import Path
from typing import Any

from dflash_agent.runfile import RunFile, settings, settings_of_then

RUN_FILE = "run.json"
CHECKPOINTS_DIR = "checkpoints"
MANIFEST_FILE = "manifest.json"
DRAFTER_LINK = "drafter"
METRICS_FILE = "metrics.jsonl"
COMPLETE_FILE = "complete.json"
PIECES_FILE = "pieces.json"
LOCK_FILE = ".lock"
TENSORBOARD_DIR = "tensorboard"
PASSING_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT})

_CHECKPOINT = re.compile(r"step-(\d{8,})")
_TAIL_BYTES = 1 << 16


def checkpoint_name(step: int) -> str:
    """The directory of a step's checkpoint.

    >>> checkpoint_name(240)
    'step-00000240'
    """
    return f"step-{step:08}"


def checkpoint_dirs(output: Path) -> list[tuple[int, Path]]:
    """Step and directory of every checkpoint, oldest first; whether they are whole is not looked at."""
    found = []
    try:
        for path in (output / CHECKPOINTS_DIR).iterdir():
            match = _CHECKPOINT.fullmatch(path.name)
            if match and path.is_dir():
                found.append((int(match[1]), path))
    except FileNotFoundError:
        return []
    return sorted(found)


def last_metrics(output: Path) -> dict[str, Any] | None:
    """The newest row of metrics.jsonl that is whole; None if there is none. Reads the file's tail only."""
    try:
        with (output / METRICS_FILE).open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return None
    for line in reversed(lines):
        try:
            row = json.loads(line)
        except ValueError:
            continue  # torn by a power cut, or cut by the tail
        if isinstance(row, dict) and "loss" in row:
            return row
    return None


class InUse(Exception):
    """Another process trains into the output directory; str() names it."""


def lock(output: Path, who: str) -> int:
    """A descriptor that keeps the directory for this process, for as long as it is open (flock(2)).

    On file systems without locks it keeps nothing. Raises InUse, OSError.
    """
    descriptor = os.open(output / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
        os.close(descriptor)
        raise InUse(holder or "another process") from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            os.close(descriptor)
            raise
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{who}\n".encode(), 0)
    return descriptor


def mark_complete(run: RunFile, step: int) -> None:
    """Writes down that the last step is done, so that another start need not load anything.

    If that cannot be written, the next start finds out by itself.
    """
    output = Path(run.output.dir)
    unsure = output / f".{COMPLETE_FILE}.new"
    with contextlib.suppress(OSError):
        unsure.write_text(json.dumps({"step": step} | _of(run)) + "\n")
        unsure.replace(output / COMPLETE_FILE)


def completed(run: RunFile) -> int | None:
    """The last step of the run, if it is done as the run file has it now and its drafter is there; else None."""
    output = Path(run.output.dir)
    try:
        found = json.loads((output / COMPLETE_FILE).read_text())
        step = int(found.pop("step"))
        found["settings"] = settings_of_then(found["settings"])
        return step if found == _of(run) and (output / DRAFTER_LINK).exists() else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _of(run: RunFile) -> dict[str, Any]:
    return {"settings": settings(run), "target": run.target.model, "data": run.data.dir}


def set_aside(output: Path) -> Path | None:
    """Moves what a run has left into OUTPUT/previous-TIME/, for a fresh begin; None if there was nothing."""
    names = (CHECKPOINTS_DIR, DRAFTER_LINK, METRICS_FILE, TENSORBOARD_DIR, RUN_FILE, COMPLETE_FILE, PIECES_FILE)
    there = [output / name for name in names if (output / name).is_symlink() or (output / name).exists()]
    if not there:
        return None
    aside = output / time.strftime("previous-%Y%m%dT%H%M%SZ", time.gmtime())
    aside.mkdir()
    for path in there:
        path.rename(aside / path.name)
    return aside
