"""A start on GPUs that are busy, held, lost or leased: what is refused, waited for, reaped, and told."""

import contextlib
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator

import pytest
from container import Machine
from nvml.standin import GIB, h200

from .gpus import alive, holding, install_driver, report, unload_driver, xid
from .node import journal, make_run, show, start, wait_for

CARD = "/dev/nvidia0"
IGNORING = """
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
files = [open(path, "r+b") for path in sys.argv[1:]]
print(os.getpid(), flush=True)
while True:
    signal.pause()
"""
# The parent ends and is not reaped; its child has the node.
ORPHANS = """
import os, sys, time
files = [open(path, "r+b") for path in sys.argv[1:]]
if os.fork() == 0:
    child = os.fork()
    if child:
        print(os.getpid(), child, flush=True)
        os._exit(0)
while True:
    time.sleep(60)
"""
# The leader ends and a thread lives on with the node.
LEADERLESS = """
import ctypes, os, sys, threading, time
files = [open(path, "r+b") for path in sys.argv[1:]]
threading.Thread(target=lambda: time.sleep(600), daemon=True).start()
print(os.getpid(), flush=True)
ctypes.CDLL(None).syscall(60, 0)
"""
MAPPED = """
import mmap, os, signal, sys
with open(sys.argv[1], "r+b") as file:
    file.truncate(4096)
    memory = mmap.mmap(file.fileno(), 4096)
print(os.getpid(), flush=True)
while True:
    signal.pause()
"""


@pytest.fixture(scope="module")
def gpu_node(node: Machine) -> Iterator[Machine]:
    """The shared container with a driver's library."""
    install_driver(node)
    yield node
    unload_driver(node)


@pytest.fixture
def card(gpu_node: Machine) -> Iterator[Machine]:
    """One clean GPU; runs that a test leaves are stopped."""
    report(gpu_node, h200(0))
    before = set(gpu_node.path("/etc/dflash/runs").glob("*.toml"))
    yield gpu_node
    report(gpu_node, h200(0))
    gpu_node.run("systemctl", "stop", "dflash-train@*.service")
    gpu_node.run("systemctl", "reset-failed", "dflash-train@*.service", check=False)
    unload_driver(gpu_node)
    for path in set(gpu_node.path("/etc/dflash/runs").glob("*.toml")) - before:
        path.unlink()
        shutil.rmtree(gpu_node.path(f"/var/lib/dflash/runs/{path.stem}"), ignore_errors=True)


def try_start(node: Machine, unit: str) -> bool:
    """Whether a start succeeds."""
    return node.run("systemctl", "start", unit, check=False).returncode == 0


def status(node: Machine, unit: str) -> str:
    """What `systemctl status` shows."""
    return node.run("systemctl", "status", "--no-pager", unit, check=False).stdout


def environment(node: Machine, unit: str) -> dict[str, str]:
    """The environment of a unit's main process."""
    text = node.path(f"/proc/{show(node, unit, 'MainPID')}/environ").read_text()
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)


def listed(pid: int, held: int = 8 * GIB, index: int = 0, **changes: object) -> dict[str, object]:
    """A GPU on which NVML lists a process."""
    return h200(index, held, compute=f"{pid}:{held}", **changes)


