"""What only a kernel of one's own can show: memory that runs out, and power that fails."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from dflash_agent import outputs
from system.node import journal, make_run, show, start, wait_for

from .machine import RUNS, Disks, Image, Vm, after_the_cut, booted, new_disks

pytestmark = pytest.mark.timeout(1800)
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


@dataclass(frozen=True, slots=True)
class Resumed:
    """A machine that lost its power while a run saved, booted again, its run training."""

    vm: Vm
    unit: str
    torn: list[str]  # what the cut left unfinished on the disk
    whole: list[str]  # the checkpoints on the disk after the cut, oldest first


@pytest.fixture(scope="module")
def resumed(node_image: Image, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Resumed]:
    """What all tests here look at: under emulation a start takes a minute and a half."""
    folder = tmp_path_factory.mktemp("machine")
    disks = new_disks(node_image, folder)
    with booted(node_image, disks, folder, RATE) as vm:
        unit = make_run(vm, "cut", max_steps=1_000_000, save_interval=20)
        vm.run("systemctl", "enable", unit)
        start(vm, unit)
        wait_for(lambda: checkpoints(vm) != [], SECONDS, "the first checkpoint")
        cut_while_saving(vm)
    torn, whole = on_the_disk(disks, folder)
    with booted(node_image, disks, folder) as vm:
        wait_for(lambda: show(vm, unit, "ActiveState") == "active", SECONDS, "the boot to start the run")
        yield Resumed(vm, unit, torn, whole)
        vm.stop()


def test_power_cut_while_saving_leaves_the_checkpoint_before_and_the_boot_goes_on_from_it(resumed: Resumed) -> None:
    vm, unit = resumed.vm, resumed.unit
    assert resumed.torn
    assert resumed.whole
    told = vm.run("journalctl", "--boot", "--unit", unit, "--output=cat", "--no-pager").stdout
    assert f"resuming from {RUNS}/cut/checkpoints/{resumed.whole[-1]}\n" in told
    assert show(vm, unit, "NRestarts") == "0"
    since_boot = "$(awk '/^btime/ { print $2 }' /proc/stat)"
    older = f"find {RUNS}/cut/checkpoints -maxdepth 1 -name '.step-*' ! -newermt @{since_boot}"
    assert vm.run("sh", "-c", older).stdout == ""
    wait_for(lambda: checkpoints(vm)[-1] > resumed.whole[-1], SECONDS, "a newer checkpoint")


def test_training_does_not_notice_that_the_clock_jumps(resumed: Resumed) -> None:
    vm, unit = resumed.vm, resumed.unit
    main = show(vm, unit, "MainPID")
    for jump in ("+1 day", "-2 days", "+1 day"):
        newest = checkpoints(vm)[-1]
        vm.run("date", "--set", jump)
        wait_for(lambda newest=newest: checkpoints(vm)[-1] > newest, SECONDS, f"a checkpoint after {jump}")
    assert (show(vm, unit, "MainPID"), show(vm, unit, "NRestarts")) == (main, "0")


def test_a_training_that_the_kernel_kills_for_memory_is_named_so_and_restarted(resumed: Resumed) -> None:
    vm, unit = resumed.vm, resumed.unit
    main = show(vm, unit, "MainPID")
    vm.run("systemctl", "set-property", "--runtime", unit, "MemoryMax=64M", "MemorySwapMax=0")
    wait_for(lambda: show(vm, unit, "NRestarts") == "1", SECONDS, "the restart")
    vm.run("systemctl", "set-property", "--runtime", unit, "MemoryMax=infinity")
    newest = checkpoints(vm)[-1]
    wait_for(lambda: checkpoints(vm)[-1] > newest, SECONDS, "it to train again")
    assert "killed by the kernel (oom-kill): the host, or MemoryMax= of the unit, was out" in journal(vm, unit)
    assert show(vm, unit, "NRestarts") == "1"
    vm.run("systemctl", "stop", unit)
    assert vm.run("test", "-e", f"/proc/{main}", check=False).returncode == 1
    assert "Failed with result 'oom-kill'" in of_systemd(vm, unit)
    assert f"Killed process {main} (" in of_the_kernel(vm)


def test_a_second_process_goes_with_the_one_killed_for_memory_and_restarts_back_off(resumed: Resumed) -> None:
    vm = resumed.vm
    unit = make_run(vm, "greedy")
    begin_greedy(vm, unit)
    wait_for(lambda: both_run(vm, unit), SECONDS, "both processes")
    first, main = processes(vm, unit), show(vm, unit, "MainPID")
    vm.run("touch", GO)
    wait_for(lambda: int(show(vm, unit, "NRestarts")) >= 1, SECONDS, "the restart")
    assert not first & processes(vm, unit)
    (grown,) = first - {main}
    assert f"Memory cgroup out of memory: Killed process {grown} (" in of_the_kernel(vm)
    wait_for(lambda: "restart 2: waiting 5 s" in journal(vm, unit), SECONDS, "the back-off")
    vm.run("systemctl", "stop", unit)
    assert "Failed with result 'oom-kill'" in of_systemd(vm, unit)
    assert "oom-kill" in vm.run("dflashctl", "explain", "greedy", check=False).stdout


def of_systemd(vm: Vm, unit: str) -> str:
    """What the service manager says of a unit in this boot."""
    return vm.run("journalctl", "--boot", "--no-pager", "--output=cat", "_PID=1", f"UNIT={unit}").stdout


def of_the_kernel(vm: Vm) -> str:
    """The kernel's messages of this boot."""
    return vm.run("journalctl", "--boot", "--no-pager", "--output=cat", "--dmesg").stdout


def begin_greedy(vm: Vm, unit: str) -> None:
    """Starts a unit with a limit on its memory and, in the trainer's place, processes that go over it at GO."""
    folder = f"/etc/systemd/system/{unit}.d"
    vm.run("mkdir", "-p", folder)
    vm.run("tee", f"{folder}/memory.conf", text_input=DROP_IN)
    vm.run("tee", SCRIPT, text_input=GREEDY)
    vm.run("systemctl", "daemon-reload")
    vm.run("systemctl", "start", "--no-block", unit)


def processes(vm: Vm, unit: str) -> set[str]:
    """The ids of a unit's processes: of those in its cgroup."""
    group = show(vm, unit, "ControlGroup")
    return set(vm.run("cat", f"/sys/fs/cgroup{group}/cgroup.procs", check=False).stdout.split())


def both_run(vm: Vm, unit: str) -> bool:
    """Whether the main process, and not the preflight, has forked."""
    return show(vm, unit, "MainPID") != "0" and len(processes(vm, unit)) == 2


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
