"""Reading GPUs through the real binding, above a stand-in for the driver's library."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from dflash_agent import gpus
from dflash_agent.gpus import Gpu, GpuProcess, Reading, parse, read
from nvml.standin import GIB, RESERVED, append_xid, compile_library, h200, write_state

State = Callable[..., Path]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the stand-in."""
    directory = tmp_path_factory.mktemp("nvml")
    compile_library(directory, directory / "state")
    return directory


@pytest.fixture
def state(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> State:
    """Sets what the driver reports, for this process's children."""
    path = tmp_path / "state"
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library))
    monkeypatch.setenv("DFLASH_STANDIN_NVML", str(path))

    def report(*cards: Mapping[str, object], **general: object) -> Path:
        write_state(path, cards, **general)
        return path

    return report


def test_everything_that_the_driver_tells_is_read(state: State) -> None:
    state(h200(0, 8 * GIB, compute="41:8589934592", graphics="42:none", mps="43:1024", utilization=97))
    reading = read()
    assert reading.problem == ""
    assert reading.driver == "580.95.05"
    (gpu,) = reading.gpus
    assert gpu == Gpu(
        index=0,
        uuid="GPU-00000000-0000-4000-8000-000000000000",
        bus_id="00000000:01:00.0",
        name="NVIDIA H200",
        minor=0,
        total=140 * GIB,
        used=8 * GIB + RESERVED,
        reserved=RESERVED,
        processes=(
            GpuProcess(41, "compute", 8 * GIB),
            GpuProcess(42, "graphics", None),
            GpuProcess(43, "mps", 1024),
        ),
        mig=False,
        compute_mode="default",
        ecc_uncorrected=0,
        remap_pending=False,
        remap_failed=False,
        throttles=(),
        recovery="none",
        utilization=97,
        temperature=33,
        power=76.0,
    )
    assert gpu.held == 8 * GIB


def test_eight_gpus_come_in_the_order_of_the_bus(state: State) -> None:
    cards = [h200(i) for i in range(8)]
    cards[0]["bus_id"], cards[7]["bus_id"] = "00000000:F0:00.0", "00000000:00:05.0"
    state(*cards)
    assert [gpu.index for gpu in read().gpus] == [7, 1, 2, 3, 4, 5, 6, 0]


@pytest.mark.parametrize(
    ("call", "field"),
    [
        ("nvmlDeviceGetName", "name"),
        ("nvmlDeviceGetMinorNumber", "minor"),
        ("nvmlDeviceGetMigMode", "mig"),
        ("nvmlDeviceGetComputeMode", "compute_mode"),
        ("nvmlDeviceGetTotalEccErrors", "ecc_uncorrected"),
        ("nvmlDeviceGetRemappedRows", "remap_pending"),
        ("nvmlDeviceGetCurrentClocksEventReasons", "throttles"),
        ("nvmlDeviceGetFieldValues", "recovery"),
        ("nvmlDeviceGetTemperature", "temperature"),
        ("nvmlDeviceGetUtilizationRates", "utilization"),
        ("nvmlDeviceGetPowerUsage", "power"),
    ],
)
@pytest.mark.parametrize("code", [3, 4, 13, 999])  # not supported, not permitted, not in this driver, unknown
def test_a_call_that_fails_leaves_one_value_unknown_and_no_more(
    state: State, call: str, field: str, code: int
) -> None:
    state(h200(0))
    whole = read().gpus[0]
    state(h200(0, **{f"error.{call}": code}))
    gpu = read().gpus[0]
    differing = [name for name in Gpu.__slots__ if getattr(gpu, name) != getattr(whole, name)]
    assert differing in ([field], [field, "remap_failed"])
    assert not getattr(gpu, field)


def test_without_the_second_struct_the_memory_of_processes_is_unknown(state: State) -> None:
    state(h200(0, GIB, **{"error.nvmlDeviceGetMemoryInfo_v2": 13}))
    (gpu,) = read().gpus
    assert gpu.used == GIB + RESERVED
    assert gpu.reserved is None
    assert gpu.held is None


def test_an_older_drivers_process_list_is_used(state: State) -> None:
    state(h200(0, GIB, compute="41:none", **{"error.nvmlDeviceGetComputeRunningProcesses_v3": 13}))
    (gpu,) = read().gpus
    assert gpu.processes == (GpuProcess(41, "compute", None),)
    assert gpu.lists_whole


