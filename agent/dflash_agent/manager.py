"""What systemd knows of the trainer's units, over D-Bus (org.freedesktop.systemd1(5)) through pydbus."""

from dataclasses import dataclass
from typing import Any

TIMEOUT = 5  # seconds; a bus that does not answer must not hang a start
_UNIT = "org.freedesktop.systemd1.Unit"
_SERVICE = "org.freedesktop.systemd1.Service"
_PROPERTIES = "org.freedesktop.DBus.Properties"


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


def unit_state(name: str) -> UnitState:
    """What systemd knows of a unit. Raises ManagerAway."""
    try:
        from gi.repository import GLib
        from pydbus import SystemBus
    except ImportError as error:
        raise ManagerAway(f"{error}; apt install python3-pydbus") from error
    try:
        bus = SystemBus()
        systemd = bus.get("org.freedesktop.systemd1", timeout=TIMEOUT)
        unit = bus.get("org.freedesktop.systemd1", systemd.LoadUnit(name, timeout=TIMEOUT), timeout=TIMEOUT)
        properties: dict[str, Any] = {}
        for interface in (_UNIT, _SERVICE) if name.endswith(".service") else (_UNIT,):
            properties |= unit[_PROPERTIES].GetAll(interface, timeout=TIMEOUT)
    except (GLib.Error, KeyError) as error:
        raise ManagerAway(" ".join(str(error).split())) from error
    return UnitState(
        active=properties["ActiveState"],
        sub=properties["SubState"],
        result=properties.get("Result", ""),
        status=properties.get("StatusText", ""),
        restarts=properties.get("NRestarts", 0),
        since=properties["StateChangeTimestamp"] / 1e6,
    )


def is_live(name: str) -> bool:
    """Whether a unit is in use, which is also the answer if nobody knows. A session that was left is not."""
    try:
        state = unit_state(name)
    except ManagerAway:
        return True
    return state.active not in ("inactive", "failed") and state.sub != "abandoned"
