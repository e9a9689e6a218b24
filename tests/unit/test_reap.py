"""Ending leftovers: whose, how, and what is said of those that do not die."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from dflash_agent import holders, reap
from dflash_agent.config import AgentConfig
from dflash_agent.holders import Holder

UID = os.getuid()
UNIT = "dflash-train@run1.service"

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a Python program that says when it is set up; whatever is left is killed by its own handle."""
    started = []

    def begin(program: str, **options: object) -> "subprocess.Popen[str]":
        process = subprocess.Popen(  # type: ignore[call-overload]
            [sys.executable, "-c", program + "\nprint(flush=True)\nsignal.pause()"],
            stdout=subprocess.PIPE,
            text=True,
            **options,
        )
        started.append(process)
        process.stdout.readline()
        return process  # type: ignore[no-any-return]

    yield begin
    for process in started:
        process.kill()
        process.wait()


def holder_of(pid: int) -> Holder:
    return holders.describe(pid, (), (), AgentConfig())


def live(_unit: str) -> bool:
    return True


def dead(_unit: str) -> bool:
    return False


def test_sigterm_is_enough_for_a_process_that_heeds_it(start: Start) -> None:
    process = start("import signal")
    (outcome,) = reap.reap([holder_of(process.pid)], UID)
    assert outcome.ended
    assert process.wait() == -signal.SIGTERM


def test_a_process_that_ignores_sigterm_gets_sigkill(start: Start) -> None:
    process = start("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    (outcome,) = reap.reap([holder_of(process.pid)], UID, grace=0.2)
    assert outcome.text == "ended by SIGKILL"
    assert process.wait() == -signal.SIGKILL


def test_a_stopped_process_is_ended_by_sigterm_too(start: Start) -> None:
    process = start("import signal")
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    (outcome,) = reap.reap([holder_of(process.pid)], UID)
    assert outcome.text == "ended by SIGTERM"


def test_another_process_under_the_same_pid_is_not_touched(start: Start) -> None:
    process = start("import signal")
    judged = replace(holder_of(process.pid), ticks=holder_of(process.pid).ticks - 1)
    (outcome,) = reap.reap([judged], UID, grace=0.2)
    assert outcome.text == "had ended already"
    assert process.poll() is None


@pytest.mark.skipif(UID != 0, reason="changing the user needs root")
@pytest.mark.parametrize("ids", ["12345, 12345, 12345", "0, 12345, 12345", "12345, 12345, 0"])
def test_a_process_with_any_user_id_of_another_is_not_touched(start: Start, ids: str) -> None:
    process = start(f"import signal, os; os.setresuid({ids})")
    (outcome,) = reap.reap([holder_of(process.pid)], UID, grace=0.2)
    assert outcome.text == "had ended already"
    assert process.poll() is None


def test_a_process_that_has_ended_is_no_error(start: Start) -> None:
    process = start("import signal")
    judged = holder_of(process.pid)
    process.kill()
    process.wait()
    (outcome,) = reap.reap([judged], UID)
    assert outcome.ended


def test_several_are_ended_together_and_all_are_told(start: Start) -> None:
    processes = [start("import signal") for _ in range(3)]
    outcomes = reap.reap([holder_of(p.pid) for p in processes], UID)
    assert {o.holder.pid for o in outcomes} == {p.pid for p in processes}
    assert all(o.ended for o in outcomes)


def test_what_belongs_to_another_user_or_a_live_unit_is_forbidden() -> None:
    mine = Holder(41, (), user="dflash", uid=990, state="sleeping")
    assert reap.forbidden(mine, 990, UNIT, live) is None
    assert "user ada" in str(reap.forbidden(replace(mine, uid=1000, user="ada"), 990, UNIT, dead))
    assert "jupyter.service" in str(reap.forbidden(replace(mine, unit="jupyter.service"), 990, UNIT, live))
    assert reap.forbidden(replace(mine, unit="dflash-train@old.service"), 990, UNIT, dead) is None
    assert reap.forbidden(replace(mine, unit=UNIT), 990, UNIT, live) is None
    assert reap.forbidden(replace(mine, state="gone", uid=-1, user=""), 990, UNIT, dead)


def test_a_process_that_outlives_sigkill_is_said_to_wait_in_the_kernel(tmp_path: object) -> None:
    del tmp_path
    outcome = reap._why(Holder(os.getpid(), ()))
    assert "SIGKILL" in outcome
    assert "state R" in outcome