def test_a_run_on_a_clean_gpu_gets_it_by_uuid_and_gives_it_back(card: Machine) -> None:
    unit = make_run(card, "clean", max_steps=100000)
    start(card, unit)
    given = environment(card, unit)
    assert given["CUDA_VISIBLE_DEVICES"] == h200(0)["uuid"]
    assert given["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert not [name for name in given if name.startswith("LISTEN_")]
    assert show(card, unit, "NFileDescriptorStore") == "1"
    shown = json.loads(card.run("dflashctl", "check", "--json").stdout)
    assert [lease["unit"] for lease in shown["leases"].values()] == [unit]
    assert json.loads(card.run("dflashctl", "status", "clean", "--json").stdout)[0]["gpus"] == [0]
    card.run("systemctl", "stop", unit)
    assert json.loads(card.run("dflashctl", "check", "--json").stdout)["leases"] == {}
    assert "is back" in journal(card, unit)


def test_a_busy_gpu_fails_the_start_with_the_holder_in_systemctl_status(card: Machine) -> None:
    unit = make_run(card, "busy", on_dirty="fail")
    with holding(card, CARD) as pid:
        report(card, listed(pid, 55 * GIB))
        assert not try_start(card, unit)
        shown = status(card, unit)
        for part in ("gpu-busy", f"pid {pid} (root", "python3", "55.0 GiB", f"sudo kill {pid}"):
            assert part in shown
        assert "gpu-busy" in card.run("dflashctl", "status", "busy").stdout
        assert show(card, unit, "ExecMainStatus") == "78"
        assert show(card, unit, "NRestarts") == "0"
    report(card, h200(0))
    start(card, unit)


def test_a_holder_whose_size_the_driver_does_not_tell_is_in_the_way_too(card: Machine) -> None:
    unit = make_run(card, "sizeless", on_dirty="fail")
    with holding(card, CARD) as pid:
        report(card, h200(0, 8 * GIB, compute=f"{pid}:none"))
        assert not try_start(card, unit)
        assert f"memory of unknown size held by pid {pid} (root" in status(card, unit)


def test_wait_waits_says_so_and_starts_when_the_gpu_is_clean(card: Machine) -> None:
    unit = make_run(card, "waits", preflight_wait="2min")
    with holding(card, CARD) as pid:
        report(card, listed(pid))
        card.run("systemctl", "start", "--no-block", unit)
        waiting = f"waiting for clean GPUs .*pid {pid}"
        wait_for(lambda: len(re.findall(waiting, journal(card, unit))) >= 2, 60, "the journal tells twice")
        assert re.search(waiting, status(card, unit))
    report(card, h200(0))
    wait_for(lambda: show(card, unit, "ActiveState") == "active", 60, "it starts")
    assert show(card, unit, "NRestarts") == "0"


def test_wait_that_was_in_vain_is_tried_again(card: Machine) -> None:
    unit = make_run(card, "again", preflight_wait="1s")
    report(card, h200(0, 8 * GIB, compute="1:8589934592"))
    assert not try_start(card, unit)
    assert "after waiting" in journal(card, unit)
    wait_for(lambda: int(show(card, unit, "NRestarts")) >= 1, 60, "systemd tries again")
    report(card, h200(0))
    wait_for(lambda: show(card, unit, "ActiveState") == "active", 60, "it starts")


def test_a_stop_ends_a_preflight_at_once(card: Machine) -> None:
    unit = make_run(card, "stopped", preflight_wait="1h")
    report(card, h200(0, 8 * GIB))
    card.run("systemctl", "start", "--no-block", unit)
    wait_for(lambda: "waiting for clean" in journal(card, unit), 60, "it waits")
    begin = time.monotonic()
    card.run("systemctl", "stop", unit)
    assert time.monotonic() - begin < 10
    assert show(card, unit, "Result") == "success"


def test_memory_that_nobody_explains_is_waited_for_even_where_dirt_fails(card: Machine) -> None:
    """As right after `kill -9`: the memory takes a moment to come back."""
    unit = make_run(card, "settles", on_dirty="fail")
    report(card, h200(0, 8 * GIB, compute="999999:8589934592"))
    card.run("systemctl", "start", "--no-block", unit)
    wait_for(lambda: "no process explains" in journal(card, unit), 30, "it waits")
    report(card, h200(0))
    wait_for(lambda: show(card, unit, "ActiveState") == "active", 60, "it starts")


def test_memory_that_stays_unexplained_is_refused_with_its_size(card: Machine) -> None:
    unit = make_run(card, "unexplained", on_dirty="fail")
    report(card, h200(0, 3 * GIB))
    assert not try_start(card, unit)
    assert "gpu-memory-unexplained" in status(card, unit)
    assert "3.0 GiB" in status(card, unit)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"mig": 1}, "gpu-mig"),
        ({"compute_mode": 2}, "gpu-compute-mode"),
        ({"lost": 1}, "gpu-lost"),
        ({"recovery": 1}, "gpu-xid"),
        ({"remap": "0,1,0,1"}, "gpu-ecc"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_refused_with_its_code(
    card: Machine, change: dict[str, object], code: str
) -> None:
    unit = make_run(card, "unfit", on_dirty="fail")
    report(card, h200(0, **change))
    assert not try_start(card, unit)
    assert code in status(card, unit)
    assert show(card, unit, "ExecMainStatus") == "78"


def test_settings_of_a_gpu_are_not_waited_for(card: Machine) -> None:
    unit = make_run(card, "settings", preflight_wait="1h")
    report(card, h200(0, mig=1))
    assert not try_start(card, unit)
    assert show(card, unit, "ExecMainStatus") == "78"


def test_sizes_and_calls_that_the_driver_does_not_tell_are_no_obstacle(card: Machine) -> None:
    calls = ("nvmlDeviceGetMigMode", "nvmlDeviceGetComputeMode", "nvmlDeviceGetFieldValues", "nvmlDeviceGetName")
    unit = make_run(card, "silent")
    report(card, h200(0, compute=None, **{f"error.{call}": 3 for call in calls}))
    start(card, unit)


def test_a_run_that_names_a_gpu_does_not_fall_back_to_the_cpu(card: Machine) -> None:
    unit = make_run(card, "named", devices="0", on_dirty="fail")
    unload_driver(card)
    assert not try_start(card, unit)
    assert "driver-missing" in status(card, unit)
    report(card, h200(0))
    start(card, unit)


@contextlib.contextmanager
def orphan(node: Machine) -> Iterator[tuple[int, int]]:
    """A dead parent that nobody reaps, and its live child with the node open."""
    command = (
        "setpriv",
        "--reuid",
        "dflash",
        "--regid",
        "dflash",
        "--clear-groups",
        "python3",
        "-c",
        ORPHANS,
        CARD,
    )
    process = node.start(*command)
    assert process.stdout is not None
    parent, child = map(int, process.stdout.readline().split())
    ancestor = int(node.path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])
    try:
        yield parent, child
    finally:
        node.run("kill", "-KILL", str(child), str(ancestor), check=False)
        process.wait()


