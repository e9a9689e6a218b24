"""States of a node's GPUs, for tests of what is said of them."""

import time
from dataclasses import replace

from dflash_agent.gpus import Gpu, Reading
from dflash_agent.holders import Holder, Use
from dflash_agent.verdict import Snapshot

GIB = 1 << 30
RESERVED = 615 << 20
UNIT = "dflash-train@run1.service"


def a_gpu(index: int = 0, held: int = 0, **changes: object) -> Gpu:
    """A clean H200, or one with a difference."""
    values: dict[str, object] = {
        "index": index,
        "uuid": f"GPU-{index:04x}",
        "bus_id": f"00000000:{index + 1:02X}:00.0",
        "name": "NVIDIA H200",
        "minor": index,
        "total": 140 * GIB,
        "used": RESERVED + held,
        "reserved": RESERVED,
        "recovery": "none",
    }
    return Gpu(**(values | changes))  # type: ignore[arg-type]


def a_holder(pid: int, *uses: Use, **changes: object) -> Holder:
    """A process of somebody's that is alive."""
    values: dict[str, object] = {
        "user": "ada",
        "uid": 1000,
        "command": "python train.py",
        "state": "sleeping",
        "started": time.time() - 7200,
        "ticks": 1,
    }
    return Holder(pid, uses, **(values | changes))  # type: ignore[arg-type]


def on(gpu: Gpu, kind: str = "compute", count: int | None = None) -> Use:
    """What a process has of a GPU."""
    return Use(gpu.uuid, kind, count)


def a_node(*gpus: Gpu, **changes: object) -> Snapshot:
    """A node with a driver and these GPUs."""
    return replace(Snapshot(Reading(gpus, driver="580.95.05"), hardware=True), **changes)  # type: ignore[arg-type]
