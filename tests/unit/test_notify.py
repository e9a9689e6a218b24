"""Notifications on a real datagram socket, as the service manager holds it."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from dflash_trainer import notify


@pytest.fixture(params=["path", "abstract"])
def manager(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[socket.socket]:
    """The manager's end of $NOTIFY_SOCKET."""
    name = str(tmp_path / "notify") if request.param == "path" else f"@dflash-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(name.replace("@", "\0"))
        receiver.settimeout(20)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        yield receiver


def received(manager: socket.socket) -> str:
    return manager.recv(65536).decode()


def test_each_call_is_the_message_that_the_manager_knows(manager: socket.socket) -> None:
    notify.ready()
    assert received(manager) == "READY=1"
    notify.Watchdog().alive()
    assert received(manager) == "WATCHDOG=1"
    notify.stopping()
    assert received(manager) == "STOPPING=1"
    notify.extend_timeout(1.5)
    assert received(manager) == "EXTEND_TIMEOUT_USEC=1500000"
    notify.status("step 240/91552 · loss 2.81")
    assert received(manager) == "STATUS=step 240/91552 · loss 2.81"


def test_the_watchdog_allows_a_multiple_of_the_slowest_step_and_never_less_than_the_unit_says(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(notify.time, "monotonic", lambda: now[0])
    monkeypatch.setenv("WATCHDOG_USEC", "6000000")
    watchdog = notify.Watchdog()
    said = []
    for took in (1.0, 5.0, 4.0, 0.1):
        now[0] += took
        watchdog.step_done()
        said.append(received(manager))
        if said[-1] != "WATCHDOG=1":
            assert received(manager) == "WATCHDOG=1"
    assert said == ["WATCHDOG=1", "WATCHDOG_USEC=20000000", "WATCHDOG=1", "WATCHDOG=1"]


def test_waiting_for_a_save_is_no_slow_step(manager: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(notify.time, "monotonic", lambda: now[0])
    monkeypatch.setenv("WATCHDOG_USEC", "6000000")
    watchdog = notify.Watchdog()
    for _ in range(5):
        now[0] += 1.0
        watchdog.alive()
    watchdog.step_done()
    assert [received(manager) for _ in range(6)] == ["WATCHDOG=1"] * 6
    assert watchdog.limit == 6


def test_without_a_watchdog_no_limit_is_asked_for(manager: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WATCHDOG_USEC", raising=False)
    now = [100.0]
    monkeypatch.setattr(notify.time, "monotonic", lambda: now[0])
    watchdog = notify.Watchdog()
    now[0] += 1000
    watchdog.step_done()
    assert received(manager) == "WATCHDOG=1"


def test_a_status_is_one_line_so_that_it_can_say_nothing_else(manager: socket.socket) -> None:
    notify.status("cannot read x:\nREADY=1\n\tsee above")
    assert received(manager) == "STATUS=cannot read x: READY=1 see above"


def test_a_path_that_is_no_utf8_does_not_end_the_run(manager: socket.socket) -> None:
    notify.status("loading " + os.fsdecode(b"/data/\xff"))
    assert received(manager) == r"STATUS=loading /data/\udcff"


def test_nothing_happens_outside_a_unit(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify.ready()
    notify.status("x")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("address", ["gone", "nobody", "not an address"])
def test_a_manager_that_cannot_be_reached_is_said_once(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(notify, "_said", False)
    if address == "nobody":
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as closed:
            closed.bind(str(tmp_path / address))
    monkeypatch.setenv("NOTIFY_SOCKET", address if " " in address else str(tmp_path / address))
    for _ in range(3):
        notify.Watchdog().alive()
    (line,) = capfd.readouterr().err.splitlines()
    assert "service manager" in line
    assert "WATCHDOG=1" in line
