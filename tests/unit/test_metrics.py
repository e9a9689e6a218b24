"""Metrics as their readers see them: JSON lines, TensorBoard's own reader, and what stands on a terminal."""

import contextlib
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from conftest import small_disk
from dflash_agent import outputs
from dflash_trainer.metrics import Metrics, Progress, append, duration, mend_last_line, status_line
from hypothesis import given
from hypothesis import strategies as st

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")


def row(step: int, loss: float = 2.5) -> dict[str, Any]:
    return {"step": step, "total_steps": 100, "loss": loss, "lr": 6e-4, "stages": {"loader": {"busy": 1.0}}}


def lines(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def plotted(output: Path, name: str = "loss") -> dict[int, float]:
    """What TensorBoard shows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(output / "tensorboard"))
    shown.Reload()
    return {event.step: event.value for event in shown.Scalars(name)}


def test_a_row_is_in_both_files_at_once(tmp_path: Path) -> None:
    numbers = Metrics(tmp_path, 0)
    for step in (1, 2):
        numbers.row(row(step, loss=step / 2))
        assert lines(tmp_path)[-1].pop("time") > 1.7e9
        assert {k: v for k, v in lines(tmp_path)[-1].items() if k != "time"} == row(step, loss=step / 2)
        assert plotted(tmp_path)[step] == step / 2
    assert plotted(tmp_path, "lr") == pytest.approx({1: 6e-4, 2: 6e-4})
    numbers.row({"event": "saved", "step": 2})
    assert [line.get("event") for line in lines(tmp_path)] == [None, None, "saved"]
    assert outputs.last_metrics(tmp_path) == lines(tmp_path)[1]


def test_a_resumed_run_plots_over_the_steps_that_were_lost(tmp_path: Path) -> None:
    numbers = Metrics(tmp_path, 0)
    for step in (1, 2, 3, 4):
        numbers.row(row(step, loss=10 + step))
    numbers = Metrics(tmp_path, 2)
    numbers.row(row(3, loss=3))
    assert plotted(tmp_path) == {1: 11, 2: 12, 3: 3}
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4, 3]


def test_a_torn_last_line_is_removed_and_the_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = '{"step": 1}\n{"step": 2}\n'
    for size in range(len('{"step": 3}')):
        path.write_text(whole + '{"step": 3}'[:size])
        mend_last_line(path)
        assert path.read_text() == whole
    path.write_text("x" * 10)
    mend_last_line(path)
    assert path.read_text() == ""
    path.unlink()
    mend_last_line(path)
    assert not path.exists()
    path.write_text('{"step": 1}\n' * 20_000 + '{"st')  # longer than what is looked at
    numbers = Metrics(tmp_path, 0)
    numbers.row(row(2))
    assert len(lines(tmp_path)) == 20_001


def test_what_is_no_number_is_null_and_the_line_is_json(tmp_path: Path) -> None:
    numbers = Metrics(tmp_path, 0)
    numbers.row(row(1, loss=math.nan) | {"grad_norm": math.inf, "stages": {"loader": {"busy": -math.inf}}})

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line, parse_constant=refuse)["loss"] is None
    assert json.loads(line)["stages"] == {"loader": {"busy": None}}


@needs_root
def test_a_full_disk_is_said_once_a_streak_and_what_fits_later_is_whole(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path / "small", 300_000) as output:
        numbers = Metrics(output, 0)
        numbers.row(row(1))
        for streak in (1, 2):
            (output / "ballast").write_bytes(b"x" * (4096 * 4))
            with contextlib.suppress(OSError), (output / "ballast").open("ab", buffering=0) as file:
                while True:
                    file.write(b"x" * 4096)
            for step in range(10 * streak, 10 * streak + 5):
                numbers.row(row(step) | {"long": "x" * 5000})
            said = [line for line in capfd.readouterr().err.splitlines() if "metrics not written" in line]
            assert len(said) == 1
            assert "No space left" in said[0]
            (output / "ballast").unlink()
            numbers.row(row(10 * streak + 5))
            assert capfd.readouterr().err == ""
        assert [line["step"] for line in lines(output)] == [1, 15, 25]
        assert plotted(output).keys() == {1, 15, 25}


@needs_root
def test_plots_go_on_in_the_same_file_when_there_is_room_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path / "small", 300_000) as plots:
        output = tmp_path / "out"
        output.mkdir()
        (output / "tensorboard").symlink_to(plots)
        numbers = Metrics(output, 0)
        numbers.row(row(1))
        with contextlib.suppress(OSError), (plots / "ballast").open("wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)
        for step in range(2, 200):
            numbers.row(row(step))
        said = [line for line in capfd.readouterr().err.splitlines() if "metrics not written" in line]
        assert len(said) == 1
        (plots / "ballast").unlink()
        numbers.row(row(200))
        assert [line["step"] for line in lines(output)] == list(range(1, 201))
        assert len(list(plots.iterdir())) == 1
        assert {1, 2, 200} <= plotted(output).keys()


@needs_root
def test_a_disk_that_is_full_from_the_start_stops_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path / "small", 4096) as output:
        with contextlib.suppress(OSError):
            (output / "ballast").write_bytes(bytes(100_000))
        numbers = Metrics(output, 0)
        numbers.row(row(1))
        numbers.row(row(2))
    assert capfd.readouterr().err.count("metrics not written") == 1


@needs_root
def test_data_is_appended_whole_or_not_at_all(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", 8192) as output:
        path = output / "lines"
        append(path, b"a" * 3000)
        with pytest.raises(OSError, match="No space left"):
            append(path, b"b" * 9000)
        assert path.read_bytes() == b"a" * 3000
        append(path, b"c")
        assert path.read_bytes() == b"a" * 3000 + b"c"


def test_a_bar_is_no_part_of_a_journal(capfd: pytest.CaptureFixture[str]) -> None:
    with Progress(3, 10) as bar:
        bar.advance_to(5, 2.5)
        bar.advance_to(10, 2.4)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ((240, 91552, 2.81, 16100.0, 680400.0), "step 240/91552 · loss 2.81 · 16.1 Ktok/s · ETA 7 d 21 h"),
        ((1, 20, 10.0, 999.4, 0.2), "step 1/20 · loss 10.00 · 999 tok/s · ETA 0 s"),
        ((20, 20, 0.005, 1000.0, 59.6), "step 20/20 · loss 0.01 · 1.0 Ktok/s · ETA 1 min 0 s"),
        ((5, 20, math.nan, 0.0, 3599.0), "step 5/20 · loss nan · 0 tok/s · ETA 59 min 59 s"),
    ],
)
def test_the_status_line(values: tuple[int, int, float, float, float], line: str) -> None:
    assert status_line(*values) == line


@given(st.floats(0, 1e9))
def test_a_duration_names_at_most_two_units_and_is_near(seconds: float) -> None:
    words = duration(seconds).split()
    sizes = {"d": 86400, "h": 3600, "min": 60, "s": 1}
    parts = [(int(count), sizes[unit]) for count, unit in zip(words[::2], words[1::2], strict=True)]
    assert len(parts) <= 2
    assert abs(sum(count * size for count, size in parts) - seconds) <= max(parts[-1][1], 0.5)
    if len(parts) == 2:
        assert parts[0][0] > 0
        assert parts[1][0] * parts[1][1] < parts[0][1]
