"""Ways in which a run dies on a node, and how it comes back."""

import contextlib
import re
import time
from collections.abc import Iterator

from container import Machine

from .gpus import install_driver, report, unload_driver
from .node import DATA, journal, make_run, show, start, wait_for
from .test_training import drafter_hash, output_of, step_of, wait_until_done

LONG = {"max_steps": 1_000_000, "save_interval": 1_000_000}
# Python runs it before anything else; what is in {} comes before a batch is cut.
BEFORE_A_CUT = """
import os, sys, threading, time
if "dflash_trainer" in sys.orig_argv and "train" in sys.orig_argv:
    from dflash_trainer.loader import Cutter
    cut = Cutter.cut
    def faulty_cut(self, step):
{}
        return cut(self, step)
    Cutter.cut = faulty_cut
"""
# Once, at one step, the loader takes a lock twice.
HANG = """
        if step == 150 and not os.path.exists("/var/cache/dflash/hangs/hung"):
            open("/var/cache/dflash/hangs/hung", "w").close()
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
"""
# Once, at one step, a peer that has joined does not come to a collective.
COLLECTIVE = """
        if step == 150 and not os.path.exists("/var/cache/dflash/collective/hung"):
            open("/var/cache/dflash/collective/hung", "w").close()
            import torch
            import torch.distributed as dist
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            rank = 1 if os.fork() == 0 else 0
            store = dist.FileStore("/var/cache/dflash/collective/rendezvous", 2)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
            if rank == 1:
                time.sleep(3600)
            dist.all_reduce(torch.ones(4))
"""
SLOW = """
        time.sleep({20: 4, 40: 10}.get(step, 0))
"""


def faulty(node: Machine, before_a_cut: str) -> str:
    """Puts a fault where a run's Python finds it; the drop-in that leads there."""
    node.path("/srv/faults").mkdir(exist_ok=True)
    node.path("/srv/faults/sitecustomize.py").write_text(BEFORE_A_CUT.replace("{}", before_a_cut, 1))
    return "[Service]\nEnvironment=PYTHONPATH=/srv/faults\nWatchdogSec=6s\n"


@contextlib.contextmanager
def drop_in(node: Machine, unit: str, text: str) -> Iterator[None]:
    """Settings of an administrator's for a unit."""
    folder = node.path(f"/etc/systemd/system/{unit}.d")
    folder.mkdir(parents=True)
    (folder / "test.conf").write_text(text)
    node.run("systemctl", "daemon-reload")
    try:
        yield
    finally:
        node.run("systemctl", "stop", unit, check=False)
        node.run("systemctl", "reset-failed", unit, check=False)
        node.run("rm", "-r", f"/etc/systemd/system/{unit}.d")
        node.run("systemctl", "daemon-reload")


def processes(node: Machine, unit: str) -> set[str]:
    """The ids, in the container, of a unit's processes."""
    group = show(node, unit, "ControlGroup")
    script = f"cat /sys/fs/cgroup{group}/cgroup.procs /sys/fs/cgroup/*{group}/cgroup.procs"  # version 2, or both
    return set(node.run("sh", "-c", script, check=False).stdout.split())


def wait_for_step(node: Machine, name: str, step: int) -> None:
    wait_for(lambda: step_of(node, name) >= step, 120, f"step {step} of {name}")


def test_a_kill_of_all_its_processes_is_a_restart_from_the_newest_checkpoint(node: Machine) -> None:
    unit = make_run(node, "all-killed", max_steps=1_000_000, save_interval=100)
    start(node, unit)
    wait_for_step(node, "all-killed", 150)
    node.run("systemctl", "kill", "--kill-whom=all", "--signal=SIGKILL", unit)
    wait_for(lambda: show(node, unit, "NRestarts") == "1", 30, "the restart")
    wait_for(lambda: show(node, unit, "ActiveState") == "active", 120, "the next step")
    told = journal(node, unit)
    (newest,) = re.findall("killed by SIGKILL; the next attempt goes on from (.*/step-[0-9]+)$", told, re.MULTILINE)
    assert f"resuming from {newest}\n" in told
    node.run("systemctl", "stop", unit)


