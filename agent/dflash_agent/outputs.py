"""The layout of a run's output directory, for the trainer that writes it and the agent that reads it.

OUTPUT/run.json                     what makes two attempts the same run
OUTPUT/checkpoints/step-00000240/   state.pt, drafter/, manifest.json
OUTPUT/drafter                      link to the newest checkpoint's drafter, for servers
OUTPUT/metrics.jsonl, tensorboard/  the numbers
OUTPUT/previous-20261201T120000Z/   what `fresh` put aside
"""

import errno
import json
import re
import time
from pathlib import Path
from typing import Any

RUN_FILE = "run.json"
CHECKPOINTS_DIR = "checkpoints"
MANIFEST_FILE = "manifest.json"
DRAFTER_LINK = "drafter"
METRICS_FILE = "metrics.jsonl"
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


def set_aside(output: Path) -> Path | None:
    """Moves what a run has left into OUTPUT/previous-TIME/, for a fresh begin; None if there was nothing."""
    names = (CHECKPOINTS_DIR, DRAFTER_LINK, METRICS_FILE, TENSORBOARD_DIR, RUN_FILE)
    there = [output / name for name in names if (output / name).is_symlink() or (output / name).exists()]
    if not there:
        return None
    aside = output / time.strftime("previous-%Y%m%dT%H%M%SZ", time.gmtime())
    aside.mkdir()
    for path in there:
        path.rename(aside / path.name)
    return aside
