"""The run's log: structured entries in the journal, plain lines on stderr elsewhere.

Entries carry MESSAGE for people and DFLASH_EVENT, DFLASH_RUN, DFLASH_STEP, … for programs
(systemd.journal-fields(7), `journalctl -o json`).
"""

import contextlib
import functools
import importlib
import logging
import os
import sys

IDENTIFIER = "dflash-train"
ERROR, WARNING, INFO = 3, 4, 6  # syslog(3)
LIBRARIES = ("transformers", "huggingface_hub", "datasets")

_run_name = ""


def configure(run_name: str) -> None:
    """Names the run in every entry from now on, and sends what libraries warn of the same way.

    Without a terminal their progress bars are switched off. Imports transformers.
    """
    global _run_name
    _run_name = run_name
    if not sys.stderr.isatty():
        os.environ |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    importlib.import_module("transformers.utils.logging")  # sets handlers, which are replaced below

    for name in LIBRARIES:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    logging.getLogger().handlers[:] = [_Libraries(logging.WARNING)]
    logging.captureWarnings(True)


def log(message: str, *, event: str, priority: int = INFO, **fields: object) -> None:
    """One entry; never raises. Each further field becomes DFLASH_NAME; floats keep six significant digits."""
    if not _in_journal():
        _print(message)
        return
    from cysystemd.journal import send

    entry = {
        "MESSAGE": message,
        "PRIORITY": priority,
        "SYSLOG_IDENTIFIER": IDENTIFIER,
        "DFLASH_EVENT": event,
        "DFLASH_RUN": _run_name,
        **{f"DFLASH_{name.upper()}": value for name, value in fields.items()},
    }
    texts = {k: f"{v:.6g}" if isinstance(v, float) else utf8(str(v)) for k, v in entry.items()}
    if send(**texts) < 0:  # journald is away; the stream on stderr is kept for it by the manager
        _print(f"<{priority}>{message}")


@functools.cache
def _in_journal() -> bool:
    """Whether stderr goes to the journal: $JOURNAL_STREAM names its device and inode (systemd.exec(5))."""
    device, _, inode = os.environ.get("JOURNAL_STREAM", "").partition(":")
    try:
        stream = os.fstat(2)
    except OSError:
        return False
    return (device, inode) == (str(stream.st_dev), str(stream.st_ino))


def _print(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # a full disk behind stderr, or nobody there
        if sys.stderr.isatty():
            from tqdm import tqdm

            tqdm.write(line, file=sys.stderr)  # above the bar, not into it
        else:
            print(line, file=sys.stderr, flush=True)


def utf8(text: str) -> str:
    """The text with an escape for what has no place in UTF-8, as a path may hold."""
    return text.encode(errors="backslashreplace").decode()


class _Libraries(logging.Handler):
    """Sends the records of Python's logging to the log."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = f"{record.name}: {self.format(record).strip()}"
        except Exception:  # noqa: BLE001 - a library's faulty message must not end the run
            self.handleError(record)
        else:
            priority = ERROR if record.levelno >= logging.ERROR else WARNING
            log(message, event="library", priority=priority)