def test_the_child_of_a_dead_parent_is_named(card: Machine) -> None:
    unit = make_run(card, "orphan", on_dirty="fail")
    with orphan(card) as (parent, child):
        report(card, listed(parent))
        assert not try_start(card, unit)
        shown = status(card, unit)
        assert "gpu-held" in shown
        assert f"pid {child} (dflash" in shown
        assert "8.0 GiB" in shown


@pytest.mark.parametrize("program", [LEADERLESS, MAPPED], ids=["threads of a dead leader", "a mapping alone"])
def test_a_holder_that_is_hard_to_see_is_seen(card: Machine, program: str) -> None:
    with holding(card, CARD, program=program) as pid:
        report(card, h200(0, 8 * GIB))
        wait_for(
            lambda: f'"pid": {pid}' in card.run("dflashctl", "check", "--json", check=False).stdout, 10, "seen"
        )
        done = card.run("dflashctl", "check", check=False)
        assert done.returncode == 1
        assert f"pid {pid} (root" in done.stdout
        assert "gpu-held" in done.stdout


def test_a_stopped_holder_is_told_as_stopped(card: Machine) -> None:
    with holding(card, CARD) as pid:
        card.run("kill", "-STOP", str(pid))
        report(card, listed(pid))
        assert ", stopped)" in card.run("dflashctl", "check", check=False).stdout


def test_a_holder_in_another_pid_namespace_is_told_with_both_pids(card: Machine) -> None:
    apart = ("unshare", "--pid", "--fork", "--kill-child")
    with holding(card, CARD, before=apart) as inner:
        report(card, h200(0, 8 * GIB))
        assert inner == 1
        assert "pid 1 inside" in card.run("dflashctl", "check", check=False).stdout
        holder = json.loads(card.run("dflashctl", "check", "--json", check=False).stdout)["holders"][0]
        card.run("kill", "-KILL", str(holder["pid"]))


