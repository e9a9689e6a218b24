"""Recent Xid errors: what the kernel log still holds, and what the agent's service has seen.

Source: NVIDIA's Xid catalogue; kernel lines look like `NVRM: Xid (PCI:0000:3b:00): 79, pid=…, …`.
"""

import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

KERNEL_LOG = Path("/dev/kmsg")
SEEN_FILE = Path("/run/dflash/xids.jsonl")
OF_APPLICATIONS = frozenset({13, 31, 43, 45})
FATAL = frozenset({48, 62, 64, 74, 79, 95, 119, 120, 140})
MEANING = {
    13: "a kernel of the application faulted",
    31: "the application touched memory that is not mapped",
    43: "the application was stopped after a fault of its own",
    45: "the application's work was torn down",
    48: "double-bit ECC error",
    62: "the GPU's microcontroller halted",
    63: "a row of memory is to be remapped",
    64: "remapping a row of memory failed",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    92: "many corrected ECC errors",
    94: "contained memory error",
    95: "uncontained memory error",
    119: "the GPU's system processor does not answer",
    120: "the GPU's system processor failed",
    140: "uncorrected ECC error",
}
KEPT_LINES = 1000
_LINE = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)(?:, (.*))?")


@dataclass(frozen=True, slots=True)
class Xid:
    """One error; `bus_id` in the short form domain:bus:device."""

    bus_id: str
    code: int
    time: float  # unix seconds

    @property
    def meaning(self) -> str:
        """For people."""
        return MEANING.get(self.code, "see NVIDIA's Xid catalogue")


def short_bus_id(bus_id: str) -> str:
    """Domain, bus and device of any spelling.

    >>> short_bus_id("00000000:3B:00.0"), short_bus_id("0000:3b:00"), short_bus_id("3b:00.0")
    ('0000:3b:00', '0000:3b:00', '0000:3b:00')
    """
    parts = bus_id.lower().partition(".")[0].split(":")
    domain = parts[-3] if len(parts) > 2 else "0"
    return f"{int(domain, 16):04x}:{parts[-2]}:{parts[-1]}" if len(parts) > 1 else bus_id


def recent() -> tuple[Xid, ...]:
    """One of each kind and GPU, the latest, oldest first. What may not be read is left out."""
    latest: dict[tuple[str, int], Xid] = {}
    for xid in sorted((*_kernel(), *_seen()), key=lambda xid: xid.time):
        latest[xid.bus_id, xid.code] = xid
    return tuple(sorted(latest.values(), key=lambda xid: xid.time))


def record(xid: Xid, path: Path = SEEN_FILE) -> None:
    """Keeps an error that NVML told of, for readers without the kernel log; until the next boot."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.read_text().splitlines()[-KEPT_LINES:] if path.exists() else []
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text("\n".join([*lines, json.dumps(asdict(xid))]) + "\n")
    fresh.chmod(0o644)
    fresh.replace(path)


def parse_kernel_line(line: str, boot: float) -> Xid | None:
    """The error in a record of /dev/kmsg (`priority,sequence,µs,flags;text`), if it is one."""
    match = _LINE.search(line)
    if match is None:
        return None
    try:
        microseconds = int(line.split(";", 1)[0].split(",")[2])
    except (IndexError, ValueError):
        microseconds = 0
    return Xid(short_bus_id(match[1]), int(match[2]), boot + microseconds / 1e6)


def _kernel() -> Iterator[Xid]:
    boot = time.time() - time.monotonic()
    try:
        descriptor = os.open(KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return
    try:
        while True:
            try:
                record_text = os.read(descriptor, 8192)
            except BrokenPipeError:  # overwritten while we read; the next one is there
                continue
            except OSError:
                return
            if not record_text:
                return
            if b"NVRM: Xid" in record_text:
                xid = parse_kernel_line(record_text.decode(errors="replace"), boot)
                if xid:
                    yield xid
    finally:
        os.close(descriptor)


def _seen() -> Iterator[Xid]:
    try:
        lines = SEEN_FILE.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        try:
            yield Xid(**json.loads(line))
        except (ValueError, TypeError):
            continue
