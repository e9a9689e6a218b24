"""What the trainer tells the service manager: sd_notify(3), through libsystemd. Nothing outside a unit.

Never raises: a manager that cannot be reached is said once, and the work goes on.
"""

import os
import time

from dflash_trainer.journal import WARNING, log, utf8

SLACK = 4  # how many times the slowest step the watchdog allows

_said = False


def ready() -> None:
    """The first optimizer step is done: `systemctl start` returns."""
    _send("READY=1")


def status(text: str) -> None:
    """The line that `systemctl status` shows."""
    _send("STATUS=" + utf8(" ".join(text.split())))


def stopping() -> None:
    """The process is about to end."""
    _send("STOPPING=1")


def extend_timeout(seconds: float) -> None:
    """Asks for so much time from now on before a start or a stop is taken for hung."""
    _send(f"EXTEND_TIMEOUT_USEC={round(seconds * 1e6)}")


class Watchdog:
    """Signs of life; only the step loop gives them, so that they do not outlive a hang.

    WatchdogSec= of the unit is what it allows at least: a step that took long may be followed by one that does.
    """

    def __init__(self) -> None:
        self.limit = int(os.environ.get("WATCHDOG_USEC", "0")) / 1e6  # seconds; 0 without a watchdog
        self._last = time.monotonic()

    def step_done(self) -> None:
        """A step has ended that began with the last sign of life."""
        enough = SLACK * (time.monotonic() - self._last)
        if 0 < self.limit < enough:
            self.limit = enough
            _send(f"WATCHDOG_USEC={round(enough * 1e6)}")
        self.alive()

    def alive(self) -> None:
        """The loop waits for something that goes on."""
        self._last = time.monotonic()
        _send("WATCHDOG=1")


def _send(state: str) -> None:
    global _said
    if not os.environ.get("NOTIFY_SOCKET"):
        return
    from cysystemd.daemon import sd_notify  # type: ignore[attr-defined]

    try:
        sd_notify(state)
    except (ValueError, RuntimeError) as error:  # what cysystemd makes of libsystemd's answer
        if not _said:
            text = f"the service manager cannot be told {state}: {error}"
            log(text, event="notify-failed", priority=WARNING)
        _said = True