def test_house_keepers_do_not_stand_in_the_way(card: Machine) -> None:
    keeper = card.path("/usr/local/bin/nv-hostengine")
    keeper.write_bytes(card.path("/usr/bin/sleep").read_bytes())
    keeper.chmod(0o755)
    card.run("sh", "-c", f"systemd-run --quiet --unit=keeper sh -c 'exec nv-hostengine 600 <{CARD}'")
    try:
        unit = make_run(card, "kept", on_dirty="fail")
        pid = int(show(card, "keeper.service", "MainPID"))
        wait_for(
            lambda: f'"pid": {pid}' in card.run("dflashctl", "check", "--json", check=False).stdout, 10, "seen"
        )
        report(card, listed(pid, 300 << 20))
        start(card, unit)
        assert "house-keeper" in card.run("dflashctl", "check").stdout
    finally:
        card.run("systemctl", "stop", "keeper.service")


def test_the_list_of_house_keepers_is_configuration(card: Machine) -> None:
    settings = card.path("/etc/dflash/agent.toml")
    before = settings.read_text() if settings.exists() else None
    with holding(card, CARD) as pid:
        report(card, listed(pid, 300 << 20))
        assert card.run("dflashctl", "check", check=False).returncode == 1
        settings.write_text('housekeepers = ["python3"]\n')
        try:
            assert card.run("dflashctl", "check", check=False).returncode == 0
            settings.write_text('housekeeper = ["python3"]\n')
            refused = card.run("dflashctl", "check", check=False)
            assert refused.returncode == 78
            assert "did you mean housekeepers?" in refused.stderr
        finally:
            settings.unlink()
            if before is not None:
                settings.write_text(before)


def test_reap_ends_what_user_dflash_left_behind_and_starts(card: Machine) -> None:
    unit = make_run(card, "reaps", on_dirty="reap")
    with holding(card, CARD, user="dflash", program=IGNORING) as stubborn, orphan(card) as (parent, child):
        report(card, h200(0, 9 * GIB, compute=f"{stubborn}:{GIB} {parent}:{8 * GIB}"))
        card.run("systemctl", "start", "--no-block", unit)
        wait_for(lambda: not alive(card, stubborn) and not alive(card, child), 60, "both are ended")
        report(card, h200(0))
        wait_for(lambda: show(card, unit, "ActiveState") == "active", 60, "it starts")
        told = journal(card, unit)
        assert re.search(f"reap: pid {stubborn} .* ended by SIGKILL", told)
        assert re.search(f"reap: pid {child} .* ended by SIGTERM", told)


def test_reap_ends_what_sits_in_the_cgroup_of_a_dead_unit(card: Machine) -> None:
    old = make_run(card, "old")
    slice_path = show(card, "dflash.slice", "ControlGroup") or "/dflash.slice"
    root = next(r for r in ("/sys/fs/cgroup/systemd", "/sys/fs/cgroup") if card.path(r + "/system.slice").exists())
    folder = f"{root}{slice_path}/{old}"
    unit = make_run(card, "after", on_dirty="reap")
    with holding(card, CARD, user="dflash") as pid:
        card.run("sh", "-c", f"mkdir -p {folder} && echo {pid} > {folder}/cgroup.procs")
        report(card, listed(pid))
        assert old in card.run("dflashctl", "check", check=False).stdout
        card.run("systemctl", "start", "--no-block", unit)
        wait_for(lambda: not alive(card, pid), 60, "it is ended")
        report(card, h200(0))
        wait_for(lambda: show(card, unit, "ActiveState") == "active", 60, "it starts")


