"""Starts against real memory on a real GPU, on a booted node with the packages installed: each state, each policy.

Prints a table of what was seen (run it with --capture=no). Needs root, systemd, a GPU with nothing on it, and a
runtime for GPUs.
"""

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from container import HOST, Machine
from system.node import journal, make_run, show, wait_for

GIB = 8
HOLD = f"""
import os, signal, torch
memory = torch.ones({GIB} << 30, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print(os.getpid(), os.getpid(), flush=True)
signal.pause()
"""
# A child forked from a process that computes has its descriptors; the parent ends, and the memory lives on.
LEAVE = f"""
import os, signal, torch
memory = torch.ones({GIB} << 30, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
child = os.fork()
if child:
    print(os.getpid(), child, flush=True)
    os._exit(0)
while True:
    signal.pause()
"""
SEEN: list[tuple[str, str, str, float, str]] = []


@pytest.fixture(scope="module", autouse=True)
def table(node: Machine) -> Iterator[None]:  # noqa: ARG001 - skips if there is none
    """What was seen is printed at the end."""
    yield
    print()
    for row in (("situation", "policy", "outcome", "s", "what was said"), *SEEN):
        seconds = row[3] if isinstance(row[3], str) else f"{row[3]:.1f}"
        print(f"{row[0]:34}  {row[1]:6}  {row[2]:8}  {seconds:>5}  {row[4]}")


@pytest.fixture
def unit(node: Machine) -> Iterator[str]:
    """The unit of a run that trains until it is stopped, on a GPU that is clean at first."""
    wait_for(lambda: node.run("dflashctl", "check", check=False).returncode == 0, 30, "a clean GPU")
    yield "dflash-train@held.service"
    node.run("systemctl", "stop", "dflash-train@held.service")
    node.run("systemctl", "reset-failed", "dflash-train@held.service", check=False)


def configure(node: Machine, policy: str, **changes: object) -> None:
    """The run, with a policy; it goes on where it was."""
    node.run("rm", "--force", "/etc/dflash/runs/held.toml")
    make_run(node, "held", on_dirty=policy, **({"max_steps": 1000000, "head_dim": 64, "devices": "0"} | changes))


@contextlib.contextmanager
def holding(user: str, program: str = HOLD) -> Iterator[tuple["subprocess.Popen[str]", int, int]]:
    """A process of a user's that holds memory: its handle, its pid and that of the one that will hold it."""
    command = (
        "setpriv",
        "--reuid",
        user,
        "--regid",
        user,
        "--clear-groups",
        sys.executable,
        "-W",
        "ignore",
        "-c",
        program,
    )
    process = HOST.start(*command)
    assert process.stdout is not None
    pids = process.stdout.readline().split()
    assert len(pids) == 2, pids
    try:
        yield process, int(pids[0]), int(pids[1])
    finally:
        HOST.run("kill", "-KILL", *set(pids), check=False)
        process.wait()


def try_start(node: Machine, unit: str, situation: str, policy: str) -> bool:
    """Whether a start succeeds; a line of the table."""
    begin = time.monotonic()
    started = node.run("systemctl", "start", unit, check=False).returncode == 0
    took = time.monotonic() - begin
    words = ("gpu-busy", "gpu-held", "gpu-memory", "waiting for", "reap:")
    invocation = show(node, unit, "InvocationID")
    said = node.run("journalctl", f"_SYSTEMD_INVOCATION_ID={invocation}", "--output=cat", "--no-pager").stdout
    told = [line for line in said.splitlines() if any(word in line for word in words)]
    SEEN.append((situation, policy, "started" if started else "refused", took, " | ".join(told) or "nothing"))
    return started


def is_alive(pid: int) -> bool:
    return HOST.run("kill", "-0", str(pid), check=False).returncode == 0


def test_a_process_of_another_user(node: Machine, unit: str) -> None:
    with holding("root") as (process, pid, _):
        configure(node, "fail")
        assert not try_start(node, unit, "8 GiB of root's", "fail")
        assert f"pid {pid}" in journal(node, unit)
        configure(node, "reap", preflight_wait="2s")
        assert not try_start(node, unit, "8 GiB of root's", "reap")
        node.run("systemctl", "stop", unit)
        assert process.poll() is None
        configure(node, "wait", preflight_wait="2min")
        node.run("systemctl", "start", "--no-block", unit)
        wait_for(lambda: journal(node, unit).count("waiting for clean GPUs") > 0, 60, "it waits")
    assert try_start(node, unit, "8 GiB of root's, ended meanwhile", "wait")
    assert json.loads(node.run("dflashctl", "check", "--json").stdout)["leases"]


@pytest.mark.parametrize("policy", ["fail", "wait", "reap"])
def test_a_stopped_process(node: Machine, unit: str, policy: str) -> None:
    with holding("dflash") as (process, pid, _):
        process.send_signal(signal.SIGSTOP)
        configure(node, policy, preflight_wait="2s")
        started = try_start(node, unit, "8 GiB of dflash's, stopped", policy)
        assert started is (policy == "reap")
        assert (process.poll() is None) is (policy != "reap")
        if policy != "reap":
            assert "stopped" in journal(node, unit)
            assert f"pid {pid}" in journal(node, unit)


@pytest.mark.parametrize("policy", ["fail", "wait", "reap"])
def test_a_process_that_was_killed_and_not_reaped(node: Machine, unit: str, policy: str) -> None:
    with holding("dflash") as (process, pid, _):
        configure(node, policy)
        process.send_signal(signal.SIGKILL)
        assert try_start(node, unit, "8 GiB of a process just killed", policy)
        with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
            assert " Z " in file.read()


@pytest.mark.parametrize("policy", ["fail", "wait", "reap"])
def test_the_live_child_of_a_dead_parent(node: Machine, unit: str, policy: str) -> None:
    with holding("dflash", LEAVE) as (process, _, child):
        wait_for(lambda: process.poll() is not None, 30, "the parent to end")
        configure(node, policy, preflight_wait="2s")
        started = try_start(node, unit, "8 GiB of a dead parent's child", policy)
        assert started is (policy == "reap")
        assert is_alive(child) is (policy != "reap")
        if policy != "reap":
            assert f"pid {child}" in journal(node, unit)


@pytest.mark.parametrize("policy", ["fail", "wait", "reap"])
def test_a_start_right_after_kill_9_of_a_training(node: Machine, unit: str, policy: str) -> None:
    configure(node, policy)
    node.run("systemctl", "start", unit)
    pid = show(node, unit, "MainPID")
    node.run("kill", "-KILL", pid)
    node.run("systemctl", "stop", unit)  # no back-off: the next start is at once
    assert try_start(node, unit, "a training just killed", policy)
    assert show(node, unit, "NRestarts") == "0"
