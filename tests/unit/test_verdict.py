"""What is said of GPUs, and which of them a run gets, for every state of a node."""

import time
from dataclasses import replace

import pytest
from dflash_agent.gpus import Gpu, GpuProcess, Reading
from dflash_agent.holders import Holder
from dflash_agent.leases import Lease
from dflash_agent.verdict import Snapshot, choose, find, judge, judge_in_use
from dflash_agent.xids import Xid
from nodes import GIB, RESERVED, UNIT, a_gpu, a_holder, a_node, on


def codes(snapshot: Snapshot, gpu: Gpu, severity: str = "refuse", unit: str = "") -> list[str]:
    return [finding.code for finding in judge(snapshot, gpu, unit) if finding.severity == severity]


def test_a_gpu_whose_used_memory_is_all_the_drivers_is_clean() -> None:
    gpu = a_gpu()
    assert codes(a_node(gpu), gpu) == []
    assert [finding.severity for finding in judge(a_node(gpu), gpu)] == ["ok"]


def test_a_compute_process_is_named_with_pid_user_command_age_and_bytes() -> None:
    gpu = a_gpu(held=55 * GIB)
    node = a_node(gpu, holders=(a_holder(41, on(gpu, count=55 * GIB), place="session-3.scope"),))
    (finding,) = [f for f in judge(node, gpu) if f.severity == "refuse"]
    assert finding.code == "gpu-busy"
    assert (finding.gpu, finding.pid) == (gpu.uuid, 41)
    for part in ("GPU 0", "55.0 GiB", "pid 41", "ada", "python train.py", "session-3.scope", "2 h"):
        assert part in finding.text
    assert finding.hint == "sudo kill 41"


def test_a_holder_in_a_service_is_stopped_as_a_service() -> None:
    gpu = a_gpu(held=GIB)
    node = a_node(gpu, holders=(a_holder(41, on(gpu, count=GIB), unit="jupyter.service"),))
    assert [f.hint for f in judge(node, gpu) if f.code == "gpu-busy"] == ["sudo systemctl stop jupyter.service"]


def test_a_size_that_the_driver_does_not_tell_is_no_reason_to_call_a_gpu_clean() -> None:
    gpu = a_gpu(held=GIB)
    node = a_node(gpu, holders=(a_holder(41, on(gpu, count=None)),))
    assert codes(node, gpu) == ["gpu-busy"]


def test_an_mps_client_is_dirt_and_the_mps_server_is_not() -> None:
    gpu = a_gpu(held=GIB)
    server = a_holder(40, on(gpu, count=30 << 20), housekeeper=True)
    client = a_holder(41, on(gpu, "mps", GIB - (30 << 20)))
    assert codes(a_node(gpu, holders=(server,)), replace(gpu, used=RESERVED + (30 << 20))) == []
    assert codes(a_node(gpu, holders=(server, client)), gpu) == ["gpu-busy"]


@pytest.mark.parametrize("kind", ["compute", "graphics", "open"])
def test_house_keepers_are_never_dirt(kind: str) -> None:
    gpu = a_gpu(held=300 << 20)
    keeper = a_holder(41, on(gpu, kind, 300 << 20 if kind != "open" else None), housekeeper=True)
    clean = gpu if kind != "open" else a_gpu()
    assert codes(a_node(clean, holders=(keeper,)), clean) == []
    assert codes(a_node(clean, holders=(keeper,)), clean, "warn") == []


def test_the_live_child_of_a_dead_parent_is_the_holder() -> None:
    gpu = a_gpu(held=8 * GIB)
    dead = a_holder(41, on(gpu, count=8 * GIB), state="zombie")
    child = a_holder(57, on(gpu, "open"))
    (finding,) = [f for f in judge(a_node(gpu, holders=(dead, child)), gpu) if f.severity == "refuse"]
    assert (finding.code, finding.pid) == ("gpu-held", 57)
    assert "8.0 GiB" in finding.text


