"""The ExecStart of dflash-train@.service: waits out a back-off, checks the run, and becomes the trainer.

A refusal is exit 78, which the unit does not restart (RestartPreventExitStatus= does not look at ExecStartPre,
so the checks are here). SIGTERM ends it at once.
"""

import os
import sys
import time
from pathlib import Path

from dflash_agent import manager, runtime
from dflash_agent.checks import check_run
from dflash_agent.findings import Finding
from dflash_agent.runfile import ConfigError, load, path_of

EXIT_CANNOT_START = 78
RESTART_SECONDS = 5  # RestartSec= of the unit
LONGEST_WAIT = 600  # seconds
IDENTIFIER = "dflash-train"


def main(arguments: list[str] | None = None) -> int:
    """Starts the run that is named, or returns why not. Does not return if it starts."""
    words = sys.argv[1:] if arguments is None else arguments
    if len(words) != 1:
        print("usage: launch NAME", file=sys.stderr)
        return 2
    name = words[0]
    back_off(name)
    try:
        path = path_of(name)
        refusals = [finding for finding in report(name, path) if finding.severity == "refuse"]
    except ConfigError as error:
        refusals = [Finding("config", "refuse", str(error))]
    if refusals:
        notify("STATUS=" + refusals[0].line())
        for finding in reversed(refusals):  # the first one last: it is what `systemctl status` ends with
            say(name, finding.line(), priority=3, DFLASH_EVENT="refused", DFLASH_CODE=finding.code)
        return EXIT_CANNOT_START
    directory = runtime.current()
    assert directory is not None  # check_runtime has seen it
    python = directory / "bin" / "python"
    notify("STATUS=starting the trainer")
    command = [str(python), "-m", "dflash_trainer", "train", "--run-file", str(path)]
    return os.execve(python, command, environment(dict(os.environ)))


def back_off(name: str) -> None:
    """Waits 5, 10, 20, … up to 600 s before an automatic restart, the unit's own 5 s included."""
    try:
        restarts: int = manager.unit_state(name).restarts
    except manager.ManagerAway as error:
        say(name, f"systemd cannot be asked for the number of restarts ({error}): no back-off", priority=4)
        return
    wait = pause(restarts)
    if wait > 0:
        text = f"restart {restarts}: waiting {wait} s before the next attempt"
        notify("STATUS=" + text)
        say(name, text, DFLASH_EVENT="back-off")
        time.sleep(wait)


def pause(restarts: int) -> int:
    """Seconds to wait before the attempt that follows so many automatic restarts.

    >>> [pause(n) for n in (0, 1, 2, 3, 4, 20)]
    [0, 0, 5, 15, 35, 595]
    """
    if restarts == 0:
        return 0
    return min(RESTART_SECONDS << min(restarts - 1, 30), LONGEST_WAIT) - RESTART_SECONDS


def report(name: str, path: Path) -> list[Finding]:
    """The checks of a run; warnings go to the journal. Raises ConfigError."""
    findings = list(check_run(load(path)))
    for finding in findings:
        if finding.severity == "warn":
            say(name, finding.line(), priority=4, DFLASH_EVENT="warned", DFLASH_CODE=finding.code)
    return findings


def environment(given: dict[str, str]) -> dict[str, str]:
    """The trainer's environment; what the unit or an administrator's drop-in has set wins."""
    cache = given.get("CACHE_DIRECTORY", "/var/cache/dflash").split(":")[0]
    return {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "TRITON_CACHE_DIR": f"{cache}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor",
        **given,
    }


def say(name: str, message: str, priority: int = 6, **fields: str) -> None:
    """One entry in the journal, or a line where there is none."""
    try:
        from systemd import journal
    except ImportError:
        print(message, file=sys.stderr, flush=True)
        return
    journal.send(message, PRIORITY=str(priority), SYSLOG_IDENTIFIER=IDENTIFIER, DFLASH_RUN=name, **fields)


def notify(state: str) -> None:
    """sd_notify(3)."""
    try:
        from systemd import daemon
    except ImportError:
        return
    daemon.notify(state)


if __name__ == "__main__":
    sys.exit(main())
