"""Holders: who they are and where they run, from /proc."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from dflash_agent import holders
from dflash_agent.config import AgentConfig
from dflash_agent.gpus import Gpu, GpuProcess, Reading
from dflash_agent.holders import Holder, Use, find_holders, is_housekeeper, place_of

ID = "3f" * 32
SHORT = "3f" * 6


@pytest.mark.parametrize(
    ("path", "unit", "place"),
    [
        ("/dflash.slice/dflash-train@run-1.service", "dflash-train@run-1.service", "dflash-train@run-1.service"),
        ("/user.slice/user-0.slice/session-3.scope", "session-3.scope", "session-3.scope"),
        ("/user.slice/user-7.slice/user@7.service/app.slice/x.service", "user@7.service", "user@7.service"),
        (f"/system.slice/docker-{ID}.scope", f"docker-{ID}.scope", f"docker container {SHORT}"),
        (f"/docker/{ID}", "", f"docker container {SHORT}"),
        (f"/machine.slice/libpod-{ID}.scope/container", f"libpod-{ID}.scope", f"libpod container {SHORT}"),
        (f"/kubepods/besteffort/pod12/{ID}", "", f"kubernetes container {SHORT}"),
        (f"/kubepods.slice/kubepods-pod1.slice/cri-containerd-{ID}.scope", f"cri-containerd-{ID}.scope", None),
        ("/machine.slice/machine-node.scope/payload", "machine-node.scope", "container node"),
        ("/lxc.payload.web/x", "", "lxc container web"),
        ("/init.scope", "init.scope", "init.scope"),
        ("/", "", ""),
        ("", "", ""),
        ("/../outside.service", "", ""),
    ],
)
def test_a_cgroup_tells_the_unit_or_the_container(path: str, unit: str, place: str | None) -> None:
    assert place_of(path) == (unit, f"cri-containerd container {SHORT}" if place is None else place)


@pytest.mark.parametrize(
    ("executable", "name", "unit", "kind", "expected"),
    [
        ("nvidia-persistenced", "nvidia-persiste", "", "open", True),
        ("python3.11", "nvidia-persiste", "", "open", True),
        ("python3.11", "nvitop", "", "open", True),
        ("python3.11", "python3", "dflash-agent.service", "open", True),
        ("python3.11", "python3", "dflash-train@a.service", "compute", False),
        ("nv-hostengine", "nv-hostengine", "nvidia-dcgm.service", "compute", True),
        ("Xorg", "Xorg", "", "graphics", True),
        ("Xorg", "Xorg", "", "compute", False),
        ("blender", "blender", "", "graphics", False),
        ("", "", "", "open", False),
    ],
)
def test_house_keepers_are_known_by_executable_command_or_unit(
    executable: str, name: str, unit: str, kind: str, expected: bool
) -> None:
    assert is_housekeeper(executable, name, unit, (Use("GPU-1", kind),), AgentConfig()) is expected


@pytest.mark.parametrize(
    ("target", "node"),
    [
        ("/dev/nvidia0", "/dev/nvidia0"),
        ("/dev/nvidia12", "/dev/nvidia12"),
        ("/dev/nvidia0 (deleted)", "/dev/nvidia0"),
        ("/dev/nvidiactl", "/dev/nvidiactl"),
        ("/dev/nvidia-uvm", "/dev/nvidia-uvm"),
        ("/dev/nvidia-caps/nvidia-cap1", "/dev/nvidia-caps/nvidia-cap1"),
        ("/dev/nvidia0.log", None),
        ("/dev/nvidiafs0", None),
        ("/tmp/dev/nvidia0", None),
    ],
)
def test_the_drivers_nodes_are_told_from_other_files(target: str, node: str | None) -> None:
    match = holders._NODE.match(target)
    assert (match[0] if match else None) == node


def a_proc(root: Path, pid: int, descriptors: list[str], maps: str = "", tasks: tuple[int, ...] = ()) -> None:
    """A process as /proc shows it; `tasks`: its threads but the leader, which have what it would have."""
    for folder in (root / str(pid), *(root / str(pid) / "task" / str(task) for task in (pid, *tasks))):
        mine = not tasks or folder.name != str(pid)
        (folder / "fd").mkdir(parents=True)
        (folder / "maps").write_text(maps if mine else "")
        for number, target in enumerate(descriptors if mine else []):
            (folder / "fd" / str(number)).symlink_to(target)


def test_nodes_are_found_open_mapped_and_behind_a_dead_leader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holders, "PROC", tmp_path)
    filler = "7f00-7f01 rw-p 00000000 00:00 0 \n" * 40_000  # longer than what is read at a time
    mapped = filler + "7f02-7f03 rw-s 00000000 00:06 1 /dev/nvidia3\n" + filler
    a_proc(tmp_path, 1, ["/dev/null"])
    a_proc(tmp_path, 2, ["/dev/null", "/dev/nvidiactl", "/dev/nvidia0"])
    a_proc(tmp_path, 3, ["/dev/null"], maps=mapped)
    a_proc(tmp_path, 4, ["/dev/nvidia1"], tasks=(5, 6))
    a_proc(tmp_path, 7, [])
    (tmp_path / "self").symlink_to("2")
    (tmp_path / "8").mkdir()  # ends while we look
    found, unseen = holders.open_nodes()
    assert found == {2: {"/dev/nvidiactl", "/dev/nvidia0"}, 3: {"/dev/nvidia3"}, 4: {"/dev/nvidia1"}}
    assert unseen == 0


def test_an_entry_that_may_not_be_read_is_counted_and_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holders, "PROC", tmp_path)
    for pid in (1, 2, 3):
        a_proc(tmp_path, pid, ["/dev/nvidia0"])
    real = os.open

    def guarded(path: object, flags: int, *rest: object, **more: object) -> int:
        if str(path) == f"{tmp_path}/2/fd":
            raise PermissionError(13, "Permission denied", path)
        return real(path, flags, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(holders.os, "open", guarded)
    found, unseen = holders.open_nodes()
    assert (set(found), unseen) == ({1, 3}, 1)


def test_both_sides_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        monkeypatch.setattr(holders, "open_nodes", lambda: ({child.pid: {"/dev/nvidia1", "/dev/nvidiactl"}}, 3))
        listed = GpuProcess(child.pid, "compute", 5)
        reading = Reading(
            (
                Gpu(0, "GPU-a", minor=0, processes=(listed, GpuProcess(2**22 + 1, "mps", None))),
                Gpu(4, "GPU-b", minor=1),
            )
        )
        found, unseen = find_holders(reading, AgentConfig())
    finally:
        child.kill()
        child.wait()
    by_pid = {holder.pid: holder for holder in found}
    assert unseen == 3
    assert set(by_pid[child.pid].uses) == {Use("GPU-a", "compute", 5), Use("GPU-b", "open")}
    assert by_pid[child.pid].user
    assert "input()" in by_pid[child.pid].command
    assert by_pid[child.pid].ticks > 0
    assert by_pid[2**22 + 1].state == "gone"


def test_a_thread_that_lives_on_makes_a_zombie_a_holder() -> None:
    program = "import ctypes, threading, time, sys\n"
    program += "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    program += "print(flush=True); ctypes.CDLL(None).syscall(60, 0)"
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        deadline = os.times().elapsed + 10
        while "zombie" not in Path(f"/proc/{child.pid}/status").read_text():
            assert os.times().elapsed < deadline
        holder = holders.describe(child.pid, (), (), AgentConfig())
    finally:
        child.kill()
        child.wait()
    assert holder.alive
    assert holder.state == "sleeping"


def test_a_line_says_what_is_known_and_nothing_that_is_not() -> None:
    assert Holder(41, ()).line() == "pid 41"
    assert "not seen from here" in Holder(41, (), state="gone").line()
    assert "pid 7 inside" in Holder(41, (), user="u", command="c", inner_pid=7).line()


def test_a_command_with_lines_is_told_in_one() -> None:
    program = [sys.executable, "-u", "-c", "\n\nprint()\ninput()\n"]
    child = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    try:
        child.stdout.readline()  # before it runs, the kernel tells nothing
        told = holders.describe(child.pid, (), (), AgentConfig()).line()
    finally:
        child.kill()
        child.communicate()
    assert "print() input()" in told
    assert "\n" not in told


def test_this_process_is_no_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holders, "open_nodes", lambda: ({os.getpid(): {"/dev/nvidia0"}}, 0))
    assert find_holders(Reading((Gpu(0, "GPU-a", minor=0),)), AgentConfig()) == ((), 0)


# The name that `ps` shows, and an argument: bytes that are no UTF-8, and words that a terminal obeys.
DISGUISED = r"""
import ctypes, sys
ctypes.CDLL(None).prctl(15, b"\xff\xfe\x1b[2J", 0, 0, 0)
print(flush=True)
sys.stdin.read()
"""


def test_a_process_with_a_name_that_is_no_text_is_told_as_text_that_does_nothing_to_a_terminal(
    tmp_path: Path,
) -> None:
    (tmp_path / "x.py").write_text(DISGUISED)
    program = [sys.executable, "x.py", b"\xff\x1b[31mred"]
    child = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tmp_path)
    assert child.stdout is not None
    try:
        child.stdout.readline()
        holder = holders.describe(child.pid, (), (), AgentConfig())
    finally:
        child.kill()
        child.communicate()
    assert holder.ticks > 0
    assert holder.command.endswith(" x.py ??[31mred")
    assert holder.line().isprintable()
