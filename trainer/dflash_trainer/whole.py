"""A directory that appears whole or not at all."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def whole_directory(final: Path) -> Iterator[Path]:
    """Yields an empty directory beside `final` that takes its place, durably, when the body succeeds.

    What stood there before is kept until then, and removed after it. If the body fails nothing stays; what a
    crash left is removed the next time. Files become readable for all. Raises OSError.
    """
    unfinished, replaced = (final.with_name(f".{final.name}.{state}") for state in ("writing", "replaced"))
    if replaced.exists() and not final.exists():  # a crash between the two renames below
        replaced.rename(final)
    for leftover in (unfinished, replaced):
        shutil.rmtree(leftover, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        for path in (unfinished, *unfinished.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
            sync(path)
        if final.exists():
            final.rename(replaced)
        unfinished.rename(final)
        sync(final.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)


def sync(path: Path) -> None:
    """fsync(2) of a file or directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
