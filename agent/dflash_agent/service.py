"""dflash-agent.service: what the node's GPUs and runs are in, on the bus as org.dflash.Agent1 and for Prometheus.

It hardly polls: systemd tells of units (org.freedesktop.systemd1(5)), the kernel of run files, leases and device
nodes (inotify(7)), and while a run has GPUs a child process tells of those (gpuwatch). What takes time is done in
threads, so that the main loop is always free to answer.
"""

import contextlib
import ctypes
import json
import logging
import signal as signals
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import gi
from gi.repository import Gio, GLib
from pydbus import SystemBus
from pydbus.generic import signal
from pydbus.registration import ObjectRegistration, ObjectWrapper

from dflash_agent import leases, metrics, runfile, status, verdict, xids
from dflash_agent.config import AgentConfig, load_config
from dflash_agent.devices import DeviceNodes, Pace
from dflash_agent.findings import Finding
from dflash_agent.gpus import Gpu, Reading
from dflash_agent.inotify import CLOSE_WRITE, CREATE, DELETE, MOVED_FROM, MOVED_TO, Inotify
from dflash_agent.mainloop import Fresh, Later, in_thread
from dflash_agent.manager import MANAGER, call, unit_of
from dflash_agent.metrics import Scrape, run_of
from dflash_agent.report import node_findings
from dflash_agent.runfile import ConfigError
from dflash_agent.status import RunStatus
from dflash_agent.verdict import Snapshot
from dflash_agent.watcher import Watcher
from dflash_agent.xids import Xid, short_bus_id

BUS_NAME, PATH, INTERFACE = "org.dflash.Agent1", "/org/dflash/Agent1", "org.dflash.Agent1"
ACTION = "org.dflash.agent1.manage-runs"
IDENTIFIER = "dflash-agent"
EXIT_CONFIG = 78
PROGRAM = "/usr/libexec/dflash/agent"
UNITS = "/org/freedesktop/systemd1/unit/dflash_2dtrain_40"
POLKIT = (
    "org.freedesktop.PolicyKit1",
    "/org/freedesktop/PolicyKit1/Authority",
    "org.freedesktop.PolicyKit1.Authority",
)
SOON, LATER = 0.2, 30.0  # seconds until runs are looked at: after a change of state, after a new step
SCRAPE_AGE = 5.0  # seconds that the figures of one scrape may serve the next
LOOK_EVERY = 900  # seconds between two looks at the GPUs when nothing tells of a change, as of some containers
CALLS = 16  # that may be worked on at a time
VERIFY_DEADLINE = 1500  # seconds; dflashctl verify ends its own checks before
DENIED, INVALID, LIMITED, FAILED = (
    f"org.freedesktop.DBus.Error.{name}" for name in ("AccessDenied", "InvalidArgs", "LimitsExceeded", "Failed")
)
XML = f"""
<node>
  <interface name="{INTERFACE}">
    <property name="GPUs" type="aa{{sv}}" access="read"/>
    <property name="Findings" type="aa{{sv}}" access="read"/>
    <property name="Runs" type="aa{{sv}}" access="read"/>
    <property name="Leases" type="a{{ss}}" access="read"/>
    <property name="Driver" type="s" access="read"/>
    <method name="Check"><arg name="findings" type="aa{{sv}}" direction="out"/></method>
    <method name="Verify">
      <arg name="run" type="s" direction="in"/><arg name="findings" type="aa{{sv}}" direction="out"/>
    </method>
    <method name="Start">
      <arg name="run" type="s" direction="in"/><arg name="job" type="o" direction="out"/>
    </method>
    <method name="Stop">
      <arg name="run" type="s" direction="in"/><arg name="job" type="o" direction="out"/>
    </method>
  </interface>
</node>
"""
SLOW = frozenset({"Check", "Verify", "Start", "Stop"})
NUMBERS = frozenset({"gpus"})  # fields that are lists of numbers; other lists are of strings


class CallRefused(Exception):
    """A call that gets an error for an answer; pydbus names the error after the class."""


def refused(name: str, text: str) -> CallRefused:
    """The refusal with an error name of D-Bus's."""
    made: CallRefused = type(name, (CallRefused,), {})(text)
    return made


