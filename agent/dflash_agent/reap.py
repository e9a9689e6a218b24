"""Ends leftovers of dead runs, and nothing else: by pidfd, SIGTERM first, SIGKILL after a grace.

A process may be ended if user dflash owns it and it sits in no live unit: in the cgroup of a dead dflash-train@
unit, in an abandoned session, or in none. Source: pidfd_open(2).
"""

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from dflash_agent import holders, manager
from dflash_agent.holders import Holder

GRACE = 10.0  # seconds from SIGTERM to SIGKILL, and from there to giving up


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a process: ended by a signal, or why it still lives."""

    holder: Holder
    ended: bool
    text: str


def forbidden(holder: Holder, uid: int, unit: str, is_live: Callable[[str], bool] = manager.is_live) -> str | None:
    """Why a holder is not ours to end; None if it is. `unit`: the one that is starting, `uid`: user dflash's."""
    if holder.uid != uid:
        return f"it belongs to user {holder.user or holder.uid}"
    if holder.unit and holder.unit != unit and is_live(holder.unit):
        return f"it is part of {holder.unit}, which is live"
    return None


def reap(targets: Iterable[Holder], uid: int, grace: float = GRACE) -> list[Outcome]:
    """Ends the processes and returns what became of each. Does not raise for one that has ended already."""
    open_ones: dict[int, Holder] = {}
    outcomes = []
    try:
        for holder in targets:
            try:
                descriptor = os.pidfd_open(holder.pid)
            except OSError:
                outcomes.append(Outcome(holder, True, "had ended already"))
                continue
            open_ones[descriptor] = holder
        # The descriptor cannot change its process; whether it is the one we judged is looked at after opening it.
        for descriptor, holder in list(open_ones.items()):
            if not _is_same(holder, uid):
                outcomes.append(Outcome(holder, True, "had ended already"))
                os.close(descriptor)
                del open_ones[descriptor]
        waiting = dict(open_ones)
        for name in ("SIGTERM", "SIGKILL"):
            for descriptor in waiting:
                _send(descriptor, getattr(signal, name))
                _send(descriptor, signal.SIGCONT)  # a stopped one does not see SIGTERM
            for descriptor in _wait(waiting, grace):
                outcomes.append(Outcome(waiting.pop(descriptor), True, f"ended by {name}"))
        outcomes += [Outcome(holder, False, _why(holder)) for holder in waiting.values()]
    finally:
        for descriptor in open_ones:
            os.close(descriptor)
    return outcomes


def _is_same(holder: Holder, uid: int) -> bool:
    """Whether the pid is still the process that was judged, and every one of its user ids is dflash's."""
    try:
        return holders.start_ticks(holder.pid) == holder.ticks and set(psutil.Process(holder.pid).uids()) == {uid}
    except (OSError, psutil.Error):
        return False


def _send(descriptor: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(descriptor, number)


def _wait(descriptors: Iterable[int], seconds: float) -> list[int]:
    """The descriptors whose processes end within so many seconds."""
    poll = select.poll()
    left = set(descriptors)
    for descriptor in left:
        poll.register(descriptor, select.POLLIN)
    ended = []
    end = time.monotonic() + seconds
    while left and (rest := end - time.monotonic()) > 0:
        for descriptor, _ in poll.poll(rest * 1000):
            poll.unregister(descriptor)
            left.discard(descriptor)
            ended.append(descriptor)
    return ended


def _why(holder: Holder) -> str:
    """Why a process outlives SIGKILL."""
    task = Path(f"/proc/{holder.pid}")
    try:
        state = (task / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        where = (task / "wchan").read_text().strip("0\n")
    except OSError:
        state, where = "?", ""
    if state == "D":
        place = f" in {where}" if where else ""
        return f"does not die: it waits in the kernel{place}; only a reset of the driver or a reboot helps"
    return f"has not ended {GRACE:.0f} s after SIGKILL (state {state})"