def test_memory_of_a_process_that_is_not_seen_is_unexplained_with_its_size() -> None:
    gpu = a_gpu(held=8 * GIB)
    gone = Holder(4711, (on(gpu, count=8 * GIB),), state="gone")
    (finding,) = [f for f in judge(a_node(gpu, holders=(gone,)), gpu) if f.severity == "refuse"]
    assert finding.code == "gpu-memory-unexplained"
    assert "8.0 GiB" in finding.text
    assert "pid 4711" in finding.text


def test_memory_that_nobody_is_listed_for_is_unexplained() -> None:
    gpu = a_gpu(held=3 * GIB)
    assert codes(a_node(gpu), gpu) == ["gpu-memory-unexplained"]


def test_a_zombie_whose_memory_is_back_is_no_holder() -> None:
    gpu = a_gpu()
    dead = a_holder(41, on(gpu, count=8 * GIB), state="zombie")
    assert codes(a_node(gpu, holders=(dead,)), gpu) == []


def test_an_open_device_node_without_memory_is_told_and_does_not_refuse() -> None:
    gpu = a_gpu()
    node = a_node(gpu, holders=(a_holder(57, on(gpu, "open")),))
    assert codes(node, gpu) == []
    assert codes(node, gpu, "warn") == ["gpu-held"]


def test_a_process_that_computes_on_one_gpu_and_only_has_the_node_of_another_open_is_not_dirt_there() -> None:
    first, second = a_gpu(0, held=GIB), a_gpu(1)
    node = a_node(first, second, holders=(a_holder(41, on(first, count=GIB), on(second, "open")),))
    assert codes(node, first) == ["gpu-busy"]
    assert codes(node, second) == codes(node, second, "warn") == []


def test_an_open_node_is_dirt_where_the_driver_does_not_tell_the_memory() -> None:
    gpu = a_gpu(used=None, reserved=None)
    assert codes(a_node(gpu, holders=(a_holder(57, on(gpu, "open")),)), gpu) == ["gpu-held"]


def test_a_driver_without_the_second_memory_struct_is_judged_by_its_lists() -> None:
    gpu = a_gpu(reserved=None)
    assert codes(a_node(gpu), gpu) == []
    assert codes(a_node(gpu, holders=(a_holder(41, on(gpu, count=GIB)),)), gpu) == ["gpu-busy"]


def test_a_driver_that_tells_neither_memory_nor_processes_is_told() -> None:
    gpu = a_gpu(used=None, reserved=None, lists_whole=False)
    assert codes(a_node(gpu), gpu, "warn") == ["gpu-memory-unexplained"]


def test_a_holder_in_the_kernel_is_said_to_need_a_reboot() -> None:
    gpu = a_gpu(held=GIB)
    node = a_node(gpu, holders=(a_holder(41, on(gpu, count=GIB), state="disk-sleep"),))
    (finding,) = [f for f in judge(node, gpu) if f.code == "gpu-busy"]
    assert "reboot" in finding.hint
    assert "disk-sleep" in finding.text


@pytest.mark.parametrize(
    ("changes", "code", "severity"),
    [
        ({"lost": "GPU is lost"}, "gpu-lost", "refuse"),
        ({"mig": True}, "gpu-mig", "refuse"),
        ({"compute_mode": "prohibited"}, "gpu-compute-mode", "refuse"),
        ({"remap_failed": True}, "gpu-ecc", "refuse"),
        ({"ecc_uncorrected": 2}, "gpu-ecc", "warn"),
        ({"remap_pending": True}, "gpu-remap-pending", "warn"),
        ({"throttles": ("hardware slowdown",)}, "gpu-throttled", "warn"),
        ({"recovery": "GPU reset"}, "gpu-xid", "refuse"),
    ],
)
def test_each_state_of_a_gpu_has_its_code(changes: dict[str, object], code: str, severity: str) -> None:
    gpu = a_gpu(**changes)
    found = [f for f in judge(a_node(gpu), gpu) if f.code != "gpu"]
    assert [(f.code, f.severity) for f in found] == [(code, severity)]
    assert found[0].hint
    assert "\n" not in found[0].line()


