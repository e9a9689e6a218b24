"""What the trainer tells the service manager: sd_notify(3), through libsystemd. Nothing outside a unit.

Never raises: a manager that cannot be reached is said once, and the work goes on.
"""

import os

from dflash_trainer.journal import WARNING, log, utf8

_said = False


def ready() -> None:
    """The first optimizer step is done: `systemctl start` returns."""
    _send("READY=1")


def status(text: str) -> None:
    """The line that `systemctl status` shows."""
    _send("STATUS=" + utf8(" ".join(text.split())))


def watchdog() -> None:
    """A sign of life; only the step loop gives it, so that it does not outlive a hang."""
    _send("WATCHDOG=1")


def stopping() -> None:
    """The process is about to end."""
    _send("STOPPING=1")


def extend_timeout(seconds: float) -> None:
    """Asks for so much time from now on before a start or a stop is taken for hung."""
    _send(f"EXTEND_TIMEOUT_USEC={round(seconds * 1e6)}")


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
