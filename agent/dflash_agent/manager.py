"""What systemd knows of the trainer's units, over D-Bus (org.freedesktop.systemd1(5)) through pydbus."""

import time
from dataclasses import dataclass
from typing import Any

TIMEOUT = 5  # seconds; a bus that does not answer must not hang a start
_UNIT = "org.freedesktop.systemd1.Unit"
_SERVICE = "org.freedesktop.systemd1.Service"


class ManagerAway(Exception):
    """systemd cannot be asked; str() says why."""


@dataclass(frozen=True, slots=True)
class UnitState:
    """The properties of a unit that people ask for."""

    active: str  # active, activating, failed, …
    sub: str
    result: str  # of the last attempt
    status: str  # STATUS= of the main process
    restarts: int  # automatic ones since the last start by hand
    since: float  # when it entered this state, unix seconds; 0 if never


def unit_of(run: str) -> str:
    """The unit of a run."""
    return f"dflash-train@{run}.service"


def unit_state(run: str) -> UnitState:
    """What systemd knows of a run's unit. Raises ManagerAway."""
    try:
        from gi.repository import GLib
        from pydbus import SystemBus
    except ImportError as error:
        raise ManagerAway(f"{error}; apt install python3-pydbus") from error
    try:
        bus = SystemBus()
        systemd = bus.get("org.freedesktop.systemd1", timeout=TIMEOUT)
        unit = bus.get("org.freedesktop.systemd1", systemd.LoadUnit(unit_of(run), timeout=TIMEOUT), timeout=TIMEOUT)
        properties: dict[str, Any] = {}
        for interface in (_UNIT, _SERVICE):
            properties |= unit[_PROPERTIES].GetAll(interface, timeout=TIMEOUT)
    except (GLib.Error, KeyError) as error:
        raise ManagerAway(" ".join(str(error).split())) from error
    return UnitState(
        active=properties["ActiveState"],
        sub=properties["SubState"],
        result=properties["Result"],
        status=properties["StatusText"],
        restarts=properties["NRestarts"],
        since=properties["StateChangeTimestamp"] / 1e6,
    )


_PROPERTIES = "org.freedesktop.DBus.Properties"


def age(since: float) -> str:
    """How long ago a moment was, in its largest unit.

    >>> age(time.time() - 7300)
    '2 h'
    """
    seconds = max(0.0, time.time() - since)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
