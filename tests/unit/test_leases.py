"""Leases of GPUs: one holder each, for as long as its descriptor is open anywhere."""

import multiprocessing
import os
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from dflash_agent import leases
from dflash_agent.leases import Leased, acquire, current

UNIT, OTHER = "dflash-train@run1.service", "dflash-train@run2.service"


def test_a_lease_is_seen_by_everybody_until_its_descriptor_is_closed(tmp_path: Path) -> None:
    assert current(tmp_path) == {}
    descriptor = acquire("GPU-1", UNIT, tmp_path)
    assert current(tmp_path)["GPU-1"].unit == UNIT
    with pytest.raises(Leased, match="run1"):
        acquire("GPU-1", OTHER, tmp_path)
    os.close(descriptor)
    assert current(tmp_path) == {}
    os.close(acquire("GPU-1", OTHER, tmp_path))


def test_it_outlives_the_process_that_took_it_where_another_has_the_descriptor(tmp_path: Path) -> None:
    descriptor = acquire("GPU-1", UNIT, tmp_path)
    holder = subprocess.Popen(["sleep", "60"], pass_fds=[descriptor])  # as systemd does
    os.close(descriptor)
    assert current(tmp_path)["GPU-1"].unit == UNIT
    holder.kill()
    holder.wait()
    assert current(tmp_path) == {}


def test_asking_does_not_hinder_taking(tmp_path: Path) -> None:
    os.close(acquire("GPU-1", UNIT, tmp_path))
    code = "import sys; from pathlib import Path; from dflash_agent.leases import current\n"
    code += "print(flush=True)\nwhile True: current(Path(sys.argv[1]))"
    env = os.environ | {"PYTHONPATH": str(Path(leases.__file__).parent.parent)}
    asker = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=env, stdout=subprocess.PIPE)
    try:
        assert asker.stdout is not None
        asker.stdout.readline()
        for _ in range(300):
            os.close(acquire("GPU-1", UNIT, tmp_path))
    finally:
        asker.kill()
        asker.wait()


def _race(directory: Path, start: Connection, result: Connection) -> None:
    start.recv()
    try:
        acquire("GPU-1", f"dflash-train@r{os.getpid()}.service", directory)
    except Leased:
        result.send(False)
    else:
        result.send(True)
    start.recv()  # the lease ends with the process: not before all have tried


def test_of_many_that_try_at_once_one_gets_it(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    racers = []
    for _ in range(8):
        go, start = context.Pipe()
        result, send = context.Pipe()
        process = context.Process(target=_race, args=(tmp_path, start, send))
        process.start()
        racers.append((process, go, result))
    for _, go, _ in racers:
        go.send(None)
    won = [result.recv() for _, _, result in racers]
    for process, go, _ in racers:
        go.send(None)
        process.join()
    assert won.count(True) == 1


@pytest.mark.parametrize("text", ["", "{", '{"unit": 1}', "[]", '{"unit": "u", "since": "x"}'])
def test_a_record_that_cannot_be_read_does_not_hide_the_lease(tmp_path: Path, text: str) -> None:
    descriptor = acquire("GPU-1", UNIT, tmp_path)
    (tmp_path / "GPU-1").write_text(text)
    assert set(current(tmp_path)) == {"GPU-1"}
    with pytest.raises(Leased):
        acquire("GPU-1", OTHER, tmp_path)
    os.close(descriptor)


def test_what_systemd_hands_over_is_found_by_name() -> None:
    given = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "2", "LISTEN_FDNAMES": "other:gpu-GPU-1"}
    assert leases.kept_here(given) == {"GPU-1": 4}
    assert leases.kept_here(given | {"LISTEN_PID": "1"}) == {}
    assert leases.kept_here({}) == {}
