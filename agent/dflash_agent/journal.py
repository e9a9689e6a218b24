"""What the agent says: entries in the journal with fields for programs, and words to systemd (sd_notify(3))."""

import sys

IDENTIFIER = "dflash-train"


def say(run: str, message: str, priority: int = 6, **fields: str) -> None:
    """One entry in the journal, or a line where there is none."""
    try:
        from systemd import journal
    except ImportError:
        print(message, file=sys.stderr, flush=True)
        return
    journal.send(message, PRIORITY=str(priority), SYSLOG_IDENTIFIER=IDENTIFIER, DFLASH_RUN=run, **fields)


def say_of(unit: str, message: str, priority: int = 6, **fields: str) -> None:
    """One entry of another unit's, which only root may make: journalctl -u shows it (systemd.journal-fields(7))."""
    from systemd import journal

    journal.send(message, PRIORITY=str(priority), SYSLOG_IDENTIFIER=IDENTIFIER, OBJECT_SYSTEMD_UNIT=unit, **fields)


def notify(state: str) -> None:
    """Tells systemd, if it is there."""
    try:
        from systemd import daemon
    except ImportError:
        return
    daemon.notify(state)
