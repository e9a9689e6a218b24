"""`dflashctl plot`: curves of one run or several, as a picture (matplotlib) or in the terminal."""

import math
from collections.abc import Sequence
from pathlib import Path

from dflash_agent.curves import BUSY, Curves, Points, thinned

TITLES = {
    "loss": "loss, nats",
    "accuracy": "share of positions predicted right",
    "acceptance_length": "acceptance length, held-out prompts",
    "tokens_per_s": "tokens/s",
}
COLOURS = (36, 33, 35, 32, 34, 31)  # of the terminal, one for each run
PICTURE_POINTS = 2000  # of a curve
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a braille character, by row and column


class NoMatplotlib(Exception):
    """A picture is wanted and there is nothing to draw it with; str() is one line."""


def panels(runs: Sequence[Curves]) -> list[tuple[str, str]]:
    """Keys that some run has, each with a title."""
    busy = sorted({key for run in runs for key in run.by_key if key.startswith(BUSY)})
    wanted = TITLES | {key: f"share of the time that the {key.removeprefix(BUSY)} was at work" for key in busy}
    return [(key, title) for key, title in wanted.items() if any(key in run.by_key for run in runs)]


def text(runs: Sequence[Curves], width: int, height: int, colour: bool) -> str:
    """All panels below one another, each `height` lines high."""
    lines = []
    if len(runs) > 1:
        marks = (f"\033[{COLOURS[i % len(COLOURS)]}m━━\033[0m" if colour else _mark(i) for i in range(len(runs)))
        lines.append("  ".join(f"{mark} {run.name}" for mark, run in zip(marks, runs, strict=True)))
    for key, title in panels(runs):
        bounds = (0.0, 1.0) if key.startswith(BUSY) else None
        lines += [title, *_panel([run.by_key.get(key, []) for run in runs], width, height, colour, bounds), ""]
    for run in runs:
        if run.by_position:
            shares = " ".join("-" if math.isnan(share) else f"{100 * share:.0f}" for share in run.by_position)
            lines.append(f"right at block position 1, 2, … of {run.name}, newest, %: {shares}")
    return "\n".join(lines).rstrip()


def _mark(run: int) -> str:
    return "abcdefghijklmnopqrstuvwxyz"[run % 26]


def _panel(
    curves: Sequence[Points], width: int, height: int, colour: bool, bounds: tuple[float, float] | None
) -> list[str]:
    """One plot: values at the left, steps below. Braille dots; letters where several runs have no colours."""
    steps = [step for points in curves for step, _ in points]
    values = [value for points in curves for _, value in points if math.isfinite(value)]
    if not values:
        return ["no numbers"]
    low, high = bounds or (min(values), max(values))
    if low == high:
        low, high = low - 0.5, high + 0.5
    first, last = min(steps), max(steps)
    margin = max(len(_number(low)), len(_number(high)))
    columns = max(10, width - margin - 2)
    letters = len(curves) > 1 and not colour
    across, down = (1, 1) if letters else (2, 4)
    cells: dict[tuple[int, int], tuple[int, int]] = {}  # row and column → dots, run
    for run, points in enumerate(curves):
        for step, value in thinned(points, columns * across):
            if math.isfinite(value):
                x = round((step - first) / max(1, last - first) * (columns * across - 1))
                y = round((high - value) / (high - low) * (height * down - 1))
                dots, _ = cells.get((y // down, x // across), (0, run))
                dot = 0 if letters else _DOTS[y % 4][x % 2]
                cells[y // down, x // across] = (dots | dot, run)
    lines = []
    for row in range(height):
        label = {0: _number(high), height - 1: _number(low)}.get(row, "")
        drawn = "".join(_cell(cells.get((row, column)), letters, colour, len(curves)) for column in range(columns))
        lines.append(f"{label:>{margin}} ┤{drawn}".rstrip())
    ends = f"step {first}", str(last)
    return [*lines, " " * (margin + 2) + ends[0] + ends[1].rjust(columns - len(ends[0]))]


def _cell(cell: tuple[int, int] | None, letters: bool, colour: bool, runs: int) -> str:
    if cell is None:
        return " "
    dots, run = cell
    sign = _mark(run) if letters else chr(0x2800 + dots)
    return f"\033[{COLOURS[run % len(COLOURS)]}m{sign}\033[0m" if colour and runs > 1 else sign


def _number(value: float) -> str:
    """A label of an axis.

    >>> _number(16100.0), _number(2.8125), _number(0.0312)
    ('16.1K', '2.81', '0.031')
    """
    if abs(value) >= 1000:
        return f"{value / 1000:.1f}K"
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3f}"


def picture(runs: Sequence[Curves], path: Path) -> None:
    """Writes a PNG, or what else the ending of the name says. Raises NoMatplotlib, OSError, ValueError."""
    try:
        import matplotlib
    except ImportError as error:
        raise NoMatplotlib(
            "a picture needs matplotlib: apt install python3-matplotlib, or plot without --output"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    chosen = panels(runs)
    with_positions = any(run.by_position for run in runs)
    count = len(chosen) + with_positions
    across = 2 if count > 1 else 1
    down = max(1, -(-count // across))
    figure, axes = pyplot.subplots(down, across, figsize=(6.5 * across, 3.2 * down), squeeze=False)
    places = list(axes.flat)
    for axis, (key, title) in zip(places, chosen, strict=False):
        for run in runs:
            points = thinned(run.by_key.get(key, []), PICTURE_POINTS)
            marker = "o" if len(points) < 30 else None
            axis.plot(*zip(*points, strict=True), label=run.name, marker=marker, markersize=3) if points else None
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step", fontsize=8)
        if key.startswith(BUSY):
            axis.set_ylim(0, 1.05)
    if with_positions:
        axis = places[len(chosen)]
        for run in runs:
            axis.plot(range(1, len(run.by_position) + 1), run.by_position, label=run.name, marker="o", markersize=3)
        axis.set_title("predicted right by position in the block, newest", fontsize=10)
        axis.set_xlabel("position", fontsize=8)
    for axis in places[:count]:
        axis.grid(visible=True, alpha=0.3)
        axis.tick_params(labelsize=8)
    for axis in places[count:]:
        axis.set_axis_off()
    if len(runs) > 1:
        places[0].legend(fontsize=8)
    else:
        figure.suptitle(runs[0].name)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
