"""The files that a dataset directory is made of: one rule for the checks before a start and for the trainer."""

import errno
import json
from pathlib import Path

STATE = "state.json"
KINDS = (".parquet", ".jsonl")


def data_files(directory: Path) -> list[Path]:
    """The files that hold the rows, in order: the Arrow files that datasets.save_to_disk lists, else all that
    are parquet, or JSON lines, by name.

    Raises OSError, FileNotFoundError also if it holds none; ValueError with what is wrong with the directory.
    """
    names = sorted(path.name for path in directory.iterdir())
    if "dataset_dict.json" in names:
        parts = sorted(path.parent.name for path in directory.glob(f"*/{STATE}"))
        raise ValueError(f"it holds several datasets ({', '.join(parts)}); give the directory of one of them")
    if STATE in names:
        try:
            listed = json.loads((directory / STATE).read_text())["_data_files"]
            return [directory / entry["filename"] for entry in listed]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{STATE} cannot be read ({type(error).__name__}: {error})") from error
    found = {kind: [directory / name for name in names if name.endswith(kind)] for kind in KINDS}
    there = [kind for kind in KINDS if found[kind]]
    if not there:
        raise FileNotFoundError(errno.ENOENT, f"no {STATE}, *.parquet or *.jsonl in it", str(directory))
    if len(there) > 1:
        raise ValueError(f"it holds {' and '.join(there)} files; leave one kind")
    return found[there[0]]
