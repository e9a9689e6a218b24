"""What only a kernel of one's own can show: memory that runs out, and power that fails."""

import time
from pathlib import Path

import pytest
from dflash_agent import outputs
from system.node import journal, make_run, show, start, wait_for

from .machine import RUNS, Disks, Image, Vm, after_the_cut, booted, new_disks

SECONDS = 600  # for what takes seconds on a processor
RATE = 100_000  # bytes a second: a tiny checkpoint takes long enough to be cut in two
GO = "/run/greedy-go"
SCRIPT = "/usr/local/lib/greedy.py"
# Two processes: the kernel kills the one that grows, and systemd is to end the other.
GREEDY = f"""
import os, time
child = os.fork() == 0
while not os.path.exists("{GO}"):
    time.sleep(0.1)
held = [b"x" * (1 << 20) for _ in range(400 if child else 0)]
time.sleep(3600)
"""
DROP_IN = f"""[Service]
MemoryMax=200M
MemorySwapMax=0
ExecStart=
ExecStart=/usr/bin/python3 {SCRIPT}
"""


@pytest.mark.timeout(1800)
def test_a_unit_that_the_kernel_kills_for_memory_goes_whole_and_comes_back_with_back_off(
    node_image: Image, tmp_path: Path
) -> None:
    with booted(node_image, new_disks(node_image, tmp_path), tmp_path) as vm:
        unit = make_run(vm, "greedy")
        begin_greedy(vm, unit)
        wait_for(lambda: len(processes(vm, SCRIPT)) == 2, SECONDS, "both processes")
        first = processes(vm, SCRIPT)
        vm.run("touch", GO)
        wait_for(lambda: int(show(vm, unit, "NRestarts")) >= 1, SECONDS, "the restart")
        assert not first & processes(vm, SCRIPT)
        wait_for(lambda: "restart 2: waiting 5 s" in journal(vm, unit), SECONDS, "the back-off")
        vm.run("systemctl", "stop", unit)
        told = vm.run("journalctl", "--no-pager", "--output=cat", "_PID=1", f"UNIT={unit}").stdout
        assert "Failed with result 'oom-kill'" in told
        kernel = vm.run("journalctl", "--no-pager", "--output=cat", "--dmesg").stdout
        assert "Memory cgroup out of memory: Killed process" in kernel
        assert "oom-kill" in vm.run("dflashctl", "explain", "greedy", check=False).stdout


@pytest.mark.timeout(1800)
def test_power_cut_while_saving_leaves_the_checkpoint_before_and_the_boot_goes_on_from_it(
    node_image: Image, tmp_path: Path
) -> None:
    disks = new_disks(node_image, tmp_path)
    with booted(node_image, disks, tmp_path, RATE) as vm:
        unit = make_run(vm, "cut", max_steps=1_000_000, save_interval=20)
        vm.run("systemctl", "enable", unit)
        start(vm, unit)
        wait_for(lambda: checkpoints(vm) != [], SECONDS, "the first checkpoint")
        cut_while_saving(vm)
    torn, whole = on_the_disk(disks, tmp_path)
    assert torn
    assert whole
    with booted(node_image, disks, tmp_path) as vm:
        wait_for(lambda: show(vm, unit, "ActiveState") == "active", SECONDS, "the boot to start the run")
        told = vm.run("journalctl", "--boot", "--unit", unit, "--output=cat", "--no-pager").stdout
        newest = f"{RUNS}/cut/checkpoints/{whole[-1]}"
        assert f"resuming from {newest}" in told
        assert int(show(vm, unit, "NRestarts")) == 0
        vm.run("systemctl", "stop", unit)
        assert show(vm, unit, "Result") == "success"
        names = vm.run("ls", "-A", f"{RUNS}/cut/checkpoints").stdout.split()
        assert [name for name in names if name.startswith(".")] == []
        assert max(names) > whole[-1]
        vm.stop()


def begin_greedy(vm: Vm, unit: str) -> None:
    """Starts a unit with a limit on its memory and, in the trainer's place, processes that go over it at GO."""
    folder = f"/etc/systemd/system/{unit}.d"
    vm.run("mkdir", "-p", folder)
    vm.run("tee", f"{folder}/memory.conf", text_input=DROP_IN)
    vm.run("tee", SCRIPT, text_input=GREEDY)
    vm.run("systemctl", "daemon-reload")
    vm.run("systemctl", "start", "--no-block", unit)


def processes(vm: Vm, word: str) -> set[str]:
    """Process ids of those that have the word in their command line."""
    return set(vm.run("pgrep", "--full", f"^/usr/bin/python3 {word}", check=False).stdout.split())


def checkpoints(vm: Vm) -> list[str]:
    """The whole checkpoints of the run, oldest first."""
    listed = vm.run("ls", f"{RUNS}/cut/checkpoints", check=False).stdout.split()
    return sorted(name for name in listed if name.startswith("step-"))


def cut_while_saving(vm: Vm) -> None:
    """Takes the power away while a save is under way whose beginning is on the disk already."""
    script = f"cd {RUNS}/cut/checkpoints && ls -d .step-*.writing && sync . && ls -d .step-*.writing"
    end = time.monotonic() + SECONDS
    while True:
        seen = vm.run("sh", "-c", script, check=False)
        before, after = (*seen.stdout.split(), "", "")[:2]
        if seen.returncode == 0 and before == after:
            vm.cut()
            return
        assert time.monotonic() < end, "no save was seen under way"
        time.sleep(0.05)


def on_the_disk(disks: Disks, folder: Path) -> tuple[list[str], list[str]]:
    """Names of what the cut left unfinished, and of the whole checkpoints, oldest first."""
    names = sorted(after_the_cut(disks, folder, f"/cut/{outputs.CHECKPOINTS_DIR}"))
    return [n for n in names if n.startswith(".step-")], [n for n in names if n.startswith("step-")]
