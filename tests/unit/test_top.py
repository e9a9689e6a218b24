"""`dflashctl top`: a frame as text, and the real command on a terminal of its own."""

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from dflash_agent import top
from dflash_agent.gpus import Gpu, Reading
from dflash_agent.leases import Lease
from dflash_agent.status import RunStatus

GIB = 1 << 30
DEADLINE = 30.0
AGENT = next(path for path in sys.path if path.endswith("agent"))


def run_row(**changes: object) -> RunStatus:
    values: dict[str, object] = {
        "run": "run1",
        "state": "training",
        "since": None,
        "attempts": 2,
        "gpus": [0],
        "step": 240,
        "total_steps": 900,
        "loss": 2.81,
        "tokens_per_s": 16100.0,
        "eta_s": 3600.0,
        "checkpoint": None,
        "checkpoint_time": None,
        "note": "step 240/900 · acceptance 3.14",
    }
    return RunStatus(**(values | changes))  # type: ignore[arg-type]


def test_a_frame_has_runs_stages_and_gpus_and_is_as_wide_as_the_terminal() -> None:
    stages = {"run1": {"target": {"busy": 9.0, "input": 0.0, "output": 1.0}}}
    gpu = Gpu(
        0, "GPU-1", name="NVIDIA H200", total=140 * GIB, used=55 * GIB, utilization=97, temperature=61, power=540.0
    )
    lease = Lease("GPU-1", "dflash-train@run1.service", 0.0)
    view = top.View([run_row()], stages, Reading((gpu,)), {"GPU-1": lease})
    text = "\n".join(top.frame(view, 200))
    for part in ("240/900", "2.810", "acceptance 3.14", "target   ━━━━━━━━━━━━━━━━━━░░  90 %", "stages of run1"):
        assert part in text
    assert "GPU 0 NVIDIA H200 · 55.0 GiB of 140.0 GiB · 97 % · 61 °C · 540 W · leased to dflash-train@run1" in text
    assert {len(line) for line in top.frame(view, 20)} <= set(range(21))


def test_a_node_without_driver_and_runs_has_a_frame_too() -> None:
    text = "\n".join(top.frame(top.View([], {}, Reading((), problem="there is no driver"), {}), 80))
    assert "no runs in" in text
    assert "no GPUs: there is no driver" in text


def test_what_others_chose_cannot_command_the_terminal() -> None:
    lines = top.frame(top.View([run_row(note="red \033[31m note")], {}, Reading(()), {}), 200)
    assert not any("\033" in line for line in lines)


class Terminal:
    """The command on a terminal of its own."""

    def __init__(self, *more: str) -> None:
        self.master, slave = pty.openpty()
        self.resize(30, 100)
        self.before = termios.tcgetattr(slave)
        self.slave = slave
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dflash_agent.cli", "top", *more],
            env=os.environ | {"PYTHONPATH": AGENT, "COLUMNS": "100", "LINES": "30"},  # as some shells export
            stdin=slave,
            stdout=slave,
            stderr=subprocess.PIPE,
            start_new_session=True,
            # As what a shell without job control starts in the background.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        )
        self.seen = b""

    def resize(self, lines: int, columns: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def wait_for(self, wanted: bytes) -> None:
        end = time.monotonic() + DEADLINE
        while wanted not in self.seen:
            assert time.monotonic() < end, self.seen[-500:]
            if select.select([self.master], [], [], 0.2)[0]:
                self.seen += os.read(self.master, 65536)

    def ended(self) -> int:
        end = time.monotonic() + DEADLINE
        while self.process.poll() is None:
            assert time.monotonic() < end
            if select.select([self.master], [], [], 0.1)[0]:
                self.seen += os.read(self.master, 65536)
        while select.select([self.master], [], [], 0)[0]:
            self.seen += os.read(self.master, 65536)
        return int(self.process.returncode)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal()
    yield made
    made.process.kill()
    made.process.communicate()
    os.close(made.master)
    os.close(made.slave)


@pytest.mark.parametrize("how", ["q", "SIGINT", "SIGTERM", "SIGQUIT", "SIGHUP"])
def test_however_it_ends_the_terminal_is_as_it_was(how: str, terminal: Terminal) -> None:
    terminal.wait_for(b"q ends")
    assert top.ENTER.encode() in terminal.seen
    assert termios.tcgetattr(terminal.slave) != terminal.before
    terminal.process.send_signal(signal.SIGTSTP)  # Ctrl-Z does not leave the shell with this screen
    terminal.resize(4, 17)
    terminal.seen = b""
    for _ in range(2):  # the second frame is of the new size for sure
        terminal.wait_for(b"q ends" + top.CLEAR_LINE.encode() + top.CLEAR_BELOW.encode())
        shown, terminal.seen = terminal.seen, b""
    text = shown.decode().rpartition(top.HOME)[2].replace(top.CLEAR_LINE, "").replace(top.CLEAR_BELOW, "")
    lines = [line.strip("\r") for line in text.split("\n")]
    assert len(lines) <= 4
    assert max(map(len, lines)) == 17
    if how == "q":
        os.write(terminal.master, b"q")
    else:
        terminal.process.send_signal(getattr(signal, how))
    assert terminal.ended() == 0
    assert terminal.seen.endswith(top.LEAVE.encode())
    assert termios.tcgetattr(terminal.slave) == terminal.before


def test_once_and_without_a_terminal_it_is_plain_text() -> None:
    for words in (["top", "--once"], ["top"]):
        done = subprocess.run(
            [sys.executable, "-m", "dflash_agent.cli", *words],
            env=os.environ | {"PYTHONPATH": AGENT},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=True,
        )
        assert "\033" not in done.stdout
        assert "no GPUs: " in done.stdout or "GPU 0" in done.stdout
    assert Path(AGENT).is_dir()
