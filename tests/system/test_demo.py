"""The demo as a person runs it, in a container of its own."""

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from packages import ROOT, cache_dir

pytestmark = pytest.mark.usefixtures("bootable")
DEMO = [str(ROOT / "packaging" / "demo"), "--container"]


def demo(steps: int, output: Path) -> "subprocess.Popen[str]":
    """The demo, started as from a shell of its own."""
    return subprocess.Popen(
        [*DEMO, "--steps", str(steps), "--output", str(output)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def left_behind(process: "subprocess.Popen[str]") -> list[str]:
    """What a container that was not cleaned up would leave: its directory, or processes that name it."""
    name = f"node-{process.pid}-"
    found = [str(path) for path in cache_dir().glob(f"{name}*")]
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # a process that has just ended
            words = file.read_bytes().decode(errors="replace")
            found += [words] if name in words else []
    return found


def test_demo_trains_a_drafter_and_leaves_nothing_else(tmp_path: Path) -> None:
    process = demo(6, tmp_path / "output")
    said, _ = process.communicate()
    assert process.returncode == 0, said
    assert "\nready: " in said  # what `dflashctl verify` ends with
    *_, loss, rate, checkpoint, further = said.splitlines()
    assert loss.startswith("loss: ")
    assert rate.startswith("tokens per second: ")
    assert further.startswith("look further: ")
    directory = Path(checkpoint.removeprefix("checkpoint: "))
    assert json.loads((directory / "drafter" / "config.json").read_text())["architectures"] == ["DFlashDraftModel"]
    assert directory.parents[1] == tmp_path / "output"
    rows = [json.loads(line) for line in (tmp_path / "output/metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < losses[0]
    assert left_behind(process) == []


def test_interrupted_demo_saves_and_leaves_nothing(tmp_path: Path) -> None:
    process = demo(5000, tmp_path / "output")
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("step 1/"):
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does on Ctrl-C
    said = "".join(lines)
    assert process.wait() == 130, said
    assert "stopped at step" in said
    assert left_behind(process) == []
