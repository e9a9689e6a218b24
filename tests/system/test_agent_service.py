"""dflash-agent.service on a node: what it tells programs, whom it obeys, and that it stays small and comes back."""

import contextlib
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from container import Machine
from nvml.standin import GIB, h200

from .gpus import holding, install_driver, report, unload_driver, xid
from .node import apt, journal, make_run, show, wait_for

UNIT = "dflash-agent.service"
STRUCK = "dflash-train@struck.service"
NAME = ("org.dflash.Agent1", "/org/dflash/Agent1", "org.dflash.Agent1")
METRICS = "http://127.0.0.1:9479/metrics"
FETCH = f"import urllib.request as r; print(r.urlopen({METRICS!r}, timeout=30).read().decode())"
# What is told on the bus, a line of names for each signal; the first line is its pid, when it listens.
LISTEN = """
import os
from gi.repository import GLib
from pydbus import SystemBus
tell = lambda *signal: print(*signal[-1][1], flush=True)
SystemBus().subscribe(iface="org.freedesktop.DBus.Properties", object="/org/dflash/Agent1", signal_fired=tell)
print(os.getpid(), flush=True)
GLib.MainLoop().run()
"""
CALL = """
import sys
from gi.repository import GLib
from pydbus import SystemBus
agent = SystemBus().get("org.dflash.Agent1", timeout=10)
try:
    print(getattr(agent, sys.argv[1])(*sys.argv[2:], timeout=60))
except GLib.Error as error:
    sys.exit(error.message)
"""
MANY = """
import sys
from gi.repository import GLib
from pydbus import SystemBus
agent = SystemBus().get("org.dflash.Agent1", timeout=10)
for number in range(int(sys.argv[1])):
    agent.GPUs
    if number % 10 == 0:
        try:
            agent.Start("no run", timeout=10)
            sys.exit("not refused")
        except GLib.Error:
            pass
"""
LEASE = """
import signal, sys
from dflash_agent import leases
descriptor = leases.acquire(sys.argv[1], sys.argv[2])
signal.pause()
"""


@pytest.fixture(scope="module")
def users(node: Machine) -> None:
    """alice, and bob who is in group dflash."""
    node.run("useradd", "alice")
    node.run("useradd", "--groups", "dflash", "bob")


@pytest.fixture
def cards(node: Machine) -> Iterator[Machine]:
    """Two clean GPUs, seen by the agent."""
    install_driver(node)
    report(node, h200(0), h200(1))
    wait_for(lambda: len(prop(node, "GPUs")) == 2, 90, "the agent to see the GPUs")
    yield node
    unload_driver(node)
    wait_for(lambda: not prop(node, "GPUs"), 90, "the agent to see that the driver is away")


@pytest.fixture
def leased(cards: Machine) -> Iterator[Machine]:
    """The second GPU is leased by a unit, and so the GPUs are watched."""
    uuid = str(h200(1)["uuid"])
    cards.run("systemd-run", "--unit=leaseholder", "--service-type=exec", "python3", "-c", LEASE, uuid, STRUCK)
    wait_for(lambda: prop(cards, "Leases") == {uuid: STRUCK}, 30, "the lease to be shown")
    wait_for(lambda: watcher(cards) is not None, 30, "the GPUs to be watched")
    yield cards
    cards.run("systemctl", "stop", "leaseholder")
    wait_for(lambda: prop(cards, "Leases") == {}, 30, "the lease to be gone")
    wait_for(lambda: watcher(cards) is None, 30, "the watch to end")
    cards.run("rm", f"/run/dflash/leases/{uuid}")


def prop(node: Machine, name: str) -> Any:
    """A property of the agent's, its variants unpacked."""
    told = node.run("busctl", "--json=short", "get-property", *NAME, name).stdout
    return unpacked(json.loads(told)["data"])


def unpacked(value: Any) -> Any:
    """Values without the types of D-Bus."""
    if isinstance(value, list):
        return [unpacked(part) for part in value]
    if isinstance(value, dict):
        if set(value) == {"type", "data"}:
            return unpacked(value["data"])
        return {key: unpacked(part) for key, part in value.items()}
    return value


def ask(node: Machine, method: str, *words: str, user: str = "root") -> tuple[int, str]:
    """Exit code and answer of a call by a user."""
    done = node.run("runuser", "-u", user, "--", "python3", "-c", CALL, method, *words, check=False)
    return done.returncode, (done.stdout + done.stderr).strip()