def test_a_hang_ends_by_the_watchdog_with_every_threads_stack_and_the_run_goes_on(node: Machine) -> None:
    unit = make_run(node, "hangs", max_steps=300, save_interval=100, log_interval=10)
    with drop_in(node, unit, faulty(node, HANG)):
        start(node, unit)
        wait_for(lambda: show(node, unit, "NRestarts") == "1", 60, "the watchdog to end it")
        told = journal(node, unit)
        assert "Watchdog timeout" in told
        assert "ended by the watchdog: no step was done" in told
        assert "faulty_cut" in told  # where the loader sits
        assert re.search(r"pipeline.py.* in |channel.py.* in get", told)  # and who waits for it
        wait_for(lambda: "complete at step 300/300" in journal(node, unit), 180, "the run to be complete")
        wait_until_done(node, unit)
        assert show(node, unit, "Result") == "success"
        assert re.search(r"resuming from .*step-00000100", journal(node, unit))


def test_a_collective_that_a_peer_does_not_come_to_ends_by_the_watchdog_and_the_peer_with_it(node: Machine) -> None:
    unit = make_run(node, "collective", max_steps=300, save_interval=100, log_interval=10)
    with drop_in(node, unit, faulty(node, COLLECTIVE)):
        start(node, unit)
        wait_for(lambda: len(processes(node, unit)) > 1, 60, "the peer")
        first = processes(node, unit)
        wait_for(lambda: show(node, unit, "NRestarts") == "1", 60, "the watchdog to end it")
        told = journal(node, unit)
        assert "ended by the watchdog: no step was done" in told
        assert "in all_reduce" in told
        assert not first & processes(node, unit)
        wait_for(lambda: "complete at step 300/300" in journal(node, unit), 180, "the run to be complete")
        wait_until_done(node, unit)
        assert re.search(r"resuming from .*step-00000100", journal(node, unit))


def test_a_step_that_is_slower_than_the_watchdog_is_no_hang_where_one_before_was_slow(node: Machine) -> None:
    unit = make_run(node, "slow", max_steps=60, log_interval=10)
    with drop_in(node, unit, faulty(node, SLOW)):
        start(node, unit)
        wait_for(lambda: "complete at step 60/60" in journal(node, unit), 120, "the run to be complete")
        wait_until_done(node, unit)
        assert show(node, unit, "NRestarts") == "0"


def test_a_stop_while_it_loads_is_at_once_and_no_failure(node: Machine) -> None:
    unit = make_run(node, "stopped-early", **LONG)
    node.run("systemctl", "start", "--no-block", unit)
    wait_for(lambda: "loading target" in journal(node, unit), 60, "it loads")
    began = time.monotonic()
    node.run("systemctl", "stop", unit)
    assert time.monotonic() - began < 20
    assert show(node, unit, "Result") == "success"
    assert show(node, unit, "ActiveState") == "inactive"


def test_the_last_word_of_a_restart_loop_says_what_to_type(node: Machine) -> None:
    unit = make_run(node, "loops", **LONG)
    fault = "[Unit]\nStartLimitBurst=2\n[Service]\nExecStart=\nExecStart=/bin/false\n"
    with drop_in(node, unit, fault):
        assert node.run("systemctl", "start", unit, check=False).returncode != 0
        wait_for(lambda: f"systemctl reset-failed {unit}" in journal(node, unit), 60, "the last word")
        assert journal(node, unit).strip().splitlines()[-1].endswith(f"systemctl start {unit}")
        assert show(node, unit, "ActiveState") == "failed"
    start(node, unit)
    node.run("systemctl", "stop", unit)


def test_a_second_run_with_the_same_output_is_refused_and_names_the_first(node: Machine) -> None:
    first = make_run(node, "owner", **LONG, output_dir="/var/lib/dflash/runs/owner")
    second = make_run(node, "intruder", **LONG, output_dir="/var/lib/dflash/runs/owner")
    start(node, first)
    assert node.run("systemctl", "start", second, check=False).returncode != 0
    assert show(node, second, "ExecMainStatus") == "78"
    assert "is in use by run owner (pid" in journal(node, second)
    assert show(node, first, "ActiveState") == "active"
    node.run("systemctl", "stop", first)


