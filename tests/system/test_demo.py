"""The demo as a person runs it, in a container of its own."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from packages import ROOT, cache_dir

pytestmark = pytest.mark.usefixtures("as_root", "repository")
DEMO = [str(ROOT / "packaging" / "demo"), "--container"]


def containers() -> set[str]:
    """What a container that was not cleaned up would leave: its directory, its processes."""
    found = {str(path) for path in cache_dir().glob("dflash-node-*")}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue  # it has just ended
        if words[0] == b"systemd-nspawn":
            found.add(process.name)
    return found


def test_demo_trains_a_drafter_and_leaves_nothing_else() -> None:
    before = containers()
    done = subprocess.run([*DEMO, "--steps", "6"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    *_, loss, rate, checkpoint, further = done.stdout.splitlines()
    assert loss.startswith("loss: ")
    assert rate.startswith("tokens per second: ")
    assert further.startswith("look further: ")
    directory = Path(checkpoint.removeprefix("checkpoint: "))
    assert json.loads((directory / "drafter" / "config.json").read_text())["architectures"] == ["DFlashDraftModel"]
    rows = [json.loads(line) for line in (directory.parents[1] / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < losses[0]
    assert containers() == before


def test_interrupted_demo_saves_and_leaves_nothing() -> None:
    before = containers()
    demo = subprocess.Popen(
        [*DEMO, "--steps", "5000"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert demo.stdout is not None
    said = []
    for line in demo.stdout:
        said.append(line)
        if line.startswith("step 1/"):
            os.killpg(demo.pid, signal.SIGINT)  # as a terminal does on Ctrl-C
    text = "".join(said)
    assert demo.wait() == 130, text
    assert "stopped at step" in text
    assert containers() == before
