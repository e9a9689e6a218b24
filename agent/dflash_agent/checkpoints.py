"""The checkpoints in an output directory, read against their manifests: for the trainer's start and dflashctl.

A manifest tells format, step, and the size and SHA-256 of every file; the trainer writes it (checkpoint.py there).
"""

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash_agent import outputs, runfile
from dflash_agent.findings import Finding
from dflash_agent.words import age, size

FORMAT = 1


class Damaged(Exception):
    """The checkpoint is not what its manifest says; str() is the reason."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that was read: whole, or the reason why not."""

    step: int
    path: Path
    time: float  # when it was written, unix seconds
    bytes: int  # of the files that are there
    reason: str = ""  # empty if it is whole


def verify(directory: Path) -> None:
    """Reads the whole checkpoint against its manifest. Raises Damaged."""
    for name, (length, digest) in _entries(directory).items():
        path = directory / name
        try:
            found = path.stat().st_size
            if found != length:
                raise Damaged(f"{name} has {found} bytes instead of {length}")
            if sha256(path) != digest:
                raise Damaged(f"{name} does not match its checksum")
        except OSError as error:
            raise Damaged(f"{name} cannot be read: {error.strerror}") from error


def survey(output: Path) -> Iterator[Checkpoint]:
    """Every checkpoint of an output directory, newest first, each read in full as it is asked for.

    What is pruned in the meantime is left out. Raises OSError if the directory cannot be read.
    """
    for step, directory in reversed(outputs.checkpoint_dirs(output)):
        reason = ""
        try:
            verify(directory)
        except Damaged as error:
            reason = str(error)
        try:
            time = directory.stat().st_mtime
        except FileNotFoundError:
            continue
        yield Checkpoint(step, directory, time, _bytes(directory), reason)


def newest_whole(output: Path) -> tuple[Path | None, list[Checkpoint]]:
    """The newest checkpoint whose manifest holds, and the newer ones that were skipped, newest first."""
    skipped: list[Checkpoint] = []
    for found in survey(output):
        if not found.reason:
            return found.path, skipped
        skipped.append(found)
    return None, skipped


def has_all_files(directory: Path) -> bool:
    """Whether every file of the manifest is there in full size: a cheap look, without checksums."""
    with contextlib.suppress(Damaged, OSError):
        entries = _entries(directory)
        return all((directory / name).stat().st_size == length for name, (length, _) in entries.items())
    return False


def sha256(path: Path) -> str:
    """A file's checksum as a manifest has it. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _entries(directory: Path) -> dict[str, tuple[int, str]]:
    """Size and checksum of every file, by the manifest. Raises Damaged if that is not one of this step."""
    try:
        manifest: dict[str, Any] = json.loads((directory / outputs.MANIFEST_FILE).read_text())
        if manifest["format"] != FORMAT:
            raise Damaged(f"its format is {manifest['format']}, this version reads {FORMAT}")
        if outputs.checkpoint_name(manifest["step"]) != directory.name:
            raise Damaged(f"its manifest is of step {manifest['step']}")
        return {name: (entry["size"], entry["sha256"]) for name, entry in manifest["files"].items()}
    except FileNotFoundError:
        raise Damaged(f"it has no {outputs.MANIFEST_FILE}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"its manifest cannot be read: {type(error).__name__}: {error}") from error


def _bytes(directory: Path) -> int:
    count = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                count += (Path(parent) / name).lstat().st_size
    return count


def check_newest(run: runfile.RunFile) -> Finding:
    """What a start would make of the run's checkpoints; reads the newest in full, and older ones if it must."""
    output = Path(run.output.dir)
    skipped: list[Checkpoint] = []
    try:
        for found in survey(output):
            if found.reason:
                skipped.append(found)
                continue
            text = f"step {found.step}, {age(found.time)} old, {size(found.bytes)}"
            if not skipped:
                return Finding("checkpoint", "ok", f"{text}: is whole, a start goes on from it")
            return Finding("checkpoint-damaged", "warn", f"{_named(skipped)}; a start goes on from {text}")
    except OSError as error:
        text = f"{error.filename} cannot be read: {error.strerror}"
        return Finding("checkpoint-damaged", "refuse", text, "make it readable for user dflash")
    if not skipped:
        return Finding("checkpoint", "ok", f"none in {output}: a start begins at step 0")
    return Finding(
        "checkpoint-damaged",
        "refuse",
        f"output {output} holds no whole checkpoint, {len(skipped)} damaged: {_named(skipped)}",
        f"mend or remove them, or put the old output aside: sudo dflashctl fresh {run.name}",
    )


def _named(skipped: list[Checkpoint]) -> str:
    return ", ".join(f"step {bad.step} ({bad.reason})" for bad in skipped)


def row(found: Checkpoint, used: bool) -> str:
    """A line for people, as wide as HEAD; `used`: a start goes on from it."""
    state = f"damaged: {found.reason}" if found.reason else "whole, a start goes on from it" if used else "whole"
    return _columns(str(found.step), f"{age(found.time)} ago", size(found.bytes), state)


def _columns(step: str, written: str, length: str, state: str) -> str:
    return f"{step:>8}  {written:10}  {length:>10}  {state}"


HEAD = _columns("STEP", "WRITTEN", "SIZE", "STATE")


def as_json(found: list[Checkpoint], used: Checkpoint | None) -> str:
    """The same for programs: a JSON list of objects, newest first; `used` tells the one a start goes on from."""
    rows = [asdict(one) | {"path": str(one.path), "whole": not one.reason, "used": one is used} for one in found]
    return json.dumps(rows, indent=2)


def main(arguments: list[str]) -> int:
    """`python3 -m dflash_agent.checkpoints FILE`: check_newest as a JSON line, for a caller of another user."""
    try:
        finding = check_newest(runfile.load(Path(arguments[0])))
    except runfile.ConfigError as error:
        finding = Finding("config", "refuse", str(error))
    print(json.dumps(asdict(finding)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
