"""Checkpoints on real file systems: whole or absent, whatever is cut short, full or damaged."""

import contextlib
import errno
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import small_disk
from dflash_agent import outputs
from dflash_agent.checkpoints import newest_whole, verify
from dflash_trainer.checkpoint import Saver, recover, save

DEADLINE = 60
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")


def content(step: int) -> bytes:
    return random.Random(step).randbytes(50_000)


def writer(step: int) -> Callable[[Path], None]:
    """Writes two files whose content tells the step."""

    def write(directory: Path) -> None:
        (directory / "state.pt").write_bytes(content(step))
        (directory / "drafter").mkdir()
        (directory / "drafter" / "model.safetensors").write_bytes(content(-step))

    return write


def save_steps(output: Path, *steps: int, keep_last: int = 100, keep_every: int = 0) -> None:
    for step in steps:
        save(output, step, writer(step), keep_last, keep_every)


def steps_in(output: Path) -> list[int]:
    return [step for step, _ in outputs.checkpoint_dirs(output)]


def directory_of(output: Path, step: int) -> Path:
    return output / "checkpoints" / outputs.checkpoint_name(step)


def leftovers(output: Path) -> list[str]:
    return [path.name for path in output.rglob(".*")]


def served(output: Path) -> bytes:
    """What a server reads through the link."""
    return (output / "drafter" / "model.safetensors").read_bytes()


def test_a_saved_checkpoint_is_whole_and_served(tmp_path: Path) -> None:
    path = save(tmp_path, 240, writer(240), 3, 0)
    assert path == tmp_path / "checkpoints" / "step-00000240"
    verify(path)
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["step"] == 240
    assert manifest["files"].keys() == {"state.pt", "drafter/model.safetensors"}
    assert newest_whole(tmp_path) == (path, [])
    assert (tmp_path / "drafter").readlink() == Path("checkpoints/step-00000240/drafter")
    assert served(tmp_path) == content(-240)
    assert leftovers(tmp_path) == []


def test_an_output_without_checkpoints_has_none(tmp_path: Path) -> None:
    assert newest_whole(tmp_path / "nowhere") == (None, [])
    assert recover(tmp_path) == (None, [])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "kept"),
    [
        (1, 0, [60]),
        (3, 0, [40, 50, 60]),
        (2, 20, [20, 40, 50, 60]),
        (1, 30, [30, 60]),
        (9, 0, [10, 20, 30, 40, 50, 60]),
    ],
)
def test_the_last_ones_and_every_nth_are_kept(
    keep_last: int, keep_every: int, kept: list[int], tmp_path: Path
) -> None:
    save_steps(tmp_path, 10, 20, 30, 40, 50, 60, keep_last=keep_last, keep_every=keep_every)
    assert steps_in(tmp_path) == kept
    assert served(tmp_path) == content(-60)


def test_a_damaged_one_does_not_count_among_those_to_keep(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20, 30)
    (directory_of(tmp_path, 30) / "state.pt").write_bytes(b"torn")
    save_steps(tmp_path, 40, keep_last=2)
    assert steps_in(tmp_path) == [20, 30, 40]
    save_steps(tmp_path, 50, keep_last=2)
    assert steps_in(tmp_path) == [40, 50]


def test_a_newer_damaged_one_pushes_nothing_out(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20, 90)
    flip_a_bit(directory_of(tmp_path, 90) / "state.pt", 1000)
    save_steps(tmp_path, 30, keep_last=1)
    assert steps_in(tmp_path) == [30, 90]
    newest, skipped = newest_whole(tmp_path)
    assert newest == directory_of(tmp_path, 30)
    assert [s.path for s in skipped] == [directory_of(tmp_path, 90)]


def test_a_damaged_checkpoint_of_the_same_step_is_replaced_and_a_whole_one_kept(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20)
    flip_a_bit(directory_of(tmp_path, 20) / "state.pt", 7)
    save_steps(tmp_path, 20)
    verify(directory_of(tmp_path, 20))
    assert leftovers(tmp_path) == []

    def must_not_run(_directory: Path) -> None:
        raise AssertionError("it was there already")

    save(tmp_path, 20, must_not_run, 1, 0)
    assert steps_in(tmp_path) == [20]