@pytest.mark.parametrize(
    "changes",
    [
        {"mig": False, "compute_mode": "default", "ecc_uncorrected": 0, "remap_pending": False, "throttles": ()},
        {"compute_mode": "exclusive process"},
        {"recovery": "drain peer-to-peer traffic"},
        {"recovery": None, "name": "", "total": None},
    ],
)
def test_what_is_good_or_unknown_is_no_finding(changes: dict[str, object]) -> None:
    gpu = a_gpu(**changes)
    assert [f.code for f in judge(a_node(gpu), gpu)] == ["gpu"]


def test_a_fatal_xid_is_told_and_an_applications_own_is_not() -> None:
    gpu, other = a_gpu(0), a_gpu(1)
    node = a_node(gpu, other, xids=(Xid("0000:01:00", 79, time.time() - 60), Xid("0000:01:00", 13, time.time())))
    assert codes(node, gpu, "warn") == ["gpu-xid"]
    assert codes(node, other, "warn") == []


def test_a_lease_of_another_unit_refuses_and_ones_own_does_not() -> None:
    gpu = a_gpu()
    theirs = a_node(gpu, leases={gpu.uuid: Lease(gpu.uuid, "dflash-train@run2.service", time.time())})
    ours = a_node(gpu, leases={gpu.uuid: Lease(gpu.uuid, UNIT, time.time())})
    assert codes(theirs, gpu, unit=UNIT) == ["gpu-leased"]
    assert codes(ours, gpu, unit=UNIT) == []


def test_auto_takes_clean_gpus_in_the_order_of_the_bus() -> None:
    busy, free, later = a_gpu(0, held=GIB), a_gpu(1), a_gpu(2)
    node = a_node(busy, free, later)
    assert choose(node, "auto", 1, UNIT).gpus == (free,)
    assert choose(node, "auto", 2, UNIT).gpus == (free, later)
    short = choose(node, "auto", 3, UNIT)
    assert short.gpus == ()
    assert [f.code for f in short.refusals] == ["gpu-memory-unexplained"]


def test_auto_stays_with_the_gpu_that_the_unit_has() -> None:
    node = a_node(a_gpu(0), a_gpu(1), leases={"GPU-0001": Lease("GPU-0001", UNIT, time.time())})
    assert [gpu.index for gpu in choose(node, "auto", 1, UNIT).gpus] == [1]


def test_auto_leaves_a_lost_gpu_for_a_clean_one() -> None:
    lease = {"GPU-0000": Lease("GPU-0000", UNIT, time.time())}
    node = a_node(a_gpu(0, lost="GPU is lost"), a_gpu(1), leases=lease)
    assert [gpu.index for gpu in choose(node, "auto", 1, UNIT).gpus] == [1]


def test_more_gpus_than_there_are_is_said_with_both_numbers() -> None:
    choice = choose(a_node(a_gpu(0)), "auto", 2, UNIT)
    assert [f.code for f in choice.refusals] == ["gpu-missing"]
    assert "2 GPUs are wanted and the machine has 1" in choice.refusals[0].text


@pytest.mark.parametrize("name", ["1", "GPU-0001", "00000000:02:00.0", "0000:02:00.0", "02:00.0", "02:00"])
def test_a_gpu_is_named_by_index_uuid_or_bus_id(name: str) -> None:
    node = a_node(a_gpu(0), a_gpu(1))
    assert [gpu.index for gpu in choose(node, name, 1, UNIT).gpus] == [1]


def test_indices_are_the_drivers_and_may_have_gaps() -> None:
    reading = Reading((a_gpu(3), a_gpu(5)))
    assert find(reading, "0") is None
    assert find(reading, "5") == a_gpu(5)


def test_the_beginning_of_a_uuid_names_a_gpu_only_if_it_is_one() -> None:
    reading = Reading((a_gpu(0), a_gpu(1)))
    assert find(reading, "GPU-00") is None
    assert find(reading, "GPU-0001") == a_gpu(1)


def test_named_gpus_are_all_taken_once_and_in_order() -> None:
    node = a_node(a_gpu(0), a_gpu(1), a_gpu(2))
    assert [gpu.index for gpu in choose(node, "2,0,GPU-0002", 1, UNIT).gpus] == [2, 0]