@contextlib.contextmanager
def heard_on_the_bus(node: Machine) -> Iterator[Callable[[], str]]:
    """Listens on the system bus; what it gives tells which messages there were most, with their numbers."""
    path = "/run/heard"
    output = f"--property=StandardOutput=file:{path}"
    node.run("systemd-run", "--unit=heard", "--collect", "--service-type=exec", output, "busctl", "monitor")
    try:
        yield lambda: "\n".join(
            f"{count} × {where}"
            for where, count in Counter(
                " ".join(re.findall(r"(?:Path|Member)=\S+", message))
                for message in node.path(path).read_text(errors="replace").split("‣")[1:]
            ).most_common(20)
        )
    finally:
        node.run("systemctl", "stop", "heard")


def main_pid(node: Machine) -> int:
    return int(show(node, UNIT, "MainPID"))


def watcher(node: Machine) -> int | None:
    """The pid of the process that watches the GPUs."""
    pid = main_pid(node)
    for thread in node.path(f"/proc/{pid}/task").iterdir():
        for child in (thread / "children").read_text().split():
            if b"gpuwatch" in node.path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
    return None


def kilobytes(node: Machine, pid: int, name: str = "Pss") -> int:
    """A line of smaps_rollup."""
    rollup = node.path(f"/proc/{pid}/smaps_rollup").read_text()
    match = re.search(rf"^{name}: +(\d+) kB", rollup, re.MULTILINE)
    assert match
    return int(match[1])


def cpu_seconds(node: Machine, pid: int) -> float:
    """What the threads of a process have used."""
    tasks = node.path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def strike(node: Machine, gpu: int, code: int, unit: str) -> None:
    """An Xid error that a unit's journal tells of; the driver keeps none for a watcher that is still starting."""
    tried = float("-inf")

    def is_told() -> bool:
        nonlocal tried
        if time.monotonic() - tried > 5:
            xid(node, gpu, code)
            tried = time.monotonic()
        return f"Xid {code}" in journal(node, unit)

    wait_for(is_told, 30, f"Xid {code} to be in the journal of {unit}")


def scrape(node: Machine) -> list[str]:
    """The lines of the metrics."""
    return node.run("python3", "-c", FETCH).stdout.splitlines()


def test_it_runs_after_an_installation_and_is_confined(node: Machine) -> None:
    assert show(node, UNIT, "ActiveState") == "active"
    assert show(node, UNIT, "UnitFileState") == "enabled"
    verified = node.run("systemd-analyze", "verify", "--man=no", UNIT, check=False)
    assert (verified.returncode, verified.stdout, verified.stderr) == (0, "", "")
    node.run("systemd-analyze", "security", "--no-pager", "--threshold=31", UNIT)
    # what an upgrade leaves alone for trainings, it does for the agent
    before = main_pid(node)
    apt(node, "install", "--reinstall", "dflash-agent")
    assert show(node, UNIT, "ActiveState") == "active"
    assert main_pid(node) != before


def test_without_a_driver_nothing_is_watched_and_a_run_may_train_on_the_cpu(node: Machine) -> None:
    assert prop(node, "GPUs") == []
    assert prop(node, "Driver") == ""
    assert prop(node, "Leases") == {}
    assert [finding["code"] for finding in prop(node, "Findings")] == ["gpu"]
    assert watcher(node) is None


@pytest.mark.usefixtures("users")
def test_members_of_the_group_start_and_stop_runs_and_others_do_not(node: Machine) -> None:
    unit = make_run(node, "by-bus", max_steps=1_000_000, save_interval=1_000_000)
    code, said = ask(node, "Start", "by-bus", user="alice")
    assert code == 1
    assert "org.freedesktop.DBus.Error.AccessDenied" in said
    assert "add the user to group dflash" in said
    assert show(node, unit, "ActiveState") == "inactive"
    code, said = ask(node, "Start", "by-bus", user="bob")
    assert (code, said.rpartition("/")[0]) == (0, "/org/freedesktop/systemd1/job")
    wait_for(
        lambda: "training" in [run["state"] for run in prop(node, "Runs")], 120, "the run to be shown training"
    )
    assert ask(node, "Stop", "by-bus", user="alice")[0] == 1
    assert show(node, unit, "ActiveState") == "active"
    (row,) = (run for run in prop(node, "Runs") if run["run"] == "by-bus")
    assert row["step"] >= 1
    assert 'dflash_run_state{run="by-bus",state="training"} 1.0' in scrape(node)
    assert ask(node, "Stop", "by-bus", user="bob")[0] == 0
    wait_for(lambda: show(node, unit, "ActiveState") == "inactive", 60, "the run to stop")
    assert show(node, unit, "Result") == "success"
    stopped = [{"run": "by-bus", "state": "stopped"}]
    wait_for(
        lambda: (
            [{key: run[key] for key in ("run", "state")} for run in prop(node, "Runs") if run["run"] == "by-bus"]
            == stopped
        ),
        30,
        "the run to be shown stopped",
    )
    node.run("rm", "/etc/dflash/runs/by-bus.toml")
    wait_for(lambda: "by-bus" not in [run["run"] for run in prop(node, "Runs")], 30, "the run to be gone")


