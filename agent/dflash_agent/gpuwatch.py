"""Watches the GPUs while a run has some: tells the service of Xid errors, and when somebody comes or goes.

`python3 -m dflash_agent.gpuwatch BYTES` prints a JSON line for each of these and nothing else; BYTES may be held
on a GPU without being told of. It ends with its parent, when a call does not return, and when the driver is away or
another one: then a fresh process is needed, which loads the library anew. Source: NVML's API reference, Event
Handling Methods; prctl(2); alarm(2).
"""

import ctypes
import gc
import json
import select
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from dflash_agent import gpus

LOOK_EVERY = 10  # seconds
TELL_EVERY = 1  # seconds between two batches of errors: a faulting kernel causes thousands
DEADLINE = 60  # seconds for a round; SIGALRM then ends the process, which hangs in the driver
LOST = "lost"
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Watched:
    """A GPU and its handle."""

    index: int
    uuid: str
    bus_id: str
    handle: Any
    lost: bool  # from the start


Pulse = tuple[tuple[int, ...], bool | None] | str  # pids, whether memory is held; or LOST
Tell = Callable[[dict[str, Any]], None]


def main(arguments: list[str] | None = None) -> int:
    """Watches until the parent ends or the driver does."""
    words = sys.argv[1:] if arguments is None else arguments
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.alarm(DEADLINE)
    try:
        nvml = gpus.binding()
    except ImportError as error:
        tell({"ended": f"{error}; install package dflash-agent again"})
        return 1
    gc.collect()
    libc.malloc_trim(0)  # what importing the binding took for a moment
    try:
        nvml.nvmlInit()
        watch(nvml, int(words[0]), tell)
    except nvml.NVMLError as error:
        tell({"ended": str(error)})
        return 1
    return 0


def tell(what: dict[str, Any]) -> None:
    """One line for the service."""
    print(json.dumps(what), flush=True)


def watch(nvml: Any, tolerance: int, tell: Tell) -> None:
    """Returns when the parent is gone. Raises NVMLError when a fresh process is needed."""
    found = list(watched(nvml))
    events = nvml.nvmlEventSetCreate()
    registered = [register(nvml, gpu, events) for gpu in found]
    before: list[Pulse] | None = None
    while True:
        signal.alarm(DEADLINE)
        now = [LOST if gpu.lost else pulse(nvml, gpu, tolerance) for gpu in found]
        if now != before:
            tell({"changed": True})
        if any(state == LOST and not gpu.lost for state, gpu in zip(now, found, strict=True)):
            raise nvml.NVMLError(nvml.NVML_ERROR_GPU_IS_LOST)  # the next process leaves it out
        before = now
        if parent_gone(0 if any(registered) else LOOK_EVERY):
            return
        if any(registered):
            errors = wait(nvml, events, LOOK_EVERY)
            for (key, code), count in errors.items():
                gpu = next((gpu for gpu in found if address(gpu.handle) == key), None)
                if gpu:
                    tell({"xid": code, "count": count, "index": gpu.index, "uuid": gpu.uuid, "bus_id": gpu.bus_id})
            if errors and parent_gone(TELL_EVERY):
                return


def watched(nvml: Any) -> Iterator[Watched]:
    """The GPUs, a lost one included."""
    for index in range(nvml.nvmlDeviceGetCount()):
        handle, uuid, bus_id, lost = None, "", "", False
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            bus_id = text(nvml.nvmlDeviceGetPciInfo(handle).busId)
            uuid = text(nvml.nvmlDeviceGetUUID(handle))
        except nvml.NVMLError as error:
            lost = handle is None or is_lost(nvml, error)
        yield Watched(index, uuid, bus_id, handle, lost)


def register(nvml: Any, gpu: Watched, events: Any) -> bool:
    """Whether a GPU tells of its errors: some cannot, and a lost one does not."""
    if gpu.lost:
        return False
    try:
        nvml.nvmlDeviceRegisterEvents(gpu.handle, nvml.nvmlEventTypeXidCriticalError, events)
    except nvml.NVMLError:
        return False
    return True


def pulse(nvml: Any, gpu: Watched, tolerance: int) -> Pulse:
    """Who is on a GPU and whether memory is held, as far as the driver tells."""
    try:
        pids: set[int] = set()
        for kind in ("Compute", "Graphics", "MPSCompute"):
            newest, older = (getattr(nvml, f"nvmlDeviceGet{kind}RunningProcesses_{v}") for v in ("v3", "v2"))
            listed = optional(nvml, newest, gpu.handle)
            listed = optional(nvml, older, gpu.handle) if listed is None else listed  # drivers before 510
            pids |= {process.pid for process in listed or ()}
        memory = optional(nvml, nvml.nvmlDeviceGetMemoryInfo, gpu.handle, nvml.nvmlMemory_v2)
    except nvml.NVMLError as error:
        if not is_lost(nvml, error):
            raise
        return LOST
    return tuple(sorted(pids)), None if memory is None else memory.used > tolerance


def optional(nvml: Any, call: Callable[..., Any], *arguments: Any) -> Any:
    """The answer, or None if there is none. Raises NVMLError for a lost GPU or driver."""
    away = (
        nvml.NVML_ERROR_DRIVER_NOT_LOADED,
        nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
        nvml.NVML_ERROR_UNINITIALIZED,
    )
    try:
        return call(*arguments)
    except nvml.NVMLError as error:
        if is_lost(nvml, error) or error.value in away:
            raise
        return None


def is_lost(nvml: Any, error: Any) -> bool:
    """Whether an error says that the GPU cannot be used any more."""
    return error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED)


def wait(nvml: Any, events: Any, seconds: float) -> Counter[tuple[int, int]]:
    """How often each error came, by GPU and code: the first within so many seconds and all that came with it."""
    came: Counter[tuple[int, int]] = Counter()
    milliseconds = int(seconds * 1000)
    while True:
        try:
            event = nvml.nvmlEventSetWait(events, milliseconds)
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_TIMEOUT:
                return came
            raise
        if event.eventType == nvml.nvmlEventTypeXidCriticalError:
            came[address(event.device), int(event.eventData)] += 1
        milliseconds = 0
        if came.total() >= 1000:
            return came


def address(handle: Any) -> int:
    """What tells one handle from another."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def text(value: Any) -> str:
    """A string of the binding, whose versions differ in kind."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def parent_gone(seconds: float) -> bool:
    """Whether the other end of standard input is closed, or is within so many seconds."""
    poll = select.poll()
    poll.register(sys.stdin.fileno(), select.POLLIN)
    return bool(poll.poll(seconds * 1000))


if __name__ == "__main__":
    sys.exit(main())