def test_a_driver_without_process_lists_is_told_apart_from_one_with_none(state: State) -> None:
    calls = ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2")
    state(h200(0, **{f"error.{call}": 3 for call in calls}))
    assert not read().gpus[0].lists_whole


@pytest.mark.parametrize("change", [{"lost": 1}, {"handle.error": 15}, {"error.nvmlDeviceGetMemoryInfo_v2": 15}])
def test_a_lost_gpu_does_not_hide_the_others(state: State, change: dict[str, object]) -> None:
    state(h200(0), h200(1, **change), h200(2))
    reading = read()
    assert [gpu.index for gpu in reading.gpus if gpu.lost] == [1]
    assert len([gpu for gpu in reading.gpus if not gpu.lost]) == 2


def test_a_driver_that_is_not_loaded_is_said_to_be(state: State) -> None:
    state(h200(0)).unlink()
    assert read() == Reading((), problem="Driver Not Loaded")


def test_a_library_of_another_version_is_said_to_be(state: State) -> None:
    state(h200(0), **{"init.error": 18})
    assert "mismatch" in read().problem


def test_a_machine_without_the_library_is_said_to_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    if read().problem == "":
        pytest.skip("this machine has a driver")
    assert "Not Found" in read().problem


def test_a_driver_that_blocks_does_not_block_the_reader(state: State) -> None:
    state(h200(0), hang=1)
    assert "did not answer within" in read(deadline=0.5).problem


def test_numbers_that_nobody_knows_are_shown_as_numbers(state: State) -> None:
    state(h200(0, compute_mode=9, recovery=77))
    (gpu,) = read().gpus
    assert (gpu.compute_mode, gpu.recovery) == ("number 9", "number 77")


def test_throttling_that_matters_is_named(state: State) -> None:
    state(h200(0, throttle=0x01 | 0x04 | 0x08 | 0x40))  # idle and power cap are everyday
    assert read().gpus[0].throttles == ("hardware slowdown", "hardware thermal slowdown")


def test_a_reading_survives_its_trip_through_json(state: State) -> None:
    path = state(h200(0, GIB, compute="41:none"), h200(1, lost=1))
    done = subprocess.run(
        [sys.executable, "-m", "dflash_agent.gpus"],
        env=os.environ | {"PYTHONPATH": str(Path(gpus.__file__).parent.parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert parse(done.stdout) == read()
    assert len(json.loads(done.stdout)["gpus"]) == 2
    assert path.exists()


@pytest.mark.parametrize("text", ["", "{}", '{"gpus": [{}]}', "null", '{"gpus": [], "driver": ""}'])
def test_a_child_that_fails_gives_a_problem_and_no_crash(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(gpus.sys, "executable", "/bin/sh")
    monkeypatch.setattr(gpus.subprocess, "Popen", _saying(text))
    assert "reading the GPUs failed" in read().problem


def _saying(text: str) -> Callable[..., "subprocess.Popen[str]"]:
    real = subprocess.Popen

    def start(_command: list[str], **options: object) -> "subprocess.Popen[str]":
        return real(["printf", "%s", text], **options)  # type: ignore[call-overload, no-any-return]

    return start


def test_events_come_once_and_in_order_after_the_set_was_made(state: State) -> None:
    path = state(h200(0), h200(1))
    append_xid(path, 0, 13)
    program = """
import sys, pynvml
from pathlib import Path
from nvml.standin import append_xid
pynvml.nvmlInit()
events = pynvml.nvmlEventSetCreate()
for i in range(2):
    pynvml.nvmlDeviceRegisterEvents(pynvml.nvmlDeviceGetHandleByIndex(i), 8, events)
path = Path(sys.argv[1])
append_xid(path, 1, 79)
append_xid(path, 0, 31)
for _ in range(2):
    event = pynvml.nvmlEventSetWait(events, 5000)
    print(pynvml.nvmlDeviceGetIndex(event.device), event.eventData)
try:
    pynvml.nvmlEventSetWait(events, 50)
except pynvml.NVMLError_Timeout:
    print("none")
"""
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", program, path], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[:3] == ["1 79", "0 31", "none"]
