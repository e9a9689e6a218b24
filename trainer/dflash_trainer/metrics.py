"""The numbers of a run: metrics.jsonl, TensorBoard event files, the status line, a bar on a terminal."""

import io
import itertools
import json
import math
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_agent import outputs
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from tqdm import tqdm

from dflash_trainer import notify
from dflash_trainer.journal import WARNING, log

PLOTTED = ("loss", "accuracy", "lr", "grad_norm", "tokens_per_s", "acceptance_length")
_LONGEST_LINE = 1 << 16  # bytes
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


class Metrics:
    """Appends rows to both files. A disk that is full is said once a streak and never stops training."""

    def __init__(self, output: Path, step: int) -> None:
        self._lines = output / outputs.METRICS_FILE
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}"  # sorted by time, as readers expect
        self._plots = output / outputs.TENSORBOARD_DIR / name
        self._step = step
        self._failing = False
        mend_last_line(self._lines)

    def row(self, values: dict[str, Any]) -> None:
        """One row, stamped with the time; every value that PLOTTED names is plotted at values["step"] too.

        A number that is not finite becomes null: JSON has no word for it.
        """
        now = round(time.time(), 3)
        line = json.dumps(_finite({"time": now} | values), allow_nan=False) + "\n"
        points = {name: values[name] for name in PLOTTED if name in values}
        try:
            append(self._lines, line.encode())
            if points:
                self._plot(now, values["step"], points)
        except OSError as error:
            if not self._failing:
                text = f"metrics not written: {error}; training goes on"
                log(text, event="metrics-failed", priority=WARNING)
            self._failing = True
        else:
            self._failing = False

    def _plot(self, now: float, step: int, points: dict[str, float]) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in points.items()]
        events = [Event(wall_time=now, step=step, summary=Summary(value=values))]
        if not self._plots.exists() or not self._plots.stat().st_size:
            self._plots.parent.mkdir(exist_ok=True)
            # Steps that an earlier attempt reached after its last checkpoint are done again: a start hides them.
            start = SessionLog(status=SessionLog.START)
            events.insert(0, Event(wall_time=now, file_version="brain.Event:2"))
            events.insert(1, Event(wall_time=now, step=self._step + 1, session_log=start))
        records = io.BytesIO()
        for event in events:
            RecordWriter(records).write(event.SerializeToString())
        append(self._plots, records.getvalue())


def append(path: Path, data: bytes) -> None:
    """Appends all of the data, or nothing and raises OSError."""
    with path.open("ab", buffering=0) as file:
        end = file.tell()
        left = memoryview(data)
        try:
            while left:
                left = left[file.write(left) :]
        except OSError:
            file.truncate(end)
            raise


def mend_last_line(path: Path) -> None:
    """Removes a last line that a power cut left torn."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        begin = max(0, file.seek(0, 2) - _LONGEST_LINE)
        file.seek(begin)
        file.truncate(begin + file.read().rfind(b"\n") + 1)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Progress(tqdm):  # type: ignore[type-arg]
    """A bar on a terminal, nothing in a journal."""

    def __init__(self, step: int, total: int) -> None:
        super().__init__(initial=step, total=total, unit="step", disable=not sys.stderr.isatty(), leave=False)

    def advance_to(self, step: int, loss: float) -> None:
        """Moves the bar to `step`."""
        self.set_postfix_str(f"loss {loss:.3f}", refresh=False)
        self.update(step - self.n)


class Reading(tqdm):  # type: ignore[type-arg]
    """How much of the data has been read: a bar on a terminal, and the unit's status; a start may take so long."""

    PATIENCE = 300.0  # seconds until a start that reads nothing more is taken for hung

    def __init__(self, data: str) -> None:
        super().__init__(
            unit="B", unit_scale=True, desc=f"reading {data}", disable=not sys.stderr.isatty(), leave=False
        )
        self._data = data
        self._told = time.monotonic()

    def read_so_far(self, done: int, total: int) -> None:
        """So many bytes of all the files'."""
        self.total = total
        self.update(done - self.n)
        if time.monotonic() - self._told > 1:
            self._told = time.monotonic()
            notify.status(f"reading data {self._data}: {100 * done // max(total, 1)} %")
            notify.extend_timeout(self.PATIENCE)


def status_line(
    step: int, total: int, loss: float, tokens_per_s: float, eta_s: float, accepted: float | None = None
) -> str:
    """What a person wants to see at a glance; `accepted`: the newest acceptance length.

    >>> status_line(240, 91552, 2.81, 16100.0, 680400.0, 3.14159)
    'step 240/91552 · loss 2.81 · acceptance 3.14 · 16.1 Ktok/s · ETA 7 d 21 h'
    """
    rate = f"{tokens_per_s / 1000:.1f} Ktok/s" if tokens_per_s >= 1000 else f"{tokens_per_s:.0f} tok/s"
    quality = "" if accepted is None else f" · acceptance {accepted:.2f}"
    return f"step {step}/{total} · loss {loss:.2f}{quality} · {rate} · ETA {duration(eta_s)}"


def shares(stages: Mapping[str, Mapping[str, float]]) -> str:
    """How much of the time each stage of the pipeline was at work.

    >>> shares({"target": {"busy": 7.1, "input": 0.1, "output": 2.8}, "drafter": {"busy": 3.0, "input": 7.0}})
    'target 71 %, drafter 30 %'
    """
    return ", ".join(
        f"{stage} {100 * spent['busy'] / max(sum(spent.values()), 1e-9):.0f} %" for stage, spent in stages.items()
    )


def duration(seconds: float) -> str:
    """Seconds in the two largest units that matter.

    >>> duration(680400), duration(3660), duration(95), duration(7)
    ('7 d 21 h', '1 h 1 min', '1 min 35 s', '7 s')
    """
    left = round(seconds)
    for (size, unit), (smaller, smaller_unit) in itertools.pairwise(_UNITS):
        if left >= size:
            return f"{left // size} {unit} {left % size // smaller} {smaller_unit}"
    return f"{left} s"
