"""Curves of runs: what is read of the metrics, and what a person sees of them."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from dflash_agent import cli, plot, runfile
from dflash_agent.curves import Curves, read_curves, thinned


def rows_of(output: Path, rows: list[dict[str, Any]]) -> Path:
    output.mkdir(parents=True, exist_ok=True)
    (output / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return output


def step(number: int, **more: Any) -> dict[str, Any]:
    stages = {"target": {"busy": 3.0, "input": 0.0, "output": 1.0}}
    return {"step": number, "loss": 10 / number, "accuracy": number / 100, "stages": stages} | more


def test_curves_are_read_by_key_whatever_else_is_in_the_file(tmp_path: Path) -> None:
    output = rows_of(tmp_path, [step(10), step(20, accuracy_by_position=[0.5, None]), {"step": 20, "other": "x"}])
    with (output / "metrics.jsonl").open("a") as file:
        file.write(
            '{"step": 25, "acceptance_length": 2.5}\nnonsense\n[1]\n"x"\n{"step": "x"}\n{"step": Infinity}\n'
        )
        for foreign in ('"stages": {"a": 3}', '"stages": {"a": {"busy": "x"}}', '"accuracy_by_position": ["x"]'):
            file.write(f'{{"step": 26, "loss": 9.0, {foreign}}}\n')
        file.write('{"torn')
    curves = read_curves("r", output)
    assert curves.by_key["loss"] == [(10, 1.0), (20, 0.5)]
    assert curves.by_key["busy: target"] == [(10, 0.75), (20, 0.75)]
    assert curves.by_key["acceptance_length"] == [(25, 2.5)]
    assert curves.by_position[0] == 0.5
    assert math.isnan(curves.by_position[1])


def test_steps_that_an_attempt_did_again_are_there_once(tmp_path: Path) -> None:
    evaluation = {"step": 40, "acceptance_length": 9.0}
    first = [step(n) for n in (10, 20, 30)] + [step(40), evaluation]
    again = [step(n, loss=float(n)) for n in (30, 40)] + [evaluation | {"acceptance_length": 2.0}, step(50)]
    curves = read_curves("r", rows_of(tmp_path, first + again))
    assert curves.by_key["loss"] == [(10, 1.0), (20, 0.5), (30, 30.0), (40, 40.0), (50, 0.2)]
    assert curves.by_key["acceptance_length"] == [(40, 2.0)]


def test_many_points_become_means_of_equal_spans() -> None:
    points = [(n, float(n)) for n in range(1, 100_001)]
    few = thinned(points, 100)
    assert len(few) == 100
    assert few[0] == (500, pytest.approx(500.5))
    assert [value for _, value in few] == sorted(value for _, value in few)
    assert thinned(points[:50], 100) == points[:50]


def made(name: str, low: float = 1.0) -> Curves:
    falling = [(n, low + 9 / n) for n in range(1, 200)]
    return Curves(name, {"loss": falling, "acceptance_length": [(100, 2.0), (199, 3.0)]}, (0.5, 0.25))


def test_the_terminal_shows_a_falling_curve_with_its_numbers() -> None:
    lines = plot.text([made("run1")], 60, 8, colour=False).splitlines()
    assert lines[0] == "loss, nats"
    body = lines[1:9]
    assert body[0].startswith("10.00 ┤")
    assert body[-1].startswith(" 1.0")
    assert all(len(line) <= 60 for line in lines)
    dots = [line.partition("┤")[2] for line in body]
    first = [len(line) - len(line.lstrip()) for line in dots if line.strip()]
    assert first == sorted(first)  # from the upper left to the lower right
    assert "step 1" in lines[9]
    assert lines[9].endswith("199")
    assert "right at block position 1, 2, … of run1, newest, %: 50 25" in lines


def test_several_runs_are_told_apart_with_and_without_colours() -> None:
    plain = plot.text([made("one"), made("two", 4.0)], 60, 8, colour=False)
    assert plain.splitlines()[0] == "a one  b two"
    assert "a" in plain.split("┤")[-1] + plain
    assert all(mark in plain.partition("loss, nats")[2] for mark in "ab")
    coloured = plot.text([made("one"), made("two", 4.0)], 60, 8, colour=True)
    assert "\033[36m" in coloured.partition("loss, nats")[2]
    assert "\033[33m" in coloured.partition("loss, nats")[2]


@pytest.mark.parametrize("values", [[(5, 2.0)], [(1, math.inf), (2, math.nan)], [(1, 3.0), (9, 3.0)]])
def test_odd_curves_are_no_fault(values: list[tuple[int, float]]) -> None:
    assert "loss, nats" in plot.text([Curves("r", {"loss": values}, ())], 40, 6, colour=False)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(runfile, "RUNS_DIR", tmp_path / "runs")
    for name in ("run1", "run2"):
        words = ["--target-model", "/t", "--data-dir", "/d", "--output-dir", str(tmp_path / name)]
        assert cli.main(["new", name, *words]) == 0
    rows_of(tmp_path / "run1", [step(n, accuracy_by_position=[0.5, 0.25]) for n in range(10, 400, 10)])
    return tmp_path


@pytest.mark.skipif(os.geteuid() != 0, reason="makes run files")
def test_the_command_draws_and_says_what_is_missing(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert cli.main(["plot", "run1"]) == 0
    assert "share of the time that the target was at work" in capsys.readouterr().out
    assert cli.main(["plot", "run1", "run2"]) == 78
    assert "run2 has no metrics yet in" in capsys.readouterr().err
    assert cli.main(["plot", "run3"]) == 78
    assert "run3.toml does not exist; runs are: run1, run2" in capsys.readouterr().err
    assert not (runs / "x.png").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="makes run files")
def test_a_terminal_without_such_characters_is_no_fault(runs: Path) -> None:
    agent = next(path for path in sys.path if path.endswith("agent"))
    there = str(runs / "runs")
    code = f"from pathlib import Path; from dflash_agent import cli, runfile; runfile.RUNS_DIR = Path({there!r})"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; raise SystemExit(cli.main(['plot', 'run1']))"],
        env=os.environ | {"PYTHONPATH": agent, "PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        check=True,
    )
    assert b"loss, nats" in done.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="makes run files")
def test_without_matplotlib_it_says_what_to_install(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["plot", "run1", "--output", str(runs / "x.png")]) == 78
    assert "apt install python3-matplotlib" in capsys.readouterr().err
    assert not (runs / "x.png").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="makes run files")
def test_a_picture_is_drawn(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = pytest.importorskip("matplotlib.image")
    rows_of(runs / "run2", [step(n, loss=20 / n, tokens_per_s=1e4) for n in range(10, 400, 10)])
    assert cli.main(["plot", "run1", "run2", "--output", str(runs / "x.png")]) == 0
    pixels = image.imread(runs / "x.png")[..., :3].reshape(-1, 3)
    drawn = {tuple(round(float(part), 2) for part in pixel) for pixel in pixels[::3]}
    assert (0.12, 0.47, 0.71) in drawn  # the first run's colour, and the second's
    assert (1.0, 0.5, 0.05) in drawn
    assert cli.main(["plot", "run1", "--output", str(runs / "x.nonsense")]) == 78
    assert "nonsense" in capsys.readouterr().err