class Registered(ObjectWrapper):  # type: ignore[misc]
    """pydbus's dispatcher, with slow methods answered by threads, and without its leak."""

    _calls = threading.BoundedSemaphore(CALLS)
    _leaks = gi.version_info < (3, 44, 2)

    def call_method(self, *call: Any) -> None:
        """Called by GIO for every method and property; see pydbus.registration."""
        if call[4] not in SLOW:
            self._answer(*call)
        elif self._calls.acquire(blocking=False):
            in_thread(self._answer_and_release, *call)
        else:
            call[-1].return_dbus_error(LIMITED, f"{CALLS} calls are being worked on; try again")
            self._unref(call[-1])

    def _answer_and_release(self, *call: Any) -> None:
        try:
            self._answer(*call)
        finally:
            self._calls.release()

    def _answer(self, *call: Any) -> None:
        try:
            super().call_method(*call)
        finally:
            self._unref(call[-1])

    def _unref(self, invocation: Any) -> None:
        """PyGObject before 3.44.2 keeps a reference to every Gio.DBusMethodInvocation, some 2 KiB a call."""
        if self._leaks:
            _GOBJECT.g_object_unref(hash(invocation))  # the hash of a GObject is its address


_GOBJECT = ctypes.CDLL("libgobject-2.0.so.0")
_GOBJECT.g_object_unref.argtypes = [ctypes.c_void_p]
_GOBJECT.g_object_unref.restype = None