def test_a_wrong_name_is_an_error_of_one_line(node: Machine) -> None:
    for method in ("Verify", "Start", "Stop"):
        code, said = ask(node, method, "../x")
        assert code == 1
        assert "org.freedesktop.DBus.Error.InvalidArgs: run name '../x': use 1 to 48 of a-z" in said
    for method in ("Verify", "Start"):
        code, said = ask(node, method, "unheard-of")
        assert code == 1
        assert "/etc/dflash/runs/unheard-of.toml does not exist; make it with `dflashctl new unheard-of" in said
    assert "Traceback" not in journal(node, UNIT)


def test_verify_finds_what_dflashctl_verify_finds(node: Machine) -> None:
    make_run(node, "verified", data_dir="/srv/nowhere", output_dir="/root/output")
    told = json.loads(node.run("busctl", "--json=short", "call", *NAME, "Verify", "s", "verified").stdout)
    findings = unpacked(told["data"][0])
    lines = node.run("dflashctl", "verify", "verified", check=False).stdout.splitlines()
    assert [f"{f['severity']:6}  {f['code']}: {f['text']}" for f in findings] == [
        line.partition("; ")[0] if f["hint"] else line for line, f in zip(lines[:-1], findings, strict=True)
    ]
    assert {"data-missing", "output-unwritable"} <= {f["code"] for f in findings if f["severity"] == "refuse"}
    node.run("rm", "/etc/dflash/runs/verified.toml")


def test_a_driver_that_is_loaded_later_is_found_and_changes_are_told(cards: Machine) -> None:
    assert prop(cards, "Driver") == "580.95.05"
    assert [(gpu["uuid"], gpu["clean"], gpu["held"]) for gpu in prop(cards, "GPUs")] == [
        (h200(0)["uuid"], True, 0),
        (h200(1)["uuid"], True, 0),
    ]
    listening = cards.start("python3", "-c", LISTEN)
    assert listening.stdout is not None
    listener = listening.stdout.readline().strip()
    with holding(cards, "/dev/nvidia1") as pid:
        report(cards, h200(0), h200(1, compute=f"{pid}:{GIB}", held=GIB))
        changed: set[str] = set()
        while not changed >= {"GPUs", "Findings"}:
            changed |= set(listening.stdout.readline().split())
        assert [gpu["clean"] for gpu in prop(cards, "GPUs")] == [True, False]
        (busy,) = (finding for finding in prop(cards, "Findings") if finding["severity"] == "refuse")
        assert (busy["code"], busy["gpu"], busy["pid"]) == ("gpu-busy", h200(1)["uuid"], pid)
    report(cards, h200(0), h200(1))
    wait_for(lambda: all(gpu["clean"] for gpu in prop(cards, "GPUs")), 60, "the end of the holder to be seen")
    cards.run("kill", listener)
    listening.wait()


def test_check_looks_afresh(cards: Machine) -> None:
    report(cards, h200(0, held=4 * GIB), h200(1))
    told = json.loads(cards.run("busctl", "--json=short", "call", *NAME, "Check").stdout)
    refused = [f for f in unpacked(told["data"][0]) if f["severity"] == "refuse"]
    assert [(finding["code"], finding["gpu"]) for finding in refused] == [
        ("gpu-memory-unexplained", h200(0)["uuid"])
    ]


def test_an_xid_error_is_in_the_journal_of_the_unit_that_has_the_gpu(leased: Machine) -> None:
    uuid = str(h200(1)["uuid"])
    strike(leased, 1, 79, STRUCK)
    assert "GPU 1 (00000000:02:00.0): Xid 79: the GPU has fallen off the bus" in journal(leased, STRUCK)
    told = leased.run("journalctl", "--unit", STRUCK, "DFLASH_EVENT=xid", "--output=json", "--no-pager").stdout
    entry = json.loads(told.splitlines()[0])
    assert (entry["DFLASH_RUN"], entry["DFLASH_GPU"], entry["DFLASH_XID"]) == ("struck", uuid, "79")
    assert (entry["OBJECT_SYSTEMD_UNIT"], entry["PRIORITY"]) == (STRUCK, "3")
    strike(leased, 0, 31, UNIT)
    assert "Xid 31" not in journal(leased, STRUCK)
    wait_for(lambda: "gpu-xid" in [f["code"] for f in prop(leased, "Findings")], 30, "the error to be shown")
    lines = scrape(leased)
    of_gpu_1 = [line for line in lines if uuid in line]
    assert any(line.startswith("dflash_gpu_leased{") and 'run="struck"' in line for line in of_gpu_1)
    assert any(line.startswith("dflash_gpu_xid_errors_total{") and 'xid="79"' in line for line in of_gpu_1)
    assert 'dflash_agent_info{driver="580.95.05",version="0.1.0"} 1.0' in lines
    leased.run("rm", "/run/dflash/xids.jsonl")


