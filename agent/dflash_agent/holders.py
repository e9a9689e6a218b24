"""Who holds a GPU, from both sides: NVML's process lists, and every process's open and mapped /dev/nvidia* nodes.

NVML alone misses the children of a dead CUDA process (they inherit its descriptors, and its memory lives on),
and names pids of other pid namespaces; /proc alone does not know bytes. Source: proc(5), cgroups(7).
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from dflash_agent.config import AgentConfig
from dflash_agent.gpus import Reading
from dflash_agent.words import age, printable

PROC = Path("/proc")
_NODE = re.compile(r"/dev/(?:nvidia(?:\d+|ctl|-uvm|-uvm-tools|-modeset)|nvidia-caps/[\w-]+)(?= \(deleted\)|$)")
_NODE_IN_MAPS = re.compile(rb"/dev/nvidia[\w/-]*")
_NUMBERED = re.compile(r"/dev/nvidia(\d+)")
_UNIT = re.compile(r"[^/]+\.(?:service|scope)")
_CONTAINERS = (
    (re.compile(r"(docker|libpod|cri-containerd|crio)-([0-9a-f]{12})[0-9a-f]*\.scope"), r"\1 container \2"),
    (re.compile(r"/docker/([0-9a-f]{12})"), r"docker container \1"),
    (re.compile(r"/kubepods[^/]*/.*?([0-9a-f]{12})[0-9a-f]{52}"), r"kubernetes container \1"),
    (re.compile(r"machine-([^/]+)\.scope"), r"container \1"),
    (re.compile(r"/lxc(?:\.payload)?[./]([^/]+)"), r"lxc container \1"),
)
_COMM_LENGTH = 15  # the kernel cuts names of commands there
DEAD = ("zombie", "dead")
IN_KERNEL = "disk-sleep"


@dataclass(frozen=True, slots=True)
class Use:
    """What a process has of one GPU."""

    uuid: str
    kind: str  # compute, graphics, mps; or open: a device node and no context that NVML lists
    bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds GPUs. What cannot be read is empty."""

    pid: int
    uses: tuple[Use, ...]
    user: str = ""
    uid: int = -1
    command: str = ""
    state: str = ""  # psutil's word for it; "gone" if there is no such process here
    started: float = 0.0  # unix seconds
    ticks: int = 0  # the same as the kernel counts it: pid and ticks are one process for good
    unit: str = ""  # systemd's, if it is in one
    place: str = ""  # unit or container, for people
    inner_pid: int = 0  # its pid in its own namespace, if that is another one
    parent: int = 0
    housekeeper: bool = False
    nodes: tuple[str, ...] = ()

    @property
    def alive(self) -> bool:
        """Whether it can hold memory: a zombie's is being given back, unless others share it."""
        return self.state not in (*DEAD, "gone")

    def line(self, aged: bool = True) -> str:
        """For people: pid, user, command, where it runs, age and state."""
        if self.state == "gone":
            return f"pid {self.pid} (not seen from here: it has ended, or is in another container)"
        about = [self.user, self.command]
        about += [self.place] if self.place else []
        about += [f"pid {self.inner_pid} inside"] if self.inner_pid else []
        about += [f"for {age(self.started)}"] if self.started and aged else []
        about += [self.state] if self.state not in ("running", "sleeping", "idle", "") else []
        known = ", ".join(word for word in about if word)
        return f"pid {self.pid} ({known})" if known else f"pid {self.pid}"


def find_holders(reading: Reading, config: AgentConfig) -> tuple[tuple[Holder, ...], int]:
    """All holders, and how many processes could not be looked into (those of others, unless root asks)."""
    nodes, unseen = open_nodes()
    by_minor = {gpu.minor: gpu.uuid for gpu in reading.gpus if gpu.minor is not None}
    uses: dict[int, dict[str, Use]] = {}
    for gpu in reading.gpus:
        for process in gpu.processes:
            known = uses.setdefault(process.pid, {})
            before = known.get(gpu.uuid)
            if before is None or before.kind == "graphics":  # compute says more than graphics
                known[gpu.uuid] = Use(gpu.uuid, process.kind, process.bytes)
    for pid, names in nodes.items():
        known = uses.setdefault(pid, {})
        for name in names:
            match = _NUMBERED.fullmatch(name)
            uuid = by_minor.get(int(match[1])) if match else None
            if uuid is not None and uuid not in known:
                known[uuid] = Use(uuid, "open")
    skip = (os.getpid(),)
    found = [
        describe(pid, tuple(known.values()), tuple(sorted(nodes.get(pid, ()))), config)
        for pid, known in sorted(uses.items())
        if pid not in skip
    ]
    return tuple(holder for holder in found if holder.uses or holder.alive), unseen


def open_nodes() -> tuple[dict[int, set[str]], int]:
    """The /dev/nvidia* nodes that each process has open or mapped, and how many processes did not let us look."""
    found: dict[int, set[str]] = {}
    unseen = 0
    for entry in os.listdir(PROC):  # noqa: PTH208 - thousands of entries, and only their names matter
        if not entry.isdigit():
            continue
        try:
            names = set(_nodes_of(entry))
        except PermissionError:
            unseen += 1
            continue
        except OSError:  # it has ended
            continue
        if names:
            found[int(entry)] = names
    return found, unseen