def flip_a_bit(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def test_recovery_points_servers_at_the_newest_whole_one(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20)
    flip_a_bit(directory_of(tmp_path, 20) / "state.pt", 0)
    newest, skipped = recover(tmp_path)
    assert newest == directory_of(tmp_path, 10)
    assert len(skipped) == 1
    assert served(tmp_path) == content(-10)
    (tmp_path / "drafter").unlink()
    recover(tmp_path)
    assert served(tmp_path) == content(-10)


def fill_the_disk(directory: Path) -> None:
    (directory / "state.pt").write_bytes(bytes(4_000_000))


def leave_no_room_for_the_manifest(directory: Path) -> None:
    with contextlib.suppress(OSError):
        fill_the_disk(directory)


@needs_root
@pytest.mark.parametrize("write", [fill_the_disk, leave_no_room_for_the_manifest])
def test_a_full_disk_is_an_oserror_and_leaves_the_older_ones(write: Callable[[Path], None], tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", 2_000_000) as output:
        save_steps(output, 10, 20)
        with pytest.raises(OSError, match="No space left") as caught:
            save(output, 30, write, 1, 0)
        assert caught.value.errno == errno.ENOSPC
        assert steps_in(output) == [10, 20]
        assert leftovers(output) == []
        verify(directory_of(output, 10))
        verify(directory_of(output, 20))
        assert served(output) == content(-20)
        save_steps(output, 30, keep_last=1)
        assert steps_in(output) == [30]


@needs_root
def test_a_read_only_file_system_is_an_oserror_and_leaves_the_older_ones(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", 2_000_000) as output:
        save_steps(output, 10)
        subprocess.run(["mount", "-o", "remount,ro", output], check=True)
        with pytest.raises(OSError, match="Read-only") as caught:
            save(output, 20, writer(20), 1, 0)
        assert caught.value.errno == errno.EROFS
        assert newest_whole(output) == (directory_of(output, 10), [])
        assert recover(output) == (directory_of(output, 10), [])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_permission_is_an_oserror(tmp_path: Path) -> None:
    save_steps(tmp_path, 10)
    (tmp_path / "checkpoints").chmod(0o555)
    with pytest.raises(PermissionError):
        save(tmp_path, 20, writer(20), 1, 0)
    (tmp_path / "checkpoints").chmod(0o755)
    assert newest_whole(tmp_path) == (directory_of(tmp_path, 10), [])


def test_a_fault_of_the_writer_comes_out_as_it_is_and_leaves_nothing(tmp_path: Path) -> None:
    save_steps(tmp_path, 10)

    def faulty(directory: Path) -> None:
        writer(20)(directory)
        raise RuntimeError("a fault")

    with pytest.raises(RuntimeError, match="a fault"):
        save(tmp_path, 20, faulty, 1, 0)
    assert steps_in(tmp_path) == [10]
    assert leftovers(tmp_path) == []


# Saves step 30 in copies of an output, killed at the first thing that it asks of the system, the second, …
KILLED_AT_EACH = """
import itertools, os, shutil, signal, sys
from pathlib import Path
from test_checkpoint import save_steps
before, copies = map(Path, sys.argv[1:])
for moment in itertools.count(1):
    output = copies / str(moment)
    shutil.copytree(before, output, symlinks=True)
    child = os.fork()
    if child == 0:
        left = moment
        def hook(event, arguments):
            global left
            if event == "open" or event.startswith(("os.", "shutil.")):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(hook)
        save_steps(output, 30, keep_last=1)
        os._exit(0)
    if os.waitpid(child, 0)[1] == 0:
        break
"""

SAVES_FOR_EVER = """
import itertools, sys
from pathlib import Path
from test_checkpoint import save_steps
for step in itertools.count(int(sys.argv[2])):
    save_steps(Path(sys.argv[1]), step, keep_last=2)
    print(step, flush=True)
"""


def python(code: str, *arguments: object) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )


def loadable(directory: Path | None) -> int:
    """The step of a checkpoint that holds what was written into it."""
    assert directory is not None
    step = int(directory.name.removeprefix("step-"))
    assert (directory / "state.pt").read_bytes() == content(step)
    return step


@pytest.mark.parametrize("damaged", [False, True])
def test_killed_at_any_moment_of_a_save_the_newest_whole_one_loads(damaged: bool, tmp_path: Path) -> None:
    """At every file, directory, link and name that a save touches; also where it replaces a damaged one."""
    before = tmp_path / "before"
    save_steps(before, 10, 20, *([30] if damaged else []))
    if damaged:
        flip_a_bit(directory_of(before, 30) / "state.pt", 5)
    copies = tmp_path / "copies"
    copies.mkdir()
    with python(KILLED_AT_EACH, before, copies) as child:
        assert child.wait(DEADLINE) == 0
    outcomes = []
    for output in sorted(copies.iterdir(), key=lambda path: int(path.name)):
        if not damaged:
            assert served(output) in (content(-20), content(-30))
        found, _ = newest_whole(output)
        step = loadable(found)
        assert recover(output)[0] == found
        assert leftovers(output) == []
        assert served(output) == content(-step)
        outcomes.append(step)
        save_steps(output, 30, keep_last=1)
        assert (steps_in(output), served(output)) == ([30], content(-30))
    assert set(outcomes) == {20, 30}
    assert outcomes == sorted(outcomes)
    assert len(outcomes) > 50


def test_killed_at_random_in_a_row_of_saves_nothing_that_was_reported_is_lost(tmp_path: Path) -> None:
    chance = random.Random(0)
    step = 0
    for _ in range(20):
        with python(SAVES_FOR_EVER, tmp_path, step + 1) as child:
            assert child.stdout is not None
            reported = int(child.stdout.readline())
            time.sleep(chance.uniform(0, 0.05))  # the moment of the kill is what varies here
            child.kill()
            reported = max([reported, *map(int, child.stdout.read().split())])
        step = loadable(newest_whole(tmp_path)[0])
        assert step in (reported, reported + 1)
    recover(tmp_path)
    assert leftovers(tmp_path) == []


def test_servers_can_read_the_drafter_at_any_moment(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    stop = threading.Event()
    seen: set[bytes] = set()
    errors: list[OSError] = []

    def serve() -> None:
        while not stop.is_set():
            try:
                seen.add(served(tmp_path))
            except OSError as error:
                errors.append(error)

    server = threading.Thread(target=serve)
    server.start()
    for step in range(2, 60):
        save_steps(tmp_path, step, keep_last=2)
    stop.set()
    server.join()
    assert errors == []
    assert len(seen) > 5
    assert seen <= {content(-step) for step in range(60)}


def test_a_saver_saves_while_the_caller_goes_on_and_one_at_a_time(tmp_path: Path) -> None:
    saver = Saver(tmp_path, 3, 0, lambda: None)
    go = threading.Event()
    order: list[str] = []

    def slow(directory: Path) -> None:
        order.append("first begins")
        assert go.wait(DEADLINE)
        writer(1)(directory)
        order.append("first ends")

    def second(directory: Path) -> None:
        order.append("second")
        writer(2)(directory)

    saver.submit(1, lambda: slow)
    order.append("the caller goes on")
    assert saver.take_error() is None
    threading.Timer(0.01, go.set).start()
    saver.submit(2, lambda: second)
    saver.finish()
    assert sorted(order[:2]) == ["first begins", "the caller goes on"]
    assert order[2:] == ["first ends", "second"]
    assert steps_in(tmp_path) == [1, 2]
    assert 0.005 < saver.waited < DEADLINE
    saver.finish()


@needs_root
def test_a_saver_hands_each_error_on_once_and_can_go_on(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", 2_000_000) as output:
        saver = Saver(output, 3, 0, lambda: None)
        saver.submit(1, lambda: fill_the_disk)
        saver.submit(2, lambda: writer(2))
        saver.finish()
        error = saver.take_error()
        assert error is not None
        assert error.errno == errno.ENOSPC
        assert saver.take_error() is None
        assert steps_in(output) == [2]


def test_a_saver_raises_what_is_no_error_of_the_system(tmp_path: Path) -> None:
    def faulty(_directory: Path) -> None:
        raise KeyError("a fault")

    saver = Saver(tmp_path, 3, 0, lambda: None)
    saver.submit(1, lambda: faulty)
    saver.finish()
    with pytest.raises(KeyError, match="a fault"):
        saver.take_error()
    assert saver.take_error() is None


def test_while_the_loop_waits_for_a_save_it_gives_signs_of_life_only_as_long_as_that_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_trainer.checkpoint.STUCK", 0.5)
    signs = []
    go = threading.Event()

    def hangs(directory: Path) -> None:
        (directory / "state.pt").write_bytes(b"some")
        assert go.wait(DEADLINE)

    saver = Saver(tmp_path, 3, 0, lambda: signs.append(time.monotonic()))
    saver.submit(1, lambda: hangs)
    threading.Timer(6, go.set).start()
    saver.finish()
    assert 1 <= len(signs) <= 3  # not one a second
    assert saver.waited > 5


def test_a_save_that_failed_is_tried_again_ever_later_and_not_at_every_interval(tmp_path: Path) -> None:
    def no_space(_directory: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    saver = Saver(tmp_path, 3, 0, lambda: None)
    assert saver.due(regular=True)
    assert not saver.due(regular=False)
    pauses = []
    for step in range(1, 7):
        saver.submit(step, lambda: no_space)
        saver.finish()
        assert not saver.due(regular=True)
        pauses.append(round(saver.next_try, -1))
    assert pauses == [60, 120, 240, 480, 960, 960]
    assert saver.failing_for > 0
    saver.submit(7, lambda: writer(7))
    saver.finish()
    assert saver.failing_for == 0
    assert saver.due(regular=True)