def test_reap_touches_neither_another_users_process_nor_a_live_unit(card: Machine) -> None:
    unit = make_run(card, "spares", on_dirty="reap", preflight_wait="1s")
    with holding(card, CARD) as roots:
        report(card, listed(roots))
        assert not try_start(card, unit)
        assert alive(card, roots)
        assert f"pid {roots}" in journal(card, unit)
    live = ("systemd-run", "--quiet", "--pipe", "--unit=live", "--property=User=dflash", "--")
    card.run("systemctl", "stop", unit)
    with holding(card, CARD, before=live) as pid:
        report(card, listed(pid))
        assert not try_start(card, unit)
        assert alive(card, pid)
        assert "reap:" not in journal(card, unit)
        assert "systemctl stop live.service" in journal(card, unit)


def test_reap_gives_up_on_what_is_started_anew(card: Machine) -> None:
    respawn = f"while :; do python3 -c 'import time; f = open(\"{CARD}\"); time.sleep(600)'; done"
    unit = make_run(card, "respawns", on_dirty="reap", preflight_wait="2s")
    keeper = card.start("setpriv", "--reuid", "dflash", "--regid", "dflash", "--clear-groups", "sh", "-c", respawn)

    def holders() -> list[dict[str, object]]:
        found = json.loads(card.run("dflashctl", "check", "--json", check=False).stdout)["holders"]
        return [holder for holder in found if holder["nodes"]]

    try:
        report(card, h200(0, 8 * GIB))
        wait_for(lambda: bool(holders()), 30, "it holds the node")
        parent = holders()[0]["parent"]
        assert not try_start(card, unit)
        assert "started anew" in journal(card, unit)
    finally:
        card.run("systemctl", "stop", unit)
        card.run("kill", "-KILL", str(parent), check=False)
        card.run("kill", "-KILL", *[str(holder["pid"]) for holder in holders()], check=False)
        keeper.wait()


def test_two_starts_at_once_get_different_gpus(card: Machine) -> None:
    report(card, h200(0), h200(1))
    units = [make_run(card, name, max_steps=100000) for name in ("twin-a", "twin-b")]
    card.run("systemctl", "start", *units)
    given = {environment(card, unit)["CUDA_VISIBLE_DEVICES"] for unit in units}
    assert given == {h200(0)["uuid"], h200(1)["uuid"]}


def test_two_starts_at_once_for_one_gpu_are_one_start_and_one_refusal(card: Machine) -> None:
    units = [make_run(card, name, max_steps=100000, on_dirty="fail") for name in ("rival-a", "rival-b")]
    card.run("systemctl", "start", *units, check=False)
    states = sorted(show(card, unit, "ActiveState") for unit in units)
    assert states == ["active", "failed"]
    loser = next(unit for unit in units if show(card, unit, "ActiveState") == "failed")
    winner = next(unit for unit in units if unit != loser)
    assert "gpu-leased" in status(card, loser)
    assert f"systemctl stop {winner}" in status(card, loser)


@pytest.mark.parametrize("name", [lambda card: str(card["uuid"]), lambda card: str(card["bus_id"]), lambda _: "1"])
def test_a_gpu_that_is_named_is_the_one(card: Machine, name: Callable[[dict[str, object]], str]) -> None:
    report(card, h200(0), h200(1), h200(2))
    unit = make_run(card, "chosen", devices=name(h200(1)), max_steps=100000)
    start(card, unit)
    assert environment(card, unit)["CUDA_VISIBLE_DEVICES"] == h200(1)["uuid"]


def test_the_lease_outlives_a_crash_of_the_trainer(card: Machine) -> None:
    report(card, h200(0), h200(1))
    unit = make_run(card, "crashes", devices="0", max_steps=100000)
    start(card, unit)
    other = make_run(card, "thief", devices="0", on_dirty="fail")
    card.run("kill", "-KILL", show(card, unit, "MainPID"))
    assert not try_start(card, other)
    assert "gpu-leased" in status(card, other)
    wait_for(lambda: show(card, unit, "ActiveState") == "active", 90, "it is restarted")
    assert environment(card, unit)["CUDA_VISIBLE_DEVICES"] == h200(0)["uuid"]
    assert show(card, unit, "NFileDescriptorStore") == "1"


