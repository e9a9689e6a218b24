"""What NVML knows of every GPU, read by a child process with a deadline: a sick driver can block a call for good.

`python3 -m dflash_agent.gpus` prints one reading as JSON. Nothing assumes that GPUs are numbered 0 … n−1 without
gaps, that a call is supported, or that there is a driver. Source: NVML's API reference; nvidia-ml-py.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PRIVATE_BINDING = "/usr/lib/dflash-agent"  # the package's own pynvml; distributions have none, or an old one
PCI_DEVICES = Path("/sys/bus/pci/devices")
DEADLINE = 15.0  # seconds
THROTTLES = {  # clock event reasons that are no one's wish (NVML, nvmlClocksEventReasons)
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
RECOVERIES = (
    "none",
    "GPU reset",
    "node reboot",
    "drain peer-to-peer traffic",
    "drain and reset",
    "recovery of the IMEX domain",
    "bus reset",
    "system reboot",
)
COMPUTE_MODES = ("default", "exclusive thread", "prohibited", "exclusive process")
_LOST = (15, 16)  # NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that NVML lists on a GPU."""

    pid: int  # of the pid namespace of the driver's answer; may mean nothing here
    kind: str  # compute, graphics or mps
    bytes: int | None


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. Sizes in bytes; None where the driver does not say."""

    index: int  # nvidia-smi's
    uuid: str  # empty if the GPU does not even tell that
    bus_id: str = ""
    name: str = ""
    minor: int | None = None  # N of /dev/nvidiaN
    total: int | None = None
    used: int | None = None  # reserved by the driver included
    reserved: int | None = None
    processes: tuple[GpuProcess, ...] = ()
    lists_whole: bool = True  # whether NVML gave the list of compute processes
    mig: bool | None = None
    compute_mode: str | None = None
    ecc_uncorrected: int | None = None  # since the driver was loaded
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    throttles: tuple[str, ...] | None = None
    recovery: str | None = None  # what the driver asks for; "none" is good
    utilization: int | None = None  # percent
    temperature: int | None = None  # °C
    power: float | None = None  # W
    lost: str = ""  # why it cannot be used at all

    @property
    def held(self) -> int | None:
        """Bytes that processes hold: used − reserved. An idle H200 has 615 MiB used and as much reserved."""
        return None if self.used is None or self.reserved is None else self.used - self.reserved

    @property
    def label(self) -> str:
        """For people: index and bus id, which nvidia-smi takes."""
        return f"GPU {self.index} ({self.bus_id})" if self.bus_id else f"GPU {self.index}"


@dataclass(frozen=True, slots=True)
class Reading:
    """All GPUs in PCI bus order, or why there is no answer."""

    gpus: tuple[Gpu, ...]
    driver: str = ""  # its version
    problem: str = ""  # why NVML does not answer; empty if it does


def read(deadline: float = DEADLINE) -> Reading:
    """A reading by a child process. Does not raise: a driver that is away or hangs is the reading's problem."""
    path = os.pathsep.join([str(Path(__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    child = subprocess.Popen(
        [sys.executable, "-m", "dflash_agent.gpus"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": path},
        cwd="/",
        text=True,
    )
    try:
        output, errors = child.communicate(timeout=deadline)
    except subprocess.TimeoutExpired:
        child.kill()
        try:
            child.wait(1)
        except subprocess.TimeoutExpired:  # left behind; it ends when the driver answers
            return Reading((), problem=f"NVML blocks in the kernel (pid {child.pid} waits in it): reboot the node")
        return Reading((), problem=f"NVML did not answer within {deadline:.0f} s")
    try:
        return parse(output)
    except (ValueError, TypeError, KeyError):
        last = (errors.strip().splitlines() or [f"exit code {child.returncode}"])[-1]
        return Reading((), problem=f"reading the GPUs failed: {last}")


def parse(text: str) -> Reading:
    """The reading in a line of JSON. Raises ValueError, TypeError or KeyError for anything else."""
    found = json.loads(text)
    gpus = []
    for values in found["gpus"]:
        values["processes"] = tuple(GpuProcess(**process) for process in values["processes"])
        values["throttles"] = None if values["throttles"] is None else tuple(values["throttles"])
        gpus.append(Gpu(**values))
    return Reading(tuple(gpus), found["driver"], found["problem"])


def hardware_present() -> bool:
    """Whether a PCI display or 3D controller of NVIDIA's is in this machine, whatever the driver says."""
    for device in PCI_DEVICES.glob("*"):
        try:
            vendor, kind = (device / "vendor").read_text(), (device / "class").read_text()
        except OSError:
            continue
        if vendor.startswith("0x10de") and kind.startswith("0x03"):
            return True
    return False


def binding() -> Any:
    """The module pynvml, the package's own where there is one. Raises ImportError."""
    if PRIVATE_BINDING not in sys.path:
        sys.path.insert(0, PRIVATE_BINDING)
    import pynvml

    return pynvml


def ask(nvml: Any) -> Reading:
    """A reading in this process, between nvmlInit and nvmlShutdown."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Reading((), problem=str(error))
    try:
        driver = _optional(nvml, nvml.nvmlSystemGetDriverVersion) or ""
        try:
            count = nvml.nvmlDeviceGetCount()
        except nvml.NVMLError as error:
            return Reading((), driver, str(error))
        gpus = [_gpu(nvml, index) for index in range(count)]
        return Reading(tuple(sorted(gpus, key=lambda gpu: (gpu.bus_id == "", gpu.bus_id))), driver)
    finally:
        _optional(nvml, nvml.nvmlShutdown)


def _optional(nvml: Any, call: Callable[..., Any], *arguments: Any) -> Any:
    """The answer, or None: not supported, not permitted, not in this driver. Raises NVMLError for a lost GPU."""
    try:
        return call(*arguments)
    except nvml.NVMLError as error:
        if error.value in _LOST:
            raise
        return None


def _gpu(nvml: Any, index: int) -> Gpu:
    known: dict[str, Any] = {"index": index, "uuid": ""}
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        known["uuid"] = _optional(nvml, nvml.nvmlDeviceGetUUID, handle) or ""
        pci = _optional(nvml, nvml.nvmlDeviceGetPciInfo, handle)
        known["bus_id"] = _text(pci.busId) if pci else ""
        known["name"] = _text(_optional(nvml, nvml.nvmlDeviceGetName, handle) or "")
        known["minor"] = _optional(nvml, nvml.nvmlDeviceGetMinorNumber, handle)
        known |= _memory(nvml, handle)
        known |= _processes(nvml, handle)
        known |= _health(nvml, handle)
        known |= _load(nvml, handle)
    except nvml.NVMLError as error:
        known["lost"] = str(error)
    return Gpu(**known)


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _memory(nvml: Any, handle: Any) -> dict[str, Any]:
    """`used` of version 1 counts what the driver reserves, that of version 2 does not."""
    second = _optional(nvml, nvml.nvmlDeviceGetMemoryInfo, handle, nvml.nvmlMemory_v2)
    if second is not None:
        return {"total": second.total, "used": second.used + second.reserved, "reserved": second.reserved}
    first = _optional(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    return {} if first is None else {"total": first.total, "used": first.used}


def _processes(nvml: Any, handle: Any) -> dict[str, Any]:
    found: dict[tuple[int, str], GpuProcess] = {}
    whole = True
    for kind, short in (("compute", "Compute"), ("graphics", "Graphics"), ("mps", "MPSCompute")):
        listed = None
        for version in ("_v3", "_v2"):  # drivers before 510 have only the second
            call = getattr(nvml, f"nvmlDeviceGet{short}RunningProcesses{version}", None)
            listed = _optional(nvml, call, handle) if call else None
            if listed is not None:
                break
        whole &= listed is not None or kind != "compute"
        for process in listed or ():
            found[process.pid, kind] = GpuProcess(process.pid, kind, process.usedGpuMemory)
    return {"processes": tuple(found.values()), "lists_whole": whole}


def _health(nvml: Any, handle: Any) -> dict[str, Any]:
    mig = _optional(nvml, nvml.nvmlDeviceGetMigMode, handle)
    mode = _optional(nvml, nvml.nvmlDeviceGetComputeMode, handle)
    kinds = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
    rows = _optional(nvml, nvml.nvmlDeviceGetRemappedRows, handle)
    reasons = _optional(nvml, nvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
    if reasons is None:
        reasons = _optional(nvml, nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
    return {
        "mig": None if mig is None else mig[0] == nvml.NVML_DEVICE_MIG_ENABLE,
        "compute_mode": None if mode is None else _name(COMPUTE_MODES, mode),
        "ecc_uncorrected": _optional(nvml, nvml.nvmlDeviceGetTotalEccErrors, handle, *kinds),
        "remap_pending": None if rows is None else bool(rows[2]),
        "remap_failed": None if rows is None else bool(rows[3]),
        "throttles": None if reasons is None else tuple(t for bit, t in THROTTLES.items() if reasons & bit),
        "recovery": _recovery(nvml, handle),
    }


def _recovery(nvml: Any, handle: Any) -> str | None:
    values = _optional(nvml, nvml.nvmlDeviceGetFieldValues, handle, [nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
    if values is None or values[0].nvmlReturn != nvml.NVML_SUCCESS:
        return None
    return _name(RECOVERIES, values[0].value.uiVal)


def _name(names: tuple[str, ...], number: int) -> str:
    return names[number] if 0 <= number < len(names) else f"number {number}"


def _load(nvml: Any, handle: Any) -> dict[str, Any]:
    utilization = _optional(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
    milliwatts = _optional(nvml, nvml.nvmlDeviceGetPowerUsage, handle)
    return {
        "utilization": None if utilization is None else utilization.gpu,
        "temperature": _optional(nvml, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        "power": None if milliwatts is None else milliwatts / 1000,
    }


def main() -> int:
    """Prints a reading."""
    try:
        reading = ask(binding())
    except ImportError as error:
        reading = Reading((), problem=f"{error}; install package dflash-agent again")
    print(json.dumps(asdict(reading)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