class Agent:
    """The object on the bus. Attributes change in the main loop only."""

    PropertiesChanged = signal()

    def __init__(self, bus: Any, config: AgentConfig) -> None:
        self.GPUs: list[dict[str, Any]] = []
        self.Findings: list[dict[str, Any]] = []
        self.Runs: list[dict[str, Any]] = []
        self.Leases: dict[str, str] = {}
        self.Driver = ""
        self._bus = bus
        self._snapshot = Snapshot(Reading(()))
        self._xids: Counter[tuple[str, int]] = Counter()
        self._states: dict[str, tuple[str, str]] = {}  # of units, by object path
        self._last_xid = 0.0
        self._verifying = threading.Lock()
        self._files = Inotify()
        self._nodes = DeviceNodes()
        self._pace = Pace()
        self._watcher = Watcher(self.told)
        self.snapshots = Fresh(lambda: verdict.take_snapshot(config), self.adopt_snapshot)
        self.runs = Fresh(all_runs, self.adopt_runs)
        self.look_at_gpus = Later(self.snapshots.get)
        self.look_at_runs = Later(self.runs.get)

    def Check(self) -> list[dict[str, Any]]:
        """What is to be said of the GPUs now."""
        return [variants(asdict(finding)) for finding in node_findings(self.snapshots.get())]

    def Verify(self, run: str) -> list[dict[str, Any]]:
        """What `dflashctl verify` finds."""
        path = path_of(run)
        try:
            runfile.load(path)
        except ConfigError as error:
            raise refused(INVALID, str(error)) from error
        if not self._verifying.acquire(blocking=False):  # it reads whole data sets
            raise refused(LIMITED, "a run is being verified already; try again")
        try:
            return [variants(asdict(finding)) for finding in verification(run)]
        finally:
            self._verifying.release()

    def Start(self, run: str, dbus_context: Any) -> str:
        """Has systemd start a run; the job's path."""
        return self._job("StartUnit", run, dbus_context.sender)

    def Stop(self, run: str, dbus_context: Any) -> str:
        """Has systemd stop a run, which saves a checkpoint; the job's path."""
        return self._job("StopUnit", run, dbus_context.sender)

    def _job(self, method: str, run: str, sender: str) -> str:
        path = path_of(run)
        self._authorize(run, sender)
        if method == "StartUnit" and not path.exists():
            raise refused(INVALID, f"{path} does not exist; make it with `dflashctl new {run} …`")
        arguments = GLib.Variant("(ss)", (unit_of(run), "replace"))
        try:
            job: str = call(self._bus, MANAGER, method, arguments, "(o)")[0]
        except GLib.Error as error:
            raise refused(Gio.DBusError.get_remote_error(error) or FAILED, reason(error)) from error
        return job

    def _authorize(self, run: str, sender: str) -> None:
        """Asks polkit, with a deadline, which pydbus's own is_authorized() lacks. Raises CallRefused."""
        subject = ("system-bus-name", {"name": GLib.Variant("s", sender)})
        question = GLib.Variant("((sa{sv})sa{ss}us)", (subject, ACTION, {"run": run}, 0, ""))
        remedy = "add the user to group dflash, or use sudo systemctl"
        try:
            allowed = call(self._bus, POLKIT, "CheckAuthorization", question, "((bba{ss}))")[0][0]
        except GLib.Error as error:
            raise refused(DENIED, f"polkit cannot be asked ({reason(error)}); use sudo systemctl") from error
        if not allowed:
            raise refused(DENIED, f"{ACTION} is not allowed for this user: {remedy}")

    def adopt_snapshot(self, snapshot: Snapshot) -> None:
        """Shows a new snapshot, and looks again soon if it has brought news."""
        self._nodes.changed()  # by the look itself
        before = self._snapshot
        self._show_gpus(snapshot)
        if (pause := self._pace.looked(news=gist(before) != gist(self._snapshot))) is not None:
            self.look_at_gpus.within(pause)

    def _show_gpus(self, snapshot: Snapshot) -> None:
        """Shows a snapshot with the leases of now."""
        self._snapshot = replace(snapshot, leases=leases.current())
        uuids = tuple(gpu.uuid for gpu in snapshot.reading.gpus)
        self._watcher.keep((snapshot.reading.driver, *uuids) if self._snapshot.leases else None)
        self._show(
            GPUs=[variants(gpu_fields(self._snapshot, gpu)) for gpu in snapshot.reading.gpus],
            Findings=[variants(asdict(finding)) for finding in node_findings(self._snapshot)],
            Leases=lease_units(self._snapshot),
            Driver=snapshot.reading.driver,
        )

    def adopt_runs(self, rows: tuple[RunStatus, ...]) -> None:
        """Shows the runs, and leases if those have changed."""
        self._show(Runs=[variants(asdict(row)) for row in rows])
        if lease_units(replace(self._snapshot, leases=leases.current())) != self.Leases:
            self._show_gpus(self._snapshot)

    def _show(self, **values: Any) -> None:
        """Sets properties, and tells the bus of those that are not what they were."""
        changed = {name: value for name, value in values.items() if getattr(self, name) != value}
        for name, value in changed.items():
            setattr(self, name, value)
        if changed:
            self.PropertiesChanged(INTERFACE, changed, [])

    def watch(self) -> None:
        """Looks again when something has changed, and at the GPUs now and then."""
        self._files.add(runfile.RUNS_DIR, CREATE | DELETE | MOVED_FROM | MOVED_TO | CLOSE_WRITE)
        self._files.add(leases.LEASES_DIR, CLOSE_WRITE)
        readable = (GLib.PRIORITY_DEFAULT, GLib.IOCondition.IN)
        GLib.io_add_watch(self._files.descriptor, *readable, self._file_changed)
        GLib.io_add_watch(self._nodes.descriptor, *readable, self._node_changed)
        GLib.timeout_add_seconds(LOOK_EVERY, self._look_now_and_then)

    def _file_changed(self, _descriptor: int, _condition: Any) -> bool:
        if any([*self._files.events()]):
            self.look_at_runs.within(SOON)
        return True

    def _node_changed(self, _descriptor: int, _condition: Any) -> bool:
        used, come_or_gone = self._nodes.changed()
        if come_or_gone:
            self.look_at_gpus.within(SOON)
        elif used and not self.snapshots.busy:  # else it may be the look itself
            self.look_at_gpus.within(self._pace.stirred(time.monotonic()))
        return True

    def _look_now_and_then(self) -> bool:
        self.look_at_gpus.within(0)
        return True

    def unit_changed(self, _con: Any, _sender: str, path: str, _interface: str, _signal: str, values: Any) -> None:
        """A signal of any unit's: a new state is shown soon, a new step later."""
        if not path.startswith(UNITS):
            return
        changed = values[1]
        if "ActiveState" not in changed:
            self.look_at_runs.within(LATER)
            return
        state = (changed["ActiveState"], changed["SubState"])
        self.look_at_runs.within(LATER if self._states.get(path) == state else SOON)
        self._states[path] = state

    def told(self, what: Mapping[str, Any]) -> None:
        """A line of the GPUs' watcher."""
        if "xid" not in what:
            self.look_at_gpus.within(SOON)
            return
        xid = Xid(short_bus_id(what["bus_id"]), what["xid"], time.time())
        self._xids[xid.bus_id, xid.code] += what["count"]
        lease = leases.current().get(what["uuid"])
        with contextlib.suppress(OSError):  # a journal that restarts
            tell_of_xid(xid, what, lease.unit if lease else "")
        with contextlib.suppress(OSError):  # a full disk
            xids.record(xid)
        self.look_at_gpus.within(SOON if xid.time - self._last_xid > LATER else LATER)  # they may come in thousands
        self._last_xid = xid.time

    def scrape(self) -> Scrape:
        """What the metrics are taken from."""
        snapshot = replace(self.snapshots.get(SCRAPE_AGE), leases=leases.current())
        return Scrape(snapshot, self.runs.get(SCRAPE_AGE), dict(self._xids))


