"""`dflashctl top`: runs, their stages and the GPUs in the terminal, anew every second."""

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from dflash_agent import gpus, leases, outputs, runfile, status
from dflash_agent.runfile import ConfigError
from dflash_agent.words import printable, size

REFRESH = 1.0  # seconds
GPUS_EVERY = 5.0  # a reading is a process of its own: a sick driver must not stop the view
BAR = 20  # characters
ENTER, LEAVE = "\033[?1049h\033[?25l", "\033[?25h\033[?1049l"  # another screen without a cursor, and back
HOME, CLEAR_LINE, CLEAR_BELOW = "\033[H", "\033[K", "\033[J"


@dataclass(frozen=True, slots=True)
class View:
    """What there is to show."""

    runs: list[status.RunStatus]
    stages: Mapping[str, Mapping[str, Mapping[str, float]]]  # run → stage → busy, input, output: seconds
    reading: gpus.Reading
    leased: Mapping[str, leases.Lease]  # by GPU


def take_view(reading: gpus.Reading) -> View:
    """Everything but the GPUs as it is now."""
    rows, stages = [], {}
    for name in status.all_runs():
        row = status.run_status(name, runfile.path_of(name))
        rows.append(row)
        if row.state == "training":
            with contextlib.suppress(OSError, ConfigError):
                output = Path(runfile.load(runfile.path_of(name)).output.dir)
                last: Mapping[str, Any] = outputs.last_metrics(output) or {}
                stages[name] = last.get("stages", {})
    try:
        leased = leases.current()
    except OSError:
        leased = {}
    return View(rows, stages, reading, leased)


def frame(view: View, width: int) -> list[str]:
    """The lines of a frame, none wider than the terminal."""
    lines = [*status.table(view.runs).splitlines()] if view.runs else [f"no runs in {runfile.RUNS_DIR}"]
    for run, stages in view.stages.items():
        lines += ["", f"stages of {run}: ━ at work, · waiting for input, ░ waiting for room"]
        lines += [f"  {stage:<8} {bar(spent)}" for stage, spent in stages.items()]
    lines.append("")
    if view.reading.problem:
        lines.append(f"no GPUs: {view.reading.problem}")
    for gpu in view.reading.gpus:
        lease = view.leased.get(gpu.uuid)
        parts = [
            f"{gpu.label} {gpu.name}",
            f"{size(gpu.used)} of {size(gpu.total)}" if gpu.used is not None and gpu.total else "",
            f"{gpu.utilization} %" if gpu.utilization is not None else "",
            f"{gpu.temperature} °C" if gpu.temperature is not None else "",
            f"{gpu.power:.0f} W" if gpu.power is not None else "",
            f"leased to {lease.unit}" if lease else "",
            f"lost: {gpu.lost}" if gpu.lost else "",
        ]
        lines.append(" · ".join(part for part in parts if part))
    return [printable_line(line)[:width] for line in lines]


def printable_line(line: str) -> str:
    """The line with its spaces; nothing in it that a terminal obeys."""
    indent = len(line) - len(line.lstrip())
    return line if line.isprintable() else " " * indent + printable(line)


def bar(spent: Mapping[str, float]) -> str:
    """A stage's time.

    >>> bar({"busy": 5.0, "input": 4.0, "output": 1.0})
    '━━━━━━━━━━········░░  50 %'
    """
    total = sum(spent.values())
    if total <= 0:
        return " " * BAR
    busy, room = (round(BAR * spent.get(kind, 0.0) / total) for kind in ("busy", "output"))
    busy = min(busy, BAR)
    room = min(room, BAR - busy)
    share = 100 * spent.get("busy", 0.0) / total
    return "━" * busy + "·" * (BAR - busy - room) + "░" * room + f"{share:4.0f} %"


def once() -> None:
    """One frame as plain text."""
    print("\n".join(frame(take_view(gpus.read()), 10**6)))


def run() -> int:
    """Shows frames until q, Ctrl-C or SIGTERM; the terminal is as it was then."""
    with _screen():
        reading, read_at = gpus.read(), time.monotonic()
        while True:
            view = take_view(reading)
            width, height = os.get_terminal_size(sys.stdout.fileno())  # not what $COLUMNS was once
            lines = frame(view, width)
            if len(lines) > height - 1:
                lines = [*lines[: max(0, height - 2)], "…"[:width]]
            lines.append("q ends"[:width])
            body = "\r\n".join(line + CLEAR_LINE for line in lines[:height])
            sys.stdout.write(HOME + body + CLEAR_BELOW)
            sys.stdout.flush()
            ready, _, _ = select.select([sys.stdin], [], [], REFRESH)
            if ready and os.read(sys.stdin.fileno(), 64)[:1] in (b"q", b"Q", b"\x03", b""):
                return 0
            if time.monotonic() - read_at > GPUS_EVERY:
                reading, read_at = gpus.read(), time.monotonic()


@contextlib.contextmanager
def _screen() -> Iterator[None]:
    """A screen of its own, keys without Enter; undone however this ends."""
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    # SIGINT too: who was started in the background by a shell without job control inherits that it is ignored.
    ends = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP)
    handlers = {number: signal.signal(number, _end) for number in ends}
    # Ctrl-Z would leave the shell with this screen.
    handlers[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    try:
        tty.setcbreak(keyboard)
        sys.stdout.write(ENTER)
        yield
    except KeyboardInterrupt:
        pass
    finally:
        sys.stdout.write(LEAVE)
        sys.stdout.flush()
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _end(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
