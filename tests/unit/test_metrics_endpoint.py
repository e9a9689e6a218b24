"""The figures for Prometheus: what is told of GPUs and runs, and how it is served."""

import threading
import time
import urllib.request
from dataclasses import fields, replace
from typing import Any

import pytest
from dflash_agent import metrics
from dflash_agent.gpus import Gpu, GpuProcess, Reading
from dflash_agent.holders import Holder, Use
from dflash_agent.leases import Lease
from dflash_agent.metrics import Scrape, families, run_of
from dflash_agent.status import RunStatus
from dflash_agent.verdict import Snapshot
from dflash_agent.xids import Xid

GIB = 1 << 30
CLEAN = Gpu(
    index=0,
    uuid="GPU-a",
    bus_id="00000000:3B:00.0",
    name="NVIDIA H200",
    minor=3,
    total=140 * GIB,
    used=GIB,
    reserved=GIB,
    utilization=7,
    temperature=33,
    power=76.5,
    ecc_uncorrected=0,
)
HELD = replace(
    CLEAN,
    index=1,
    uuid="GPU-b",
    bus_id="00000000:5E:00.0",
    minor=None,
    used=3 * GIB,
    power=None,
    processes=(GpuProcess(41, "compute", 2 * GIB),),
)
HOLDER = Holder(41, (Use("GPU-b", "compute", 2 * GIB), Use("GPU-b", "open")), "alice", state="running", command="x")
SNAPSHOT = Snapshot(
    Reading((CLEAN, HELD), driver="580.95.05"),
    holders=(HOLDER,),
    leases={"GPU-b": Lease("GPU-b", "dflash-train@run1.service", 0.0)},
    xids=(Xid("0000:5e:00", 31, 0.0), Xid("0000:3b:00", 79, 0.0), Xid("0000:ff:00", 13, 0.0)),
)
TRAINING = RunStatus(
    run="run1",
    state="training",
    since=1.0,
    attempts=3,
    gpus=(1,),
    step=240,
    total_steps=1000,
    loss=2.5,
    tokens_per_s=16e3,
    eta_s=60.0,
    checkpoint="/c",
    checkpoint_time=None,
    note="",
)
UNKNOWN = {spec.name: None for spec in fields(RunStatus)}
FAILED = RunStatus(**UNKNOWN | {"run": "run2", "state": "failed (exit-code)", "note": ""})  # type: ignore[arg-type]


def figures(scrape: Scrape) -> dict[tuple[str, ...], float]:
    """Values by name and the labels that tell one sample from another."""
    found = {}
    for family in families(scrape):
        for values, value in family.samples:
            labels = dict(zip(family.labels, values, strict=True))
            names = ("gpu", "run", "state", "xid", "driver")
            found[family.name, *(labels[name] for name in names if name in labels)] = value
    return found


def test_gpus_are_told_with_what_is_on_them() -> None:
    found = figures(Scrape(SNAPSHOT, xids={("0000:5e:00", 31): 12}))
    assert found["dflash_agent_info", "580.95.05"] == 1
    assert found["dflash_gpu_memory_total_bytes", "0"] == 140 * GIB
    assert found["dflash_gpu_memory_used_bytes", "1"] == 3 * GIB
    assert found["dflash_gpu_memory_held_bytes", "1"] == 2 * GIB
    assert found["dflash_gpu_memory_reserved_bytes", "1"] == GIB
    assert (found["dflash_gpu_clean", "0"], found["dflash_gpu_clean", "1"]) == (1, 0)
    assert (found["dflash_gpu_holders", "0"], found["dflash_gpu_holders", "1"]) == (0, 1)
    assert found["dflash_gpu_leased", "1", "run1"] == 1
    assert ("dflash_gpu_leased", "0", "run1") not in found
    assert found["dflash_gpu_xid_errors_total", "1", "31"] == 12
    assert found["dflash_gpu_xid_errors_total", "0", "79"] == 1  # of the kernel's log: once at least


def test_a_gpu_with_nothing_but_the_run_that_has_leased_it_is_clean() -> None:
    trainer = replace(HOLDER, unit="dflash-train@run1.service")
    found = figures(Scrape(replace(SNAPSHOT, holders=(trainer,))))
    assert found["dflash_gpu_clean", "1"] == 1
    assert found["dflash_gpu_holders", "1"] == 1


def test_what_the_driver_does_not_tell_is_left_out() -> None:
    found = figures(Scrape(SNAPSHOT))
    assert found["dflash_gpu_power_watts", "0"] == 76.5
    assert ("dflash_gpu_power_watts", "1") not in found
    away = Scrape(Snapshot(Reading((), problem="Driver Not Loaded"), hardware=True))
    assert list(figures(away)) == [("dflash_agent_info", "")]


def test_labels_are_those_of_dcgm_exporter() -> None:
    family = next(f for f in families(Scrape(SNAPSHOT)) if f.name == "dflash_gpu_temperature_celsius")
    assert family.labels == ("gpu", "UUID", "device", "modelName", "pci_bus_id")
    assert family.samples[0] == (("0", "GPU-a", "nvidia3", "NVIDIA H200", "00000000:3B:00.0"), 33)
    assert family.samples[1][0][2] == ""


def test_runs_are_told_as_far_as_they_are_known() -> None:
    now = time.time()
    found = figures(Scrape(Snapshot(Reading(())), (replace(TRAINING, checkpoint_time=now - 90), FAILED)))
    assert found["dflash_run_state", "run1", "training"] == 1
    assert found["dflash_run_state", "run2", "failed"] == 1
    assert found["dflash_run_restarts", "run1"] == 2
    assert found["dflash_run_step", "run1"] == 240
    assert found["dflash_run_loss", "run1"] == 2.5
    assert found["dflash_run_tokens_per_second", "run1"] == 16e3
    assert found["dflash_run_checkpoint_age_seconds", "run1"] == pytest.approx(90, abs=5)
    assert [key for key in found if key[1] == "run2"] == [("dflash_run_state", "run2", "failed")]


def test_only_units_of_runs_have_a_run() -> None:
    assert run_of("dflash-train@a-1.service") == "a-1"
    assert run_of("ollama.service") == run_of("") == ""


def test_scrapes_are_answered_over_http_and_take_fresh_figures() -> None:
    pytest.importorskip("prometheus_client")
    taken: list[int] = []

    def take() -> Scrape:
        taken.append(1)
        return Scrape(SNAPSHOT, (replace(TRAINING, step=len(taken)),))

    listener = metrics.listen("127.0.0.1:0")
    threading.Thread(target=metrics.serve, args=(listener, take), daemon=True).start()
    address: Any = listener.getsockname()
    for scrape in (1, 2):
        with urllib.request.urlopen(f"http://127.0.0.1:{address[1]}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        assert f'dflash_run_step{{run="run1"}} {scrape}.0' in lines
        assert "# TYPE dflash_gpu_xid_errors_total counter" in lines
        assert "# TYPE dflash_gpu_clean gauge" in lines
        assert sum(line.startswith("dflash_gpu_leased{") and line.endswith(" 1.0") for line in lines) == 1
    with pytest.raises(OSError, match="in use"):
        metrics.listen(f"127.0.0.1:{address[1]}")
