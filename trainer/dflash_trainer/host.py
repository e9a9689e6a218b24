"""What of the host this process may use: memory, a place for caches.

Source: proc(5), cgroups(7), the kernel's cgroup-v2; systemd.exec(5), the XDG Base Directory Specification.
"""

import os
import time
from pathlib import Path

MEMINFO, CGROUP, CGROUPS = Path("/proc/meminfo"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


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
