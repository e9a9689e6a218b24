"""Whether GPUs are clean, and which of them a run gets: a snapshot, and what is to be said of it.

Judging is a pure function of the snapshot, so that every state of a node can be tested.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from dflash_agent import gpus, holders, leases, xids
from dflash_agent.config import AgentConfig
from dflash_agent.findings import Finding
from dflash_agent.gpus import Gpu, Reading
from dflash_agent.holders import Holder, Use
from dflash_agent.leases import Lease
from dflash_agent.runfile import ALL_GPUS, NO_GPUS
from dflash_agent.words import age, size
from dflash_agent.xids import Xid, short_bus_id

TOLERANCE = 64 << 20  # bytes that nobody need explain: contexts of tools come and go
# What time, or somebody's help, can end; the other reasons to refuse are settings.
PASSING = frozenset(
    {
        "driver-missing",
        "gpu-busy",
        "gpu-ecc",
        "gpu-held",
        "gpu-leased",
        "gpu-lost",
        "gpu-memory-unexplained",
        "gpu-missing",
        "gpu-xid",
    }
)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The node's GPUs at one moment."""

    reading: Reading
    holders: tuple[Holder, ...] = ()
    unseen: int = 0  # processes that could not be looked into
    leases: Mapping[str, Lease] = field(default_factory=dict)
    xids: tuple[Xid, ...] = ()
    hardware: bool = False  # whether the machine has a GPU of NVIDIA's, driver or not
    time: float = 0.0


@dataclass(frozen=True, slots=True)
class Choice:
    """The GPUs that a run gets, and why not if it gets none."""

    gpus: tuple[Gpu, ...]
    findings: tuple[Finding, ...]
    hopeless: bool = False  # whether only somebody's settings stand in the way, and waiting is of no use

    @property
    def refusals(self) -> tuple[Finding, ...]:
        """The findings that stand in the way."""
        return tuple(finding for finding in self.findings if finding.severity == "refuse")


def take_snapshot(config: AgentConfig) -> Snapshot:
    """Everything that is judged. Does not raise."""
    reading = gpus.read()
    found, unseen = holders.find_holders(reading, config)
    return Snapshot(
        reading=reading,
        holders=found,
        unseen=unseen,
        leases=leases.current(),
        xids=xids.recent(),
        hardware=gpus.hardware_present(),
        time=time.time(),
    )


def choose(snapshot: Snapshot, devices: str, count: int, unit: str) -> Choice:
    """The GPUs for a run: `devices` as in its run file, `count` how many "auto" takes.

    `unit`: the run's own, whose lease and processes are its own business. With "auto", GPUs that the unit has
    already come first, then those lowest on the PCI bus.
    """
    if devices == NO_GPUS:
        return Choice((), (Finding("gpu", "ok", "devices = none: trains on the CPU"),))
    reading = snapshot.reading
    if devices == ALL_GPUS and not reading.gpus and not snapshot.hardware:
        return Choice((), (Finding("gpu", "ok", "no NVIDIA GPU in this machine: trains on the CPU"),))
    if reading.problem:
        return Choice((), (driver_missing(reading),))
    if devices != ALL_GPUS:
        return _choose_named(snapshot, devices.split(","), unit)
    judged = [(gpu, tuple(judge(snapshot, gpu, unit))) for gpu in reading.gpus]
    clean = [(gpu, found) for gpu, found in judged if all(f.severity != "refuse" for f in found)]
    clean.sort(key=lambda pair: not _is_ours(snapshot, pair[0], unit))  # stable: the bus order stays
    if len(clean) >= count:
        taken = clean[:count]
        return Choice(tuple(gpu for gpu, _ in taken), tuple(f for _, found in taken for f in found))
    found_all = [f for _, found in judged for f in found]
    if not any(f.severity == "refuse" for f in found_all):
        text = f"{count} GPUs are wanted and the machine has {len(reading.gpus)}"
        found_all.append(Finding("gpu-missing", "refuse", text, "see what the driver finds: nvidia-smi -L"))
    possible = [found for _, found in judged if _all_pass(found)]
    return Choice((), tuple(found_all), hopeless=bool(judged) and not possible)


def _all_pass(findings: Iterable[Finding]) -> bool:
    """Whether nothing stands in the way that time cannot end."""
    return all(f.severity != "refuse" or f.code in PASSING for f in findings)


def driver_missing(reading: Reading) -> Finding:
    """NVML does not answer."""
    hint = 'see: nvidia-smi; sudo dmesg | grep NVRM; to train on the CPU, devices = "none" in [preflight]'
    return Finding("driver-missing", "refuse", f"NVIDIA's driver does not answer: {reading.problem}", hint)


