"""The watcher of GPUs as the service runs it: a process of its own, over a stand-in for the driver's library."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from nvml.standin import GIB, append_xid, compile_library, h200, write_state
from packages import ROOT

TOLERANCE = 64 << 20
QUICK = "from dflash_agent import gpuwatch as g; g.LOOK_EVERY = 0.1; g.TELL_EVERY = 0.1; g.DEADLINE = {deadline}; "
PARENT = "import subprocess, sys; c = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE); print(c.pid); c.wait()"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the stand-in."""
    directory = tmp_path_factory.mktemp("nvml")
    return compile_library(directory, directory / "state").parent


@dataclass
class Watch:
    """A watcher and its lines."""

    process: "subprocess.Popen[bytes]"
    state: Path
    rest: bytes = b""
    lines: list[dict[str, Any]] = field(default_factory=list)

    def line(self, seconds: float = 20) -> dict[str, Any]:
        """Its next line."""
        assert self.process.stdout is not None
        end = time.monotonic() + seconds
        while b"\n" not in self.rest:
            assert select.select([self.process.stdout], [], [], max(0, end - time.monotonic()))[0], (
                "no line in time"
            )
            data = os.read(self.process.stdout.fileno(), 4096)
            assert data, f"it ended: {self.process.wait()}"
            self.rest += data
        first, self.rest = self.rest.split(b"\n", 1)
        found: dict[str, Any] = json.loads(first)
        return found


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """The file that the stand-in reports."""
    path = tmp_path / "state"
    write_state(path, [h200(0), h200(1)])
    return path


@pytest.fixture
def environment(library: Path, state: Path) -> dict[str, str]:
    """What leads a process to the stand-in."""
    return os.environ | {
        "LD_LIBRARY_PATH": str(library),
        "PYTHONPATH": str(ROOT / "agent"),
        "DFLASH_STANDIN_NVML": str(state),
    }


def command(deadline: int) -> list[str]:
    return [sys.executable, "-c", QUICK.format(deadline=deadline) + "raise SystemExit(g.main())", str(TOLERANCE)]


@pytest.fixture
def watch(request: pytest.FixtureRequest, environment: dict[str, str], state: Path) -> Iterator[Watch]:
    """A watcher that has told that it looks."""
    deadline = getattr(request, "param", 60)
    process = subprocess.Popen(
        command(deadline), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, bufsize=0
    )
    with process:
        watch = Watch(process, state)
        assert watch.line() == {"changed": True}
        yield watch
        process.kill()


def test_xid_errors_are_told_as_they_come_and_how_often(watch: Watch) -> None:
    append_xid(watch.state, 1, 79)
    gpu = {"index": 1, "uuid": h200(1)["uuid"], "bus_id": "00000000:02:00.0"}
    assert watch.line() == {"xid": 79, "count": 1} | gpu
    state = watch.state.read_text()
    watch.state.write_text(state + "".join(f"xid.{i}=0:31\n" for i in range(2, 32)))
    count = 0
    while count < 30:
        told = watch.line()
        assert told["xid"] == 31
        assert told["index"] == 0
        count += told["count"]
    assert count == 30


def test_changes_of_processes_and_memory_are_told_and_small_ones_are_not(watch: Watch) -> None:
    write_state(watch.state, [h200(0), h200(1, compute="4711:1073741824", held=GIB)])
    assert watch.line() == {"changed": True}
    write_state(watch.state, [h200(0), h200(1, compute="4711:3221225472", held=3 * GIB)])  # the same process
    write_state(watch.state, [h200(0), h200(1, held=3 * GIB)])
    assert watch.line() == {"changed": True}
    write_state(watch.state, [h200(0), h200(1, held=TOLERANCE)])
    assert watch.line() == {"changed": True}
    write_state(watch.state, [h200(0, held=TOLERANCE // 2), h200(1)])
    with pytest.raises(AssertionError, match="no line in time"):
        watch.line(1)


@pytest.mark.parametrize("change", [{"lost": 1}, {"error.nvmlDeviceGetMemoryInfo_v2": 18}])
def test_ends_when_a_gpu_is_lost_or_the_driver_replaced(watch: Watch, change: dict[str, object]) -> None:
    write_state(watch.state, [h200(0) | change, h200(1)])
    while "ended" not in watch.line():
        pass
    assert watch.process.wait(20) == 1


def test_ends_when_the_driver_is_away(watch: Watch) -> None:
    watch.state.unlink()
    while "ended" not in watch.line():
        pass
    assert watch.process.wait(20) == 1


def test_a_gpu_that_was_lost_before_does_not_hide_the_others(environment: dict[str, str], state: Path) -> None:
    write_state(state, [h200(0, lost=1), h200(1)])
    with subprocess.Popen(
        command(60), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, bufsize=0
    ) as process:
        watch = Watch(process, state)
        assert watch.line() == {"changed": True}
        append_xid(state, 1, 13)
        assert watch.line()["xid"] == 13
        process.kill()


@pytest.mark.parametrize("watch", [2], indirect=True)
def test_a_driver_that_hangs_ends_it(watch: Watch) -> None:
    write_state(watch.state, [h200(0), h200(1)], hang=1)
    assert watch.process.wait(20) == -signal.SIGALRM


def test_ends_when_its_input_is_closed(watch: Watch) -> None:
    assert watch.process.stdin is not None
    watch.process.stdin.close()
    assert watch.process.wait(20) == 0


def test_ends_with_a_parent_that_is_killed(environment: dict[str, str]) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, *command(60)], stdout=subprocess.PIPE, env=environment, bufsize=0
    ) as parent:
        assert parent.stdout is not None
        told = b""
        while b"changed" not in told:  # a line each of the parent and of the watcher
            told += os.read(parent.stdout.fileno(), 4096)
        parent.kill()
        while os.read(parent.stdout.fileno(), 4096):  # ends when the watcher has closed it, too
            pass


def test_without_a_driver_it_says_so_and_ends(environment: dict[str, str], state: Path) -> None:
    write_state(state, [], **{"init.error": 9})
    done = subprocess.run(command(60), env=environment, stdin=subprocess.PIPE, capture_output=True, check=False)
    assert done.returncode == 1
    assert set(json.loads(done.stdout)) == {"ended"}
