"""What systemd knows of the trainer's units, over D-Bus (org.freedesktop.systemd1(5)) through pydbus."""

from dataclasses import dataclass
from typing import Any

TIMEOUT = 5  # seconds; a bus that does not answer must not hang a start
MANAGER = ("org.freedesktop.systemd1", "/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager")
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
    exit_status: int = 0  # of its main process: an exit code, or a signal


def unit_of(run: str) -> str:
    """The unit of a run."""
    return f"dflash-train@{run}.service"


def call(bus: Any, where: tuple[str, str, str], method: str, arguments: Any, answer: str) -> Any:
    """Calls a method of a bus name's object and interface without asking first what there is. Raises GLib.Error.

    pydbus's own proxies are made anew from introspection each time, which takes 20 times as long and much memory.
    """
    from gi.repository import GLib

    name, path, interface = where
    kind = GLib.VariantType(answer)
    return bus.con.call_sync(name, path, interface, method, arguments, kind, 0, TIMEOUT * 1000, None).unpack()


def unit_state(name: str) -> UnitState:
    """What systemd knows of a unit. Raises ManagerAway."""
    try:
        from gi.repository import GLib
        from pydbus import SystemBus
    except ImportError as error:
        raise ManagerAway(f"{error}; apt install python3-pydbus") from error
    try:
        bus = SystemBus()
        path = call(bus, MANAGER, "LoadUnit", GLib.Variant("(s)", (name,)), "(o)")[0]
        properties: dict[str, Any] = {}
        for interface in (_UNIT, _SERVICE) if name.endswith(".service") else (_UNIT,):
            where = (MANAGER[0], path, _PROPERTIES)
            properties |= call(bus, where, "GetAll", GLib.Variant("(s)", (interface,)), "(a{sv})")[0]
    except GLib.Error as error:
        raise ManagerAway(" ".join(str(error).split())) from error
    return UnitState(
        active=properties["ActiveState"],
        sub=properties["SubState"],
        result=properties.get("Result", ""),
        exit_status=properties.get("ExecMainStatus", 0),
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