def _choose_named(snapshot: Snapshot, names: list[str], unit: str) -> Choice:
    chosen: list[Gpu] = []
    found: list[Finding] = []
    for name in names:
        gpu = find(snapshot.reading, name)
        if gpu is None:
            known = ", ".join(f"{gpu.index} = {gpu.uuid or gpu.label}" for gpu in snapshot.reading.gpus)
            text = f"there is no GPU {name}"
            found.append(
                Finding("gpu-missing", "refuse", text, f"devices in [preflight]; known: {known or 'none'}")
            )
        elif gpu not in chosen:
            chosen.append(gpu)
            found += judge(snapshot, gpu, unit)
    refused = any(finding.severity == "refuse" for finding in found)
    return Choice(() if refused else tuple(chosen), tuple(found), hopeless=not _all_pass(found))


def find(reading: Reading, name: str) -> Gpu | None:
    """The GPU of an index, a UUID or its unique beginning, or a bus id."""
    if name.isdigit():
        return next((gpu for gpu in reading.gpus if gpu.index == int(name)), None)
    if name.startswith("GPU-"):
        matches = [gpu for gpu in reading.gpus if gpu.uuid.startswith(name)]
        return matches[0] if len(matches) == 1 else None
    if ":" not in name:
        return None
    return next((gpu for gpu in reading.gpus if short_bus_id(gpu.bus_id) == short_bus_id(name)), None)


def judge_in_use(snapshot: Snapshot, gpu: Gpu) -> Iterator[Finding]:
    """The same of a node that works: what a run has leased is its own, and only others on it are dirt."""
    lease = snapshot.leases.get(gpu.uuid)
    if lease is None or not lease.unit:
        yield from judge(snapshot, gpu)
        return
    rest = tuple(replace(h, housekeeper=h.housekeeper or h.unit == lease.unit) for h in snapshot.holders)
    text = f"{gpu.label}: {gpu.name}, leased by {lease.unit} for {age(lease.since)}"
    in_use = Finding("gpu", "ok", text, gpu=gpu.uuid)
    for finding in judge(replace(snapshot, holders=rest), gpu, lease.unit):
        yield in_use if finding.code == "gpu" else finding


def judge(snapshot: Snapshot, gpu: Gpu, unit: str = "") -> Iterator[Finding]:
    """Everything that is to be said of one GPU before a start; that it is clean if nothing stands in the way."""
    found = [*_state(snapshot, gpu), *_lease(snapshot, gpu, unit)]
    if not gpu.lost:
        found += _dirt(snapshot, gpu, unit)
    if not any(finding.severity == "refuse" for finding in found):
        free = "" if gpu.total is None or gpu.used is None else f", {size(gpu.total - gpu.used)} free"
        found.insert(0, Finding("gpu", "ok", f"{gpu.label}: {gpu.name}, clean{free}", gpu=gpu.uuid))
    yield from found


def _is_ours(snapshot: Snapshot, gpu: Gpu, unit: str) -> bool:
    lease = snapshot.leases.get(gpu.uuid)
    return lease is not None and lease.unit == unit


def _lease(snapshot: Snapshot, gpu: Gpu, unit: str) -> Iterator[Finding]:
    lease = snapshot.leases.get(gpu.uuid)
    if lease is None or (unit and lease.unit == unit):
        return
    since = f" for {age(lease.since)}" if lease.since else ""
    text = f"{gpu.label}: leased by {lease.unit or 'another unit'}{since}"
    hint = f"systemctl stop {lease.unit}" if lease.unit else "dflashctl status"
    yield Finding("gpu-leased", "refuse", text, hint, gpu.uuid)


def _state(snapshot: Snapshot, gpu: Gpu) -> Iterator[Finding]:
    """What the GPU itself is in."""
    reset = f"sudo nvidia-smi --gpu-reset -i {gpu.bus_id or gpu.index}, or reboot"
    if gpu.lost:
        yield Finding("gpu-lost", "refuse", f"{gpu.label}: {gpu.lost}", "sudo reboot", gpu.uuid)
    if gpu.mig:
        hint = f"sudo nvidia-smi -i {gpu.bus_id} -mig 0, or name other devices in [preflight]"
        yield Finding("gpu-mig", "refuse", f"{gpu.label}: divided by MIG; a run needs whole GPUs", hint, gpu.uuid)
    if gpu.compute_mode == "prohibited":
        hint = f"sudo nvidia-smi -i {gpu.bus_id} -c DEFAULT"
        text = f"{gpu.label}: its compute mode is {gpu.compute_mode}"
        yield Finding("gpu-compute-mode", "refuse", text, hint, gpu.uuid)
    fatal = [
        x for x in snapshot.xids if gpu.bus_id and x.bus_id == short_bus_id(gpu.bus_id) and x.code in xids.FATAL
    ]
    last = f"; Xid {fatal[-1].code} ({fatal[-1].meaning}) {age(fatal[-1].time)} ago" if fatal else ""
    if gpu.recovery not in (None, "none", "drain peer-to-peer traffic"):
        yield Finding(
            "gpu-xid", "refuse", f"{gpu.label}: the driver asks for: {gpu.recovery}{last}", reset, gpu.uuid
        )
    elif fatal:
        text = f"{gpu.label}{last.replace(';', ':', 1)}"
        yield Finding("gpu-xid", "warn", text, f"if it fails again: {reset}", gpu.uuid)
    if gpu.remap_failed:
        text = f"{gpu.label}: remapping a bad row of memory has failed"
        yield Finding("gpu-ecc", "refuse", text, "the GPU is to be replaced; name others in [preflight]", gpu.uuid)
    elif gpu.ecc_uncorrected:
        text = f"{gpu.label}: {gpu.ecc_uncorrected} uncorrected memory errors since the driver was loaded"
        yield Finding("gpu-ecc", "warn", text, reset, gpu.uuid)
    if gpu.remap_pending:
        text = f"{gpu.label}: a bad row of memory is to be remapped"
        yield Finding("gpu-remap-pending", "warn", text, reset, gpu.uuid)
    if gpu.throttles:
        text = f"{gpu.label}: throttled: {', '.join(gpu.throttles)}"
        yield Finding(
            "gpu-throttled", "warn", text, "see its cooling and power: nvidia-smi -q -d PERFORMANCE", gpu.uuid
        )


