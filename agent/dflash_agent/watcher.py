"""Keeps a child process that watches the GPUs (gpuwatch), beside GLib's main loop."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gi.repository import GLib

from dflash_agent import verdict

FIRST_PAUSE, LONGEST_PAUSE = 2, 60  # seconds until one that has ended is started again


class Watcher:
    """A child process that watches the GPUs, for as long as it is wanted."""

    def __init__(self, told: Callable[[Mapping[str, Any]], None]) -> None:
        self._told = told
        self._child: subprocess.Popen[bytes] | None = None
        self._over: tuple[str, ...] | None = None
        self._replaced = False
        self._timer = 0
        self._pause = FIRST_PAUSE
        self._ended = ""  # why the one before did
        self._reason = ""  # what this one said of why it ends
        self._rest = b""

    def keep(self, over: tuple[str, ...] | None) -> None:
        """Has one watch over what is told, a driver and its GPUs, or none."""
        if over == self._over:
            return
        self._over = over
        self._pause, self._ended = FIRST_PAUSE, ""
        if self._timer:
            GLib.source_remove(self._timer)
            self._timer = 0
        if self._child is not None:
            self._replaced = True
            os.kill(self._child.pid, signal.SIGTERM)  # GLib reaps it, just before _gone()
        elif over is not None:
            self._start()

    def _start(self) -> bool:
        """False, so that GLib does not repeat it."""
        self._timer = 0
        path = os.pathsep.join([str(Path(__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._child = subprocess.Popen(
            [sys.executable, "-m", "dflash_agent.gpuwatch", str(verdict.TOLERANCE)],
            stdin=subprocess.PIPE,  # which tells it when this process is gone
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path},
            bufsize=0,
        )
        self._began = time.monotonic()
        assert self._child.stdout is not None
        conditions = GLib.IOCondition.IN | GLib.IOCondition.HUP | GLib.IOCondition.ERR
        GLib.io_add_watch(self._child.stdout.fileno(), GLib.PRIORITY_DEFAULT, conditions, self._readable)
        return False

    def _readable(self, descriptor: int, _condition: Any) -> bool:
        data = os.read(descriptor, 1 << 16)
        if not data and self._child is not None:
            GLib.child_watch_add(GLib.PRIORITY_DEFAULT, self._child.pid, self._gone)
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            what = json.loads(line) if line.startswith(b"{") else {}  # the driver's library may print, too
            self._reason = what.get("ended", "")
            if what and not self._reason:
                self._ended = ""
                self._told(what)
        return True

    def _gone(self, _pid: int, wait_status: int) -> None:
        assert self._child is not None
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                pipe.close()
        code = os.waitstatus_to_exitcode(wait_status)
        self._child.returncode = code  # GLib has reaped it
        self._child = None
        by_alarm = "NVML did not answer in time" if code == -signal.SIGALRM else f"exit code {code}"
        why, self._reason, self._rest = self._reason or by_alarm, "", b""
        replaced, self._replaced = self._replaced, False
        if self._over is None:
            return
        if replaced:
            self._start()
            return
        if time.monotonic() - self._began > LONGEST_PAUSE:
            self._pause = FIRST_PAUSE
        if why != self._ended:
            print(f"<4>the GPUs are not watched: {why}; trying again", flush=True)
            self._told({"changed": True})
        self._ended = why
        self._timer = GLib.timeout_add_seconds(self._pause, self._start)
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