def all_runs() -> tuple[RunStatus, ...]:
    """The status of every run that has a run file."""
    return tuple(status.run_status(name, runfile.path_of(name)) for name in status.all_runs())


def gpu_fields(snapshot: Snapshot, gpu: Gpu) -> dict[str, Any]:
    """What is shown of a GPU: not what changes all the time, which nobody watches."""
    known = asdict(gpu)
    for name in ("processes", "utilization", "temperature", "power"):
        del known[name]
    busy, opened, unexplained = verdict.dirt(snapshot, gpu)
    return known | {
        "held": gpu.held,
        "unexplained": unexplained,
        "holders": tuple(dict.fromkeys(holder.line(aged=False) for holder, _ in (*busy, *opened))),
        "clean": all(finding.severity != "refuse" for finding in verdict.judge_in_use(snapshot, gpu)),
        "lease": snapshot.leases[gpu.uuid].unit if gpu.uuid in snapshot.leases else None,
    }


def gist(snapshot: Snapshot) -> tuple[object, ...]:
    """What makes a snapshot another one: who is on which GPU and what is wrong, but not how much or how long."""
    found = {(finding.code, finding.gpu, finding.pid) for finding in node_findings(snapshot)}
    return snapshot.reading.driver, {gpu.uuid for gpu in snapshot.reading.gpus}, found, lease_units(snapshot)


def lease_units(snapshot: Snapshot) -> dict[str, str]:
    """The units of the leases that hold, by UUID."""
    return {uuid: lease.unit for uuid, lease in sorted(snapshot.leases.items())}