def test_a_complete_run_that_is_started_again_says_so_and_asks_for_no_gpu(node: Machine) -> None:
    unit = make_run(node, "done", max_steps=20)
    start(node, unit)
    wait_until_done(node, unit)
    before = drafter_hash(node, "done")
    install_driver(node)
    report(node, {"uuid": "GPU-x", "minor": 0, "total": 1 << 34, "used": 1 << 33, "reserved": 0})  # dirty
    try:
        assert node.run("systemctl", "start", unit, check=False).returncode == 0, journal(node, unit)
        wait_until_done(node, unit)
        assert show(node, unit, "Result") == "success"
        assert "complete: step 20 was the last" in journal(node, unit)
        assert "waiting for clean" not in journal(node, unit)
        assert "complete" in node.run("dflashctl", "verify", "done").stdout
    finally:
        unload_driver(node)
    assert drafter_hash(node, "done") == before


def test_training_does_not_notice_that_the_agent_and_the_journal_are_away(node: Machine) -> None:
    unit = make_run(node, "alone", **LONG)
    start(node, unit)
    pid = show(node, unit, "MainPID")
    node.run("systemctl", "stop", "dflash-agent.service")
    node.run("systemctl", "restart", "systemd-journald.service")
    at = step_of(node, "alone")
    wait_for_step(node, "alone", at + 200)
    wait_for(
        lambda: f"step {at + 5}" in journal(node, unit) or f"step {at + 50}" in journal(node, unit), 60, "its lines"
    )
    assert show(node, unit, "MainPID") == pid
    node.run("systemctl", "start", "dflash-agent.service")
    node.run("systemctl", "stop", unit)
    assert show(node, unit, "Result") == "success"


def test_without_the_bus_and_polkit_it_trains_and_a_kill_is_a_restart(node: Machine) -> None:
    unit = make_run(node, "no-bus", max_steps=1_000_000, save_interval=100)
    start(node, unit)
    node.run("systemctl", "stop", "polkit.service", "dbus.socket", "dbus.service")
    try:
        at = step_of(node, "no-bus")
        wait_for_step(node, "no-bus", at + 200)
        assert show(node, unit, "NRestarts") == "0"
        node.run("systemctl", "kill", "--kill-whom=all", "--signal=SIGKILL", unit)
        wait_for(lambda: show(node, unit, "NRestarts") == "1", 60, "the restart")
        wait_for(lambda: show(node, unit, "ActiveState") == "active", 120, "the next step")
        told = journal(node, unit)
        assert "systemd cannot be asked for the number of restarts" in told
        assert "resuming from" in told
        node.run("systemctl", "stop", unit)
        assert show(node, unit, "Result") == "success"
    finally:
        node.run("systemctl", "start", "dbus.socket", "dbus.service", "polkit.service", "dflash-agent.service")


def test_an_output_that_is_deleted_under_it_is_made_anew(node: Machine) -> None:
    unit = make_run(node, "deleted", max_steps=1_000_000, save_interval=200, output_dir="/srv/outputs/deleted")
    node.run("install", "-d", "-o", "dflash", "-g", "dflash", "/srv/outputs")
    start(node, unit)
    node.run("rm", "-r", "/srv/outputs/deleted")
    saved = node.path("/srv/outputs/deleted/checkpoints")
    wait_for(lambda: saved.exists() and any(saved.glob("step-*/manifest.json")), 120, "the next checkpoint")
    assert show(node, unit, "NRestarts") == "0"
    node.run("systemctl", "stop", unit)
    assert show(node, unit, "Result") == "success"


def test_an_enabled_run_that_is_complete_stays_so_after_a_reboot_of_the_manager(node: Machine) -> None:
    unit = make_run(node, "enabled", data_dir=DATA, max_steps=5)
    start(node, unit)
    wait_until_done(node, unit)
    node.run("systemctl", "enable", unit)
    node.run("systemctl", "isolate", "multi-user.target")
    wait_for(lambda: "complete: step 5 was the last" in journal(node, unit), 60, "it to be started again")
    wait_until_done(node, unit)
    assert show(node, unit, "Result") == "success"
    node.run("systemctl", "disable", unit)
    assert output_of(node, "enabled").exists()


def test_of_very_many_lines_none_is_dropped(node: Machine) -> None:
    unit = make_run(node, "talks", **LONG)
    program = "/usr/bin/python3 -c 'for i in range(40000): print(\"line\", i)'"
    with drop_in(node, unit, f"[Service]\nType=oneshot\nRestart=no\nExecStart=\nExecStart={program}\n"):
        start(node, unit)
        node.run("journalctl", "--sync")
        lines = [line for line in journal(node, unit).splitlines() if line.startswith("line ")]
        assert len(lines) == 40000
