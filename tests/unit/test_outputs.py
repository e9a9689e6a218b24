"""The output directory, read by the agent."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from dflash_agent import outputs
from dflash_agent.runfile import RunFile, from_flags


def test_checkpoints_are_listed_by_step_and_nothing_else_is(tmp_path: Path) -> None:
    assert outputs.checkpoint_dirs(tmp_path) == []
    parent = tmp_path / "checkpoints"
    for name in ("step-00000020", "step-00000003", "step-123456789", ".step-00000040.writing", "step-x", "other"):
        (parent / name).mkdir(parents=True)
    (parent / "step-00000050").write_text("a file")
    assert [step for step, _ in outputs.checkpoint_dirs(tmp_path)] == [3, 20, 123456789]


def test_the_last_metrics_are_the_last_whole_row_of_a_step(tmp_path: Path) -> None:
    assert outputs.last_metrics(tmp_path) is None
    rows = [{"step": n, "loss": 1.0 / n, "padding": "x" * 500} for n in range(1, 400)]
    text = "".join(json.dumps(row) + "\n" for row in rows) + '{"event": "saved"}\n{"step": 400, "lo'
    (tmp_path / "metrics.jsonl").write_text(text)
    last = outputs.last_metrics(tmp_path)
    assert last is not None
    assert last["step"] == 399


def test_fresh_moves_everything_of_a_run_and_keeps_the_rest(tmp_path: Path) -> None:
    assert outputs.set_aside(tmp_path) is None
    (tmp_path / "checkpoints" / "step-00000001" / "drafter").mkdir(parents=True)
    (tmp_path / "drafter").symlink_to("checkpoints/step-00000001/drafter")
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("mine")
    aside = outputs.set_aside(tmp_path)
    assert aside is not None
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([aside.name, "notes.txt"])
    assert (aside / "drafter").resolve() == (aside / "checkpoints" / "step-00000001" / "drafter").resolve()
    assert (aside / "run.json").exists()


def a_run(output: Path, **changes: Any) -> RunFile:
    values = {"target.model": "/srv/target", "data.dir": "/srv/data", "output.dir": str(output)}
    return from_flags("run1", values | changes)


def test_a_run_is_complete_only_with_the_settings_and_inputs_that_it_was_completed_with(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    assert outputs.completed(run) is None
    outputs.mark_complete(run, 240)
    assert outputs.completed(run) is None  # without a drafter there is nothing to be content with
    (tmp_path / "drafter").mkdir()
    assert outputs.completed(run) == 240
    assert outputs.completed(a_run(tmp_path, **{"train.epochs": 7})) is None
    assert outputs.completed(a_run(tmp_path, **{"data.dir": "/srv/other"})) is None
    assert outputs.completed(a_run(tmp_path, **{"output.keep_last": 9})) == 240
    mark = json.loads((tmp_path / "complete.json").read_text())
    del mark["settings"]["train.distill"]  # as a version wrote it that had no such key
    (tmp_path / "complete.json").write_text(json.dumps(mark))
    assert outputs.completed(run) == 240
    assert outputs.completed(a_run(tmp_path, **{"train.distill": 0.5})) is None
    (tmp_path / "complete.json").write_text("{}")
    assert outputs.completed(run) is None


def test_a_mark_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    outputs.mark_complete(a_run(tmp_path / "gone"), 240)


def test_an_output_is_locked_until_its_descriptor_is_closed_and_names_its_holder(tmp_path: Path) -> None:
    first = outputs.lock(tmp_path, "run run1 (pid 41)")
    with pytest.raises(outputs.InUse, match="pid 41"):
        outputs.lock(tmp_path, "run run2 (pid 42)")
    os.close(first)
    os.close(outputs.lock(tmp_path, "run run2 (pid 42)"))
