"""The numbers of a run over its steps, from OUTPUT/metrics.jsonl."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_agent import outputs

PLAIN = (
    "loss",
    "accuracy",
    "acceptance_length",
    "tokens_per_s",
    "lr",
    "grad_norm",
)  # keys of a row that are numbers
BUSY = "busy: "  # and the name of a stage: its share of the time at work

Points = list[tuple[int, float]]  # step and value, steps ascending


@dataclass(frozen=True, slots=True)
class Curves:
    """What a run's rows tell, but for what an attempt did beyond the checkpoint that the next one went on from."""

    name: str
    by_key: Mapping[str, Points]
    by_position: tuple[float, ...]  # the newest accuracy at positions 1, 2, … of a block


def read_curves(name: str, output: Path) -> Curves:
    """Reads the file row by row; what is torn or no row is skipped. Raises OSError if there is none."""
    found: dict[str, Points] = {}
    by_position: tuple[float, ...] = ()
    with (output / outputs.METRICS_FILE).open("rb") as file:
        for line in file:
            try:
                row = json.loads(line)
                step = int(row["step"])
                values = dict(_values(row))
                shares = [
                    math.nan if share is None else float(share) for share in row.get("accuracy_by_position", ())
                ]
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError):  # a row of somebody else's
                continue
            for key, points in found.items():  # steps that an attempt does again replace what was there
                while points and (points[-1][0] > step or (key in values and points[-1][0] == step)):
                    points.pop()
            for key, value in values.items():
                found.setdefault(key, []).append((step, value))
            by_position = tuple(shares) or by_position
    return Curves(name, {key: points for key, points in found.items() if points}, by_position)


def _values(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key in PLAIN:
        if isinstance(row.get(key), (int, float)):
            yield key, float(row[key])
    stages = row.get("stages")
    for stage, spent in stages.items() if isinstance(stages, dict) else ():
        total = sum(spent.values())
        if total > 0:
            yield BUSY + stage, spent.get("busy", 0.0) / total


def thinned(points: Sequence[tuple[int, float]], most: int) -> Points:
    """At most so many points: means of equal spans of steps, each at its middle.

    >>> thinned([(1, 1.0), (2, 3.0), (9, 5.0)], 2)
    [(2, 2.0), (9, 5.0)]
    """
    if len(points) <= most:
        return list(points)
    first, last = points[0][0], points[-1][0]
    width = (last - first + 1) / most
    parts: dict[int, list[tuple[int, float]]] = {}
    for step, value in points:
        parts.setdefault(int((step - first) / width), []).append((step, value))
    return [
        (round(sum(step for step, _ in part) / len(part)), sum(value for _, value in part) / len(part))
        for part in parts.values()
    ]