def test_a_named_gpu_that_is_not_there_is_missing_and_the_known_ones_are_told() -> None:
    choice = choose(a_node(a_gpu(0)), "GPU-beef", 1, UNIT)
    assert [f.code for f in choice.refusals] == ["gpu-missing"]
    assert "GPU-0000" in choice.refusals[0].hint
    assert not choice.hopeless


def test_settings_are_hopeless_and_holders_are_not() -> None:
    assert choose(a_node(a_gpu(0, mig=True)), "auto", 1, UNIT).hopeless
    assert choose(a_node(a_gpu(0, mig=True), a_gpu(1, held=GIB)), "0,1", 1, UNIT).hopeless
    assert not choose(a_node(a_gpu(0, mig=True), a_gpu(1, held=GIB)), "auto", 1, UNIT).hopeless
    assert not choose(a_node(a_gpu(0, lost="GPU is lost")), "0", 1, UNIT).hopeless


def test_a_machine_without_gpus_trains_on_the_cpu_and_one_without_a_driver_does_not() -> None:
    away = Reading((), problem="Driver Not Loaded")
    assert choose(Snapshot(away), "auto", 1, UNIT).refusals == ()
    for devices, hardware in (("auto", True), ("0", False), ("GPU-0000", True)):
        choice = choose(Snapshot(away, hardware=hardware), devices, 1, UNIT)
        assert [f.code for f in choice.refusals] == ["driver-missing"]
        assert "Driver Not Loaded" in choice.refusals[0].text
    assert choose(Snapshot(away, hardware=True), "none", 1, UNIT).refusals == ()


def test_a_driver_that_finds_none_of_the_machines_gpus_is_no_reason_for_the_cpu() -> None:
    choice = choose(Snapshot(Reading((), driver="580"), hardware=True), "auto", 1, UNIT)
    assert [f.code for f in choice.refusals] == ["gpu-missing"]


def test_every_refusal_fits_a_line_and_says_what_to_do() -> None:
    gpu = a_gpu(0, held=9 * GIB, mig=True, compute_mode="prohibited", recovery="node reboot", remap_failed=True)
    node = a_node(
        gpu,
        holders=(a_holder(1, on(gpu, count=GIB)), a_holder(2, on(gpu, "open"))),
        leases={gpu.uuid: Lease(gpu.uuid, "", 0.0)},
        xids=(Xid("0000:01:00", 74, time.time()),),
    )
    found = [f for f in judge(node, gpu, UNIT) if f.severity == "refuse"]
    assert len({f.code for f in found}) == len(found) == 7
    for finding in found:
        assert finding.hint
        assert "\n" not in finding.line()


def test_processes_that_nvml_lists_twice_count_once() -> None:
    process = GpuProcess(41, "compute", GIB)
    gpu = a_gpu(held=GIB, processes=(process, GpuProcess(41, "graphics", GIB)))
    node = a_node(gpu, holders=(a_holder(41, on(gpu, count=GIB)),))
    assert codes(node, gpu) == ["gpu-busy"]


def test_on_a_node_that_works_a_runs_own_processes_are_no_dirt_and_others_are() -> None:
    gpu = a_gpu(held=8 * GIB)
    lease = {gpu.uuid: Lease(gpu.uuid, UNIT, time.time())}
    own = a_holder(41, on(gpu, count=8 * GIB), unit=UNIT)
    worker = a_holder(42, on(gpu, "open"), unit=UNIT)
    node = a_node(gpu, leases=lease, holders=(own, worker))
    (finding,) = judge_in_use(node, gpu)
    assert finding.severity == "ok"
    assert UNIT in finding.text
    crowded = a_gpu(held=9 * GIB)
    other = a_holder(43, on(crowded, count=GIB))
    found = list(judge_in_use(a_node(crowded, leases=lease, holders=(own, other)), crowded))
    assert [(f.code, f.pid) for f in found if f.severity == "refuse"] == [("gpu-busy", 43)]
    assert codes(node, gpu, unit=UNIT) == ["gpu-busy"]  # before its next start its own leftovers are dirt
