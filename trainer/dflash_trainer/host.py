"""What of the host this process may use: a GPU, memory, a place for caches.

Source: proc(5), cgroups(7), the kernel's cgroup-v2; systemd.exec(5), the XDG Base Directory Specification.
"""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_trainer.errors import CannotStart
from dflash_trainer.journal import WARNING, log

if TYPE_CHECKING:
    import torch

MEMINFO, CGROUP, CGROUPS = Path("/proc/meminfo"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def choose_device() -> "torch.device":
    """The first of the GPUs that this process was given, or the CPU.

    Raises CannotStart if it was given some (CUDA_VISIBLE_DEVICES) and torch cannot use them, as with a driver that
    is too old. A torch that was built without CUDA is only told of: whoever installed it may want the CPU.
    """
    import torch

    if torch.cuda.is_available():
        return torch.device("cuda")
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if given and torch.version.cuda is None:
        log(
            f"torch {torch.__version__} is built without CUDA: the CPU does the work, and {given} none; the "
            f"runtime for GPUs is in dflash-wheelhouse-cuda",
            event="no-cuda",
            priority=WARNING,
        )
    elif given:
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
            reason = "CUDA finds none"
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
        raise CannotStart(
            f"torch {torch.__version__} for CUDA {torch.version.cuda} cannot use {given}: {reason}; update the "
            f'driver (nvidia-smi names it), or set devices = "none" in [preflight] to train on the CPU'
        )
    return torch.device("cpu")


def free_memory() -> tuple[int, str]:
    """Bytes that can still be had without swapping, and what bounds them: the host, or a cgroup's memory.max."""
    lines = (line.split() for line in MEMINFO.read_text().splitlines())
    host = next(int(words[1]) << 10 for words in lines if words[0] == "MemAvailable:")
    bounds = [(host, "MemAvailable of the host"), *_cgroup_bounds()]
    return min(bounds)


def process_age() -> float:
    """Seconds since this process was started."""
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # field 22, in ticks
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


def cache_directory() -> Path:
    """Where what can be made again is kept between starts: the unit's CacheDirectory=, or the user's."""
    if own := os.environ.get("CACHE_DIRECTORY"):
        return Path(own.partition(":")[0])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dflash"


def _cgroup_bounds() -> list[tuple[int, str]]:
    """What each cgroup that this process is in leaves, with version 2; what it has cached on disk can be freed."""
    path = next((line[3:] for line in CGROUP.read_text().splitlines() if line.startswith("0::")), None)
    if path is None:
        return []
    found = []
    folder = CGROUPS / path.lstrip("/")
    for group in (folder, *folder.parents):
        if group == CGROUPS.parent:
            break
        try:
            limit = (group / "memory.max").read_text().strip()
            used = int((group / "memory.current").read_text())
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except OSError:  # the root has none
            continue
        if limit != "max":
            found.append((max(0, int(limit) - used + int(stat.get("file", 0))), f"memory.max of {group.name}"))
    return found