def variants(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values as D-Bus has them; None is left out."""
    signatures: dict[type, str] = {bool: "b", int: "x", float: "d", str: "s", tuple: "as"}
    return {
        name: GLib.Variant(
            "ax" if name in NUMBERS else signatures[type(value)], list(value) if isinstance(value, tuple) else value
        )
        for name, value in values.items()
        if value is not None
    }


def path_of(run: str) -> Path:
    """The run file of a name that is one. Raises CallRefused."""
    try:
        return runfile.path_of(run)
    except ConfigError as error:
        raise refused(INVALID, str(error)) from error


def reason(error: Any) -> str:
    """The text of a GLib.Error without D-Bus's name for it, on one line."""
    text = " ".join(str(error.message).split())
    return text.removeprefix(f"GDBus.Error:{Gio.DBusError.get_remote_error(error)}: ")


def verification(run: str) -> Iterator[Finding]:
    """The findings of `agent verify`, in a transient unit: from inside this one, with most of the file system
    read-only, an output directory would look as if it could not be written. Raises CallRefused.
    """
    unit = f"dflash-verify-{run}.service"
    command = [
        *("systemd-run", "--quiet", "--pipe", "--wait", "--collect", "--service-type=exec", f"--unit={unit}"),
        *(f"--description=Verification of run {run}", f"--property=RuntimeMaxSec={VERIFY_DEADLINE}"),
        *("--property=ProtectSystem=full", PROGRAM, "verify", run),
    ]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise refused(FAILED, last)
    for line in done.stdout.splitlines():
        yield Finding(**json.loads(line))


def verify(run: str) -> int:
    """`agent verify RUN`: the findings of dflashctl verify, each as a line of JSON."""
    from dflash_agent import cli, preflight

    try:
        path = runfile.path_of(run)
        loaded, config = runfile.load(path), load_config()
    except ConfigError as error:
        print(error, file=sys.stderr)
        return EXIT_CONFIG
    checked = (*cli.quick_checks(loaded, path), *cli.deep_checks(path), *cli.checkpoint_checks(loaded, path))
    choice = preflight.judge_run(loaded, verdict.take_snapshot(config))
    for finding in (Finding("config", "ok", f"{path} is well-formed"), *checked, *choice.findings):
        print(json.dumps(asdict(finding)))
    return 0


def tell_of_xid(xid: Xid, what: Mapping[str, Any], unit: str) -> None:
    """One entry in the journal, which is the unit's too if it has the GPU (systemd.journal-fields(7))."""
    from systemd import journal

    label = Gpu(what["index"], what["uuid"], what["bus_id"]).label
    times = f", {what['count']} times" if what["count"] > 1 else ""
    about = {"OBJECT_SYSTEMD_UNIT": unit, "DFLASH_RUN": run_of(unit)} if unit else {}
    journal.send(
        f"{label}: Xid {xid.code}: {xid.meaning}{times}",
        PRIORITY="3" if xid.code in xids.FATAL else "4",
        SYSLOG_IDENTIFIER=IDENTIFIER,
        DFLASH_EVENT="xid",
        DFLASH_GPU=what["uuid"],
        DFLASH_XID=str(xid.code),
        **about,
    )


def offer_metrics(address: str, scrape: Callable[[], Scrape]) -> None:
    """Listens at an address; what answers is loaded when the first one calls."""
    try:
        listener = metrics.listen(address)
    except OSError as error:
        print(f"<4>no metrics at {address}: {error}; see metrics in /etc/dflash/agent.toml", flush=True)
        return

    def called(_descriptor: int, _condition: Any) -> bool:
        metrics.serve_in_thread(listener, scrape)
        return False

    GLib.io_add_watch(listener.fileno(), GLib.PRIORITY_DEFAULT, GLib.IOCondition.IN, called)


def serve(config: AgentConfig) -> int:
    """Runs until SIGTERM."""
    logging.getLogger("pydbus.registration").addFilter(
        lambda record: not (record.exc_info and isinstance(record.exc_info[1], CallRefused))
    )
    bus = SystemBus()
    agent = Agent(bus, config)
    call(bus, MANAGER, "Subscribe", None, "()")
    subscribed = (MANAGER[0], "org.freedesktop.DBus.Properties", "PropertiesChanged", None, None, 0)
    bus.con.signal_subscribe(*subscribed, agent.unit_changed)
    agent.watch()
    agent.adopt_snapshot(agent.snapshots.get())
    agent.adopt_runs(agent.runs.get())
    interfaces = Gio.DBusNodeInfo.new_for_xml(XML).interfaces
    registration = ObjectRegistration(bus, PATH, interfaces, Registered(agent, interfaces), own_wrapper=True)
    if config.metrics:
        offer_metrics(config.metrics, agent.scrape)
    loop = GLib.MainLoop()
    GLib.unix_signal_add(GLib.PRIORITY_HIGH, signals.SIGTERM, loop.quit)
    with registration, bus.request_name(BUS_NAME, allow_replacement=False):
        loop.run()
    return 0


def main(arguments: list[str] | None = None) -> int:
    """The service; or, as `agent verify RUN`, the checks that it has a transient unit do."""
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["verify"] and len(words) == 2:
        return verify(words[1])
    if words:
        print("usage: agent [verify RUN]", file=sys.stderr)
        return 2
    try:
        return serve(load_config())
    except ConfigError as error:
        print(f"<3>{error}", flush=True)
        return EXIT_CONFIG


if __name__ == "__main__":
    sys.exit(main())