def _nodes_of(pid: str) -> Iterator[str]:
    """Raises OSError if the process is gone or not ours to look into."""
    folder = f"{PROC}/{pid}"
    targets = _open(f"{folder}/fd")
    if not targets:  # the leader may be dead and its threads alive
        tasks = (task for task in os.listdir(f"{folder}/task") if task != pid)  # noqa: PTH208
        other = next(tasks, None)
        if other is not None:
            folder = f"{folder}/task/{other}"
            targets = _open(f"{folder}/fd")
    for target in targets:
        if target.startswith("/dev/nvidia") and (match := _NODE.match(target)):
            yield match[0]
    yield from _mapped(f"{folder}/maps")


def _open(folder: str) -> list[str]:
    """What each descriptor is of. Relative to the folder: that is cheaper by a fifth."""
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    targets = []
    try:
        for descriptor in os.listdir(directory):  # noqa: PTH208
            try:
                targets.append(os.readlink(descriptor, dir_fd=directory))
            except FileNotFoundError:
                continue
    finally:
        os.close(directory)
    return targets


def _mapped(path: str) -> Iterator[str]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        last = b""
        while chunk := os.read(descriptor, 1 << 13):  # the kernel gives a page at a time
            chunk = last + chunk
            if b"/dev/nvidia" in chunk:
                for name in set(_NODE_IN_MAPS.findall(chunk)):
                    match = _NODE.match(name.decode())
                    if match:
                        yield match[0]
            last = chunk[-32:]
    finally:
        os.close(descriptor)


def describe(pid: int, uses: tuple[Use, ...], nodes: tuple[str, ...], config: AgentConfig) -> Holder:
    """A holder with all that /proc tells of it."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            uid = process.uids().real
            user = process.username()
            name = process.name()
            started = process.create_time()
            state = str(process.status())
            parent = process.ppid()
        ticks = start_ticks(pid)
    except (psutil.Error, OSError):
        return Holder(pid, uses, state="gone", nodes=nodes)
    try:
        words = process.cmdline()
    except (psutil.Error, OSError):  # a dead leader has none
        words = []
    if state in DEAD:
        state = _living_thread(pid) or state
    unit, place = _cgroup(pid)
    housekeeper = is_housekeeper(_executable(pid), name, unit, uses, config)
    words[:1] = [word.rpartition("/")[2] for word in words[:1]]
    command = printable(" ".join(words)) or printable(name)  # a program given with -c has lines
    return Holder(
        pid=pid,
        uses=uses,
        user=printable(user),
        uid=uid,
        command=command if len(command) <= 60 else command[:59] + "…",
        state=state,
        started=started,
        ticks=ticks,
        unit=unit,
        place=printable(place),
        inner_pid=_inner_pid(pid),
        parent=parent,
        housekeeper=housekeeper,
        nodes=nodes,
    )


def is_housekeeper(executable: str, name: str, unit: str, uses: tuple[Use, ...], config: AgentConfig) -> bool:
    """Whether a process is one of those that belong on a GPU node; a display server that computes is not."""

    def named(names: tuple[str, ...]) -> bool:
        return any(word in (executable, unit) or word[:_COMM_LENGTH] == name[:_COMM_LENGTH] for word in names)

    computes = any(use.kind in ("compute", "mps") for use in uses)
    return named(config.housekeepers) or (named(config.display_servers) and not computes)


def _text(path: Path) -> str:
    """A file of /proc. A process may give itself a name that is no UTF-8. Raises OSError."""
    return path.read_text(errors="replace")


def start_ticks(pid: int) -> int:
    """When a process began, in clock ticks since boot (field 22 of proc_pid_stat(5)). Raises OSError."""
    text = _text(PROC / str(pid) / "stat")
    return int(text.rpartition(")")[2].split()[19])


def _living_thread(pid: int) -> str:
    """The state of a thread that lives though its leader is dead; empty if there is none."""
    words = {"R": "running", "S": "sleeping", "D": IN_KERNEL, "T": "stopped", "t": "tracing-stop", "I": "idle"}
    try:
        tasks = [task for task in (PROC / str(pid) / "task").iterdir() if task.name != str(pid)]
        states = [_text(task / "stat").rpartition(")")[2].split()[0] for task in tasks]
    except OSError:
        return ""
    return next((words[state] for state in states if state in words), "")


def _executable(pid: int) -> str:
    try:
        return (PROC / str(pid) / "exe").readlink().name.removesuffix(" (deleted)")
    except OSError:
        return ""


def _inner_pid(pid: int) -> int:
    try:
        lines = _text(PROC / str(pid) / "status").splitlines()
    except OSError:
        return 0
    ids = next((line.split()[1:] for line in lines if line.startswith("NSpid:")), [])
    return int(ids[-1]) if len(ids) > 1 else 0


def _cgroup(pid: int) -> tuple[str, str]:
    """Unit of the system's manager, and unit or container for people."""
    try:
        lines = _text(PROC / str(pid) / "cgroup").splitlines()
    except OSError:
        return "", ""
    paths = {line.split(":", 2)[1]: line.split(":", 2)[2] for line in lines}
    return place_of(paths.get("name=systemd") or paths.get("", ""))


def place_of(path: str) -> tuple[str, str]:
    """Unit, and unit or container for people, of a cgroup.

    >>> place_of("/dflash.slice/dflash-train@run1.service")
    ('dflash-train@run1.service', 'dflash-train@run1.service')
    >>> place_of("/system.slice/docker-" + "3f" * 32 + ".scope")[1]
    'docker container 3f3f3f3f3f3f'
    """
    if path.startswith("/.."):  # of another cgroup namespace
        return "", ""
    match = _UNIT.search(path)
    unit = match[0] if match else ""
    for pattern, text in _CONTAINERS:
        container = pattern.search(path)
        if container:
            return unit, container.expand(text)
    return unit, unit
