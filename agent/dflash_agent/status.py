"""What `dflashctl status` shows: what systemd knows of each run, and what its output directory tells."""

import json
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash_agent import manager, outputs, preflight, runfile
from dflash_agent.runfile import RUN_NAME, ConfigError, load
from dflash_agent.words import age, span

DEADLINE = 10  # seconds for journalctl


@dataclass(frozen=True, slots=True)
class RunStatus:
    """One line of the table. None where nobody knows."""

    run: str
    state: str
    since: float | None
    attempts: int | None
    gpus: tuple[int, ...] | None  # indices; empty on a CPU
    step: int | None
    total_steps: int | None
    loss: float | None
    tokens_per_s: float | None
    eta_s: float | None
    checkpoint: str | None
    checkpoint_time: float | None
    note: str  # what the run says of itself, or why it failed


def all_runs() -> list[str]:
    """The names of all runs that have a run file."""
    return sorted(p.stem for p in runfile.RUNS_DIR.glob("*.toml") if RUN_NAME.fullmatch(p.stem))


def run_status(name: str, path: Path) -> RunStatus:
    """The status of one run. Does not raise: what cannot be read is told in the note."""
    unit: manager.UnitState | None = None
    try:
        unit = manager.unit_state(manager.unit_of(name))
        note = unit.status
        if unit.active == "failed":
            note = failure(name) or unit.result
    except manager.ManagerAway as error:
        note = f"systemd cannot be asked: {error}"
    row: dict[str, Any] = {}
    checkpoint = None
    try:
        output = Path(load(path).output.dir)
        row = outputs.last_metrics(output) or {}
        checkpoints = outputs.checkpoint_dirs(output)
        checkpoint = checkpoints[-1][1] if checkpoints else None
    except ConfigError as error:
        note = str(error)
    except OSError as error:
        note = f"{error.filename}: {error.strerror}"
    given = preflight.read(name)
    running = unit is not None and unit.active in ("active", "activating")
    return RunStatus(
        run=name,
        state="unknown" if unit is None else describe(unit),
        since=unit.since if unit and unit.since else None,
        attempts=unit.restarts + 1 if unit and (running or unit.active == "failed") else None,
        gpus=given.indices if running and given and not given.exit_code else None,
        step=row.get("step"),
        total_steps=row.get("total_steps"),
        loss=row.get("loss"),
        tokens_per_s=row.get("tokens_per_s") if running else None,
        eta_s=row.get("eta_s") if running else None,
        checkpoint=str(checkpoint) if checkpoint else None,
        checkpoint_time=checkpoint.stat().st_mtime if checkpoint else None,
        note=note,
    )


def describe(unit: manager.UnitState) -> str:
    """A unit's state in one word or two."""
    if unit.active == "active":
        return "training"
    if unit.active == "activating":
        return "restarting" if unit.sub == "auto-restart" else "starting"
    if unit.active == "failed":
        return f"failed ({unit.result})"
    return {"inactive": "stopped", "deactivating": "stopping"}.get(unit.active, unit.active)


def failure(name: str) -> str:
    """The last sentence of a failed attempt, from the journal; empty if there is none or it may not be read."""
    command = [
        "journalctl",
        f"_SYSTEMD_UNIT={manager.unit_of(name)}",
        "DFLASH_EVENT=failed",
        "DFLASH_EVENT=refused",
    ]
    try:
        done = subprocess.run(
            [*command, "-n", "1", "-o", "cat", "--no-pager", "-q"],
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def table(rows: list[RunStatus]) -> str:
    """The rows for people, with each one's note below it."""
    head = ("RUN", "STATE", "SINCE", "GPU", "STEP", "LOSS", "TOKENS/S", "ETA", "CHECKPOINT", "ATTEMPTS")
    cells = [head, *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(head))]
    text = []
    for line, row in zip(cells, [None, *rows], strict=True):
        text.append("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
        if row is not None and row.note:
            text.append(f"    {row.note}")
    return "\n".join(text)


def _cells(row: RunStatus) -> tuple[str, ...]:
    checkpoint = "-"
    if row.checkpoint and row.checkpoint_time:
        checkpoint = f"{Path(row.checkpoint).name}, {age(row.checkpoint_time)} ago"
    return (
        row.run,
        row.state,
        f"{age(row.since)} ago" if row.since else "-",
        "-" if row.gpus is None else ",".join(map(str, row.gpus)) or "none",
        f"{row.step}/{row.total_steps}" if row.step is not None else "-",
        f"{row.loss:.3f}" if row.loss is not None else "-",
        f"{row.tokens_per_s:.0f}" if row.tokens_per_s is not None else "-",
        span(row.eta_s) if row.eta_s is not None else "-",
        checkpoint,
        str(row.attempts) if row.attempts is not None else "-",
    )


def as_json(rows: list[RunStatus]) -> str:
    """The rows for programs: a JSON list of objects."""
    return json.dumps([asdict(row) for row in rows], indent=2)
