"""A stand-in for NVML beneath the real binding: builds the library, and writes the state that it reports.

Keys of the state: `driver`, `count`, `init.error`, `count.error`, `hang`, `xid.1` (`GPU:CODE`), `xid.2`, …; of each
GPU `N.uuid`, `N.name`, `N.bus_id`, `N.minor`, `N.total`, `N.used`, `N.reserved`, `N.compute`, `N.graphics`, `N.mps`
(`PID:BYTES PID:none`), `N.mig`, `N.compute_mode`, `N.ecc_uncorrected`, `N.remap`, `N.throttle`, `N.recovery`,
`N.temperature`, `N.utilization`, `N.power`, `N.lost`, `N.handle.error`, `N.error.FUNCTION`. What is not there is
Not Supported.
"""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

SOURCE = Path(__file__).with_name("nvml.c")
NAME = "libnvidia-ml.so.1"
GIB = 1 << 30
RESERVED = 615 << 20  # what the driver keeps of an idle H200


def compile_library(directory: Path, state: Path) -> Path:
    """Builds the library that reports what the file `state` says."""
    library = directory / NAME
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{NAME}", "-fvisibility=hidden"]
    subprocess.run(["cc", *flags, f'-DSTATE_FILE="{state}"', "-o", library, SOURCE], check=True)
    return library


def h200(index: int = 0, held: int = 0, **changes: object) -> dict[str, object]:
    """The state of an H200, clean but for the bytes that are held."""
    values: dict[str, object] = {
        "uuid": f"GPU-{index:08x}-0000-4000-8000-000000000000",
        "name": "NVIDIA H200",
        "bus_id": f"00000000:{index + 1:02X}:00.0",
        "minor": index,
        "total": 140 * GIB,
        "used": RESERVED + held,
        "reserved": RESERVED,
        "mig": 0,
        "compute_mode": 0,
        "ecc_uncorrected": 0,
        "remap": "0,0,0,0",
        "throttle": 0,
        "recovery": 0,
        "temperature": 33,
        "utilization": 0,
        "power": 76000,
    }
    return values | changes


def write_state(path: Path, gpus: Sequence[Mapping[str, object]], **general: object) -> None:
    """Puts a state in place at once. A value None leaves the key out."""
    keys: dict[str, object] = {"driver": "580.95.05", "count": len(gpus)} | general
    for index, gpu in enumerate(gpus):
        keys |= {f"{index}.{key}": value for key, value in gpu.items()}
    _replace(path, "".join(f"{key}={value}\n" for key, value in keys.items() if value is not None))


def append_xid(path: Path, gpu: int, xid: int) -> None:
    """Adds an Xid error of a GPU."""
    text = path.read_text()
    number = sum(line.startswith("xid.") for line in text.splitlines()) + 1
    _replace(path, f"{text}xid.{number}={gpu}:{xid}\n")


def _replace(path: Path, text: str) -> None:
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(text)
    fresh.replace(path)