def dirt(snapshot: Snapshot, gpu: Gpu) -> tuple[list[tuple[Holder, Use]], list[tuple[Holder, Use]], int | None]:
    """Who computes on a GPU, who has its node open unlisted, and how many bytes none of the listed explains.

    None for the bytes if the driver does not tell enough to know. A listed process that is dead explains none.
    """
    here = [(holder, use) for holder in snapshot.holders for use in holder.uses if use.uuid == gpu.uuid]
    listed = [(holder, use) for holder, use in here if use.kind != "open"]
    alive = [(holder, use) for holder, use in listed if holder.alive]
    busy = [pair for pair in alive if not pair[0].housekeeper]
    computing = {holder.pid for holder in snapshot.holders if any(use.kind != "open" for use in holder.uses)}
    opened = [
        (holder, use)
        for holder, use in here
        if use.kind == "open" and not holder.housekeeper and holder.pid not in computing
    ]
    if gpu.held is None or any(use.bytes is None for _, use in alive):
        unexplained = None
    else:
        unexplained = max(0, gpu.held - sum(use.bytes or 0 for _, use in alive))
    return busy, opened, unexplained


def _dirt(snapshot: Snapshot, gpu: Gpu, unit: str) -> Iterator[Finding]:
    """Holders and memory."""
    busy, opened, unexplained = dirt(snapshot, gpu)
    for holder, use in busy:
        amount = size(use.bytes) if use.bytes is not None else "memory of unknown size"
        text = f"{gpu.label}: {amount} held by {holder.line()}"
        yield Finding("gpu-busy", "refuse", text, remedy(holder, unit), gpu.uuid, holder.pid)
    gone = [h.line() for h in snapshot.holders if not h.alive and any(u.uuid == gpu.uuid for u in h.uses)]
    there = unexplained is None or unexplained > TOLERANCE
    of = "" if unexplained is None else f", and {size(unexplained)} on it nobody else explains"
    for holder, _ in opened:
        if unexplained is None and busy:  # those explain it, as far as can be known
            of, there = "", False
        text = f"{gpu.label}: its device node is open in {holder.line()}{of if there else ', no memory is held'}"
        hint = remedy(holder, unit) if there else ""
        yield Finding("gpu-held", "refuse" if there else "warn", text, hint, gpu.uuid, holder.pid)
    if unexplained is None and gpu.held is None and not gpu.lists_whole and not opened:
        text = f"{gpu.label}: the driver tells neither its processes nor how much memory they hold"
        yield Finding("gpu-memory-unexplained", "warn", text, "see: nvidia-smi", gpu.uuid)
    elif unexplained is not None and unexplained > TOLERANCE and not opened:
        text = f"{gpu.label}: {size(unexplained)} that no process explains"
        text += f"; listed: {', '.join(gone)}" if gone else ""
        text += f" ({snapshot.unseen} processes could not be looked into)" if snapshot.unseen else ""
        hint = f"sudo fuser -v /dev/nvidia{_minor(gpu)}; see other containers"
        yield Finding("gpu-memory-unexplained", "refuse", text, hint, gpu.uuid)


def _minor(gpu: Gpu) -> str:
    return "*" if gpu.minor is None else str(gpu.minor)


def remedy(holder: Holder, unit: str = "") -> str:
    """What can be typed to be rid of a holder."""
    if holder.state == holders.IN_KERNEL:
        return "it waits in the kernel and cannot be killed: only a reset of the driver or a reboot helps"
    if holder.unit.endswith(".service") and holder.unit not in (unit, "init.scope"):
        return f"sudo systemctl stop {holder.unit}"
    return f"sudo kill {holder.pid}"
