"""Tells when somebody opens or closes a GPU's device node, and when nodes come and go, without holding a GPU.

A process that asks the driver keeps the GPUs open, which stands in the way of a reset or of another driver, and
takes as much memory as the rest of the agent. Source: inotify(7). A container with nodes of its own is not seen.
"""

import re
from pathlib import Path

from dflash_agent import inotify
from dflash_agent.inotify import Inotify

_OF_A_NODE = inotify.OPEN | inotify.CLOSE_WRITE | inotify.CLOSE_NOWRITE
_OF_THE_DIRECTORY = inotify.CREATE | inotify.DELETE
_NODE = re.compile(r"nvidia\d+")


class DeviceNodes:
    """The nodes in a directory, watched for as long as this is kept. Raises OSError."""

    def __init__(self, directory: Path = Path("/dev")) -> None:
        self._directory = directory
        self._inotify = Inotify()
        self.descriptor = self._inotify.descriptor
        self._inotify.add(directory, _OF_THE_DIRECTORY)
        self._watch_nodes()

    def _watch_nodes(self) -> None:
        for path in self._directory.iterdir():
            if _NODE.fullmatch(path.name):
                self._inotify.add(path, _OF_A_NODE)

    def changed(self) -> tuple[bool, bool]:
        """Whether nodes were opened or closed, and whether some came or went, since the last call."""
        used, come_or_gone = False, False
        for mask, name in self._inotify.events():
            used |= bool(mask & _OF_A_NODE)
            come_or_gone |= bool(mask & inotify.OVERFLOW or (mask & _OF_THE_DIRECTORY and _NODE.fullmatch(name)))
        if come_or_gone:
            self._watch_nodes()
        return used, come_or_gone


class Pace:
    """How soon GPUs are looked at once somebody has come or gone: at once, then ever later while nothing changes.

    What opens a node allocates a while after, and tools that look at GPUs every few seconds open it each time.
    """

    SOONEST, SOON, LATEST, FACTOR = 0.2, 1.0, 60.0, 5.0  # seconds

    def __init__(self) -> None:
        self._pause = self.SOONEST
        self._last = float("-inf")

    def stirred(self, now: float) -> float:
        """Somebody came or went: seconds until a look is due."""
        if now - self._last > self.LATEST:
            self._pause = self.SOONEST
        self._last = now
        return self._pause

    def looked(self, news: bool) -> float | None:
        """After a look: seconds until the next one, or None if it is not worth it."""
        self._pause = self.SOON if news else min(self._pause * self.FACTOR, self.LATEST)
        return self._pause if self._pause < self.LATEST else None