def test_a_watcher_that_is_killed_is_replaced(leased: Machine) -> None:
    first = watcher(leased)
    assert first is not None
    leased.run("kill", "-KILL", str(first))
    wait_for(lambda: watcher(leased) not in (None, first), 30, "another watcher")
    assert "the GPUs are not watched: exit code -9" in journal(leased, UNIT)


def test_a_driver_that_is_replaced_beneath_it_is_found(leased: Machine) -> None:
    first = watcher(leased)
    unload_driver(leased)
    wait_for(lambda: prop(leased, "Driver") == "", 60, "the agent to see that the driver is away")
    report(leased, h200(0), h200(1), h200(2), driver="590.44.01")
    wait_for(lambda: prop(leased, "Driver") == "590.44.01", 60, "the new driver to be seen")
    wait_for(lambda: watcher(leased) not in (None, first), 90, "its GPUs to be watched")
    assert len(prop(leased, "GPUs")) == 3
    strike(leased, 2, 48, UNIT)
    leased.run("rm", "/run/dflash/xids.jsonl")


def test_killed_it_comes_back_and_its_watcher_does_not_stay(leased: Machine) -> None:
    before, old = main_pid(leased), watcher(leased)
    leased.run("systemctl", "kill", "--kill-whom=main", "--signal=SIGKILL", UNIT)
    wait_for(lambda: not leased.path(f"/proc/{old}").exists(), 10, "the watcher to end with it")
    wait_for(lambda: show(leased, UNIT, "ActiveState") == "active", 30, "the agent to be back")
    assert main_pid(leased) != before
    assert len(prop(leased, "GPUs")) == 2
    assert prop(leased, "Leases") == {h200(1)["uuid"]: STRUCK}
    leased.run("systemctl", "stop", UNIT)
    assert prop(leased, "Driver") == "580.95.05"  # asking starts it
    assert show(leased, UNIT, "Result") == "success"


def test_calls_leave_no_memory_behind(cards: Machine) -> None:
    cards.run("python3", "-c", MANY, "500")
    pid = main_pid(cards)
    before = kilobytes(cards, pid, "Anonymous")
    cards.run("python3", "-c", MANY, "5000")
    grown = kilobytes(cards, pid, "Anonymous") - before
    print(f"5500 calls: {grown} KiB more")
    assert grown < 2048  # 11 MiB with pydbus alone on Debian 12
    assert main_pid(cards) == pid


def test_idle_it_is_small_does_nothing_and_holds_no_gpu(cards: Machine) -> None:
    cards.run("systemctl", "restart", UNIT)
    assert len(prop(cards, "GPUs")) == 2
    pid = main_pid(cards)

    def wakeups() -> int:
        status = cards.path(f"/proc/{pid}/status").read_text()
        return int(status.rpartition("\nvoluntary_ctxt_switches:")[2].split()[0])

    began, used, woken = time.monotonic(), cpu_seconds(cards, pid), wakeups()

    def idle() -> bool:
        nonlocal began, used, woken
        if wakeups() != woken:
            began, used, woken = time.monotonic(), cpu_seconds(cards, pid), wakeups()
        return time.monotonic() - began > 10  # as between two looks that found nothing new

    with heard_on_the_bus(cards) as heard:
        try:
            wait_for(idle, 300, "it to have nothing to do")
        except AssertionError as error:
            children = cards.run("ps", "--ppid", str(pid), "-o", "pid,args", check=False).stdout
            raise AssertionError(f"{error}; its children:\n{children}on the bus meanwhile:\n{heard()}") from error
    share = (cpu_seconds(cards, pid) - used) / (time.monotonic() - began)
    size = kilobytes(cards, pid)
    print(f"idle: PSS {size} KiB, {share:.2%} of a core")
    assert size < 40 << 10
    assert share < 0.001
    links = [link.readlink() for link in cards.path(f"/proc/{pid}/fd").iterdir()]
    assert not [link for link in links if "nvidia" in link.name]
    assert watcher(cards) is None
    scrape(cards)
    print(f"after a scrape: PSS {kilobytes(cards, pid)} KiB")