def test_a_restart_leaves_a_lost_gpu_for_a_clean_one_and_its_lease_is_free(card: Machine) -> None:
    report(card, h200(0), h200(1))
    unit = make_run(card, "moves", max_steps=100000)
    start(card, unit)
    xid(card, 0, 79)
    wait_for(lambda: "Xid 79" in journal(card, unit), 30, "the service to hear of it")
    report(card, h200(0, lost=1), h200(1))
    card.run("kill", "-KILL", show(card, unit, "MainPID"))
    wait_for(lambda: int(show(card, unit, "NRestarts")) > 0, 60, "it is restarted")
    wait_for(lambda: show(card, unit, "ActiveState") == "active", 90, "it trains again")
    assert environment(card, unit)["CUDA_VISIBLE_DEVICES"] == h200(1)["uuid"]
    assert "had Xid 79 in this attempt (the GPU has fallen off the bus)" in journal(card, unit)
    assert "had Xid 79" in card.run("dflashctl", "explain", "moves").stdout
    assert show(card, unit, "NFileDescriptorStore") == "1"
    assert list(json.loads(card.run("dflashctl", "check", "--json", check=False).stdout)["leases"]) == [
        h200(1)["uuid"]
    ]
    card.path("/run/dflash/xids.jsonl").unlink()  # for the tests that follow


def test_memory_that_is_not_back_after_a_run_is_told_with_its_holder(card: Machine) -> None:
    unit = make_run(card, "leaves", max_steps=100000)
    start(card, unit)
    with holding(card, CARD) as pid:
        report(card, listed(pid))
        card.run("systemctl", "stop", unit)
        assert re.search(f"after the run, .*gpu-busy.*pid {pid}", journal(card, unit))


def test_a_configuration_fault_is_told_before_anything_is_waited_for(card: Machine) -> None:
    unit = make_run(card, "faulty", preflight_wait="1h", data_dir="/nowhere")
    report(card, h200(0, 8 * GIB))
    assert not try_start(card, unit)
    assert show(card, unit, "ExecMainStatus") == "78"
    assert "data-missing" in status(card, unit)


def test_check_and_verify_tell_the_same_and_exit_by_it(card: Machine) -> None:
    make_run(card, "verified")
    assert card.run("dflashctl", "verify", "verified").stdout.rstrip().endswith("dflash-train@verified")
    with holding(card, CARD) as pid:
        report(card, listed(pid))
        for command in (("check",), ("check", "verified"), ("verify", "verified")):
            done = card.run("dflashctl", *command, check=False)
            assert done.returncode == 1
            assert f"pid {pid}" in done.stdout
            assert "\x1b" not in done.stdout
        on_a_terminal = ("script", "--quiet", "--command", "dflashctl check", "/dev/null")
        assert "\x1b[31mrefuse" in card.run(*on_a_terminal).stdout
        assert "\x1b" not in card.run("env", "NO_COLOR=1", *on_a_terminal).stdout


def test_eight_gpus_are_shown_a_line_each_with_their_holders(card: Machine) -> None:
    with holding(card, CARD) as pid:
        report(card, *[h200(i) if i != 3 else listed(pid, index=3) for i in range(8)])
        lines = card.run("dflashctl", "check", check=False).stdout.splitlines()
    assert len([line for line in lines if "NVIDIA H200  140.0 GiB" in line]) == 8
    fourth = next(i for i, line in enumerate(lines) if line.startswith("3 "))
    assert f"pid {pid}" in lines[fourth + 1]


def test_another_user_sees_what_a_user_may_and_is_told_that_there_may_be_more(card: Machine) -> None:
    command = ("setpriv", "--reuid", "daemon", "--regid", "daemon", "--clear-groups", "dflashctl", "check")
    done = card.run(*command)
    assert "NVIDIA H200" in done.stdout
    assert "sudo dflashctl check" in done.stdout
