"""What `dflashctl explain` tells: the attempts of a run, out of what it and systemd have left in the journal.

The fields are those of systemd.journal-fields(7) and of the trainer's and the agent's own entries; systemd's
messages have the ids of `journalctl --catalog` (sd-messages.h).
"""

import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash_agent.manager import UnitState
from dflash_agent.words import printable, span

Entry = Mapping[str, Any]  # of `journalctl -o json`

MOST = 20  # attempts that are told, as many as a unit makes in a row
DEADLINE = 60  # seconds for one question to journalctl
JOURNALS = (Path("/var/log/journal"), Path("/run/log/journal"))
MACHINE_ID = Path("/etc/machine-id")

STOPPING = "de5b426a63be47a7b6ac3eaac82e2f6f"
STOPPED = "9d1aaa27d60140bd96365438aad20286"
SUCCEEDED = "7ad2d189f7e94e70a38c781354912448"
FAILED = "d9b373ed55a64feb8242e02dbe79a49c"
EXITED = "98e322203f7a4ed290d09fe03c09fe15"
RESTARTS = "5eb03494b6584870a536b337290809b3"
NOT_SPAWNED = "641257651c1b4ec9a8624d7a40a9e1e7"
TOO_QUICKLY = "Start request repeated too quickly."  # has no id

ENDS = ("complete", "stopped", "failed", "refused")
REMARKS = (
    "back-off",
    "reaped",
    "checkpoint-skipped",
    "out-of-memory",
    "save-failed",
    "step-skipped",
    "after",
    "gpu-failed",
)
EVENTS = ("training", *ENDS, *REMARKS)
WARNING = 4  # syslog(3)
CANNOT_START = "78"
FIELDS = (
    "MESSAGE",
    "MESSAGE_ID",
    "PRIORITY",
    "UNIT_RESULT",
    "EXIT_CODE",
    "EXIT_STATUS",
    "COMMAND",
    "JOB_TYPE",
    "INVOCATION_ID",
    "_SYSTEMD_INVOCATION_ID",
    "_PID",
    "DFLASH_EVENT",
    "DFLASH_STEP",
    "DFLASH_EXIT_CODE",
)


class JournalUnread(Exception):
    """The journal could not be read; str() is one line."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One invocation of a run's unit."""

    invocation: str
    began: float  # unix seconds
    ended: float | None  # None while it goes on; of one that is lost, when it was last heard of
    first_step: int | None  # done before it: 0 at a new beginning. None if it took no step
    last_step: int | None  # the last one that is known to be done
    ending: str  # complete, stopped, refused, failed, killed, oom-kill, watchdog, timeout, lost; empty: goes on
    text: str  # the same in a sentence
    then: str  # what was done next
    remarks: tuple[str, ...]  # what else there was to say of it


def read(unit: str) -> list[Entry]:
    """The entries that tell the story of a unit, oldest first, but for those of the newest steps, which come last.

    Of the steps, only the newest of each attempt that does not tell itself how far it came is read. Raises
    PermissionError if the caller may not read the system's journal, JournalUnread.
    """
    for directory in JOURNALS:  # journalctl would show what the caller may see, and leave out the rest
        with contextlib.suppress(FileNotFoundError):
            (directory / MACHINE_ID.read_text().strip() / "system.journal").open("rb").close()
    own = f"_SYSTEMD_UNIT={unit}"
    entries = _ask(
        *(own, *(f"DFLASH_EVENT={event}" for event in EVENTS)),
        *("+", own, f"MESSAGE_ID={NOT_SPAWNED}"),
        *("+", "_PID=1", f"UNIT={unit}"),
        *("+", "_UID=0", f"OBJECT_SYSTEMD_UNIT={unit}", "DFLASH_EVENT=xid"),
    )
    newest = list(_by_invocation(entries).items())[-MOST:]
    unsaid = [name for name, told in newest if not any(_event(e) in ("complete", "stopped") for e in told)]
    for invocation in unsaid:
        entries += _ask("--lines=1", own, "DFLASH_EVENT=step", f"_SYSTEMD_INVOCATION_ID={invocation}")
    return entries


def _ask(*words: str) -> list[Entry]:
    options = ("--output=json", f"--output-fields={','.join(FIELDS)}", "--all", "--quiet", "--no-pager")
    try:
        done = subprocess.run(
            ["journalctl", *options, *words], capture_output=True, text=True, timeout=DEADLINE, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise JournalUnread(f"journalctl gave no answer within {DEADLINE} s; is the disk slow?") from error
    if done.returncode and not done.stdout:
        reason = (done.stderr.strip().splitlines() or [""])[-1]
        if reason:  # without any entry journalctl fails too, and says nothing
            raise JournalUnread(f"journalctl failed: {reason}")
    return parse(done.stdout.splitlines())


def parse(lines: Iterable[str]) -> list[Entry]:
    """The entries in lines of `journalctl -o json`; a line that is cut short is left out."""
    entries = []
    for line in lines:
        with contextlib.suppress(ValueError):
            entries.append(json.loads(line))
    return entries


def attempts(entries: Iterable[Entry], now: UnitState | None) -> list[Attempt]:
    """The attempts that entries tell of, oldest first. `now`: the unit's state; None if nobody knows it."""
    grouped = list(_by_invocation(entries).items())
    following = [told for _, told in grouped[1:]]
    return [
        _attempt(invocation, told, after, now)
        for (invocation, told), after in zip(grouped, [*following, None], strict=False)
    ]


def _by_invocation(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    """The entries of each attempt; what is of none, as an Xid error, belongs to the one before it."""
    grouped: dict[str, list[Entry]] = {}
    last = ""
    for entry in entries:
        by_manager = entry.get("_PID") == "1"
        found = entry.get("INVOCATION_ID" if by_manager else "_SYSTEMD_INVOCATION_ID")
        if isinstance(found, str) and (by_manager or _event(entry) != "xid"):
            last = found
        if last:
            grouped.setdefault(last, []).append(entry)
    return grouped


def _attempt(invocation: str, told: list[Entry], after: list[Entry] | None, now: UnitState | None) -> Attempt:
    done = ("step", "training", "complete", "stopped")  # the last two without a step if none was taken
    steps = [int(e["DFLASH_STEP"]) for e in told if _event(e) in done and "DFLASH_STEP" in e]
    trained = _last(told, DFLASH_EVENT="training")
    end = _last(told, MESSAGE_ID=SUCCEEDED) or _first(told, MESSAGE_ID=FAILED)
    live = after is None and (now is None or now.active not in ("inactive", "failed"))
    if end is not None:
        ended: float | None = _time(end)
        ending, text = _ending(told, end)
        then = _then(told, ending, _time(end), after, now)
    elif live:
        ended, ending = None, ""
        text, then = _under_way(trained is not None, now)
    else:
        ended, ending = max(map(_time, told)), "lost"
        text = "lost: the journal does not tell its end; the node may have gone down"
        then = f"started again {span(_time(after[0]) - ended)} later" if after else "not restarted since"
    return Attempt(
        invocation=invocation,
        began=_time(told[0]),
        ended=ended,
        first_step=int(trained["DFLASH_STEP"]) - 1 if trained else None,
        last_step=max(steps, default=None),
        ending=ending,
        text=text,
        then=then,
        remarks=_remarks(told),
    )


def _ending(told: list[Entry], end: Entry) -> tuple[str, str]:
    """How an attempt ended, in a word and in a sentence."""
    said = next((e for e in reversed(told) if _event(e) in ENDS), None)
    event = _event(said) if said else ""
    message = _message(said) if said else ""
    exited = _exited(told)
    code = exited.get("EXIT_STATUS", "")
    late = f"; before that: {message}" if message else ""
    match end.get("UNIT_RESULT"):
        case None if event in ("complete", "stopped"):
            return event, message
        case None if _last(told, DFLASH_EVENT="training"):
            return "stopped", "stopped at once, without a last checkpoint"
        case None:
            return "stopped", "stopped before its first step"
        case "timeout" if _last(told, MESSAGE_ID=STOPPING):
            return "timeout", f"killed: it did not end within TimeoutStopSec= of the unit{late}"
        case "timeout":
            return "timeout", f"ended by systemd: no first step within TimeoutStartSec= of the unit{late}"
        case "exit-code" if event == "refused" or (event == "failed" and code == CANNOT_START):
            return "refused", f"refused: {message.removeprefix('refuse').lstrip()}"
        case "exit-code" if event == "failed":
            return "failed", f"failed: {message}"
        case "exit-code":
            why = _last(told, MESSAGE_ID=NOT_SPAWNED)
            last = f": {_message(why)}" if why else " and said nothing"
            return "failed", f"failed: {exited.get('COMMAND', 'a process')} ended with exit code {code}{last}"
        case result:
            if by_others := ended_by_others(str(result), code):
                return by_others[0], by_others[1] + late
            return "failed", f"failed: {result}, as systemd calls it{late}"


def ended_by_others(result: str, status: str) -> tuple[str, str] | None:
    """In a word and in a sentence, how an attempt ended that could not say it itself; None if it could.

    `result` and `status` as in $SERVICE_RESULT and $EXIT_STATUS (systemd.exec(5)).
    """
    match result:
        case "signal" | "core-dump":
            with contextlib.suppress(ValueError):
                status = signal.Signals(int(status)).name
            name = status if status.startswith("SIG") else f"SIG{status}" if status else "a signal"
            return "killed", f"killed by {name}"
        case "oom-kill":
            why = "the host, or MemoryMax= of the unit, was out of memory; see `journalctl -k -g oom`"
            return "oom-kill", f"killed by the kernel (oom-kill): {why}"
        case "watchdog":
            limit = "WatchdogSec= of the unit, or four times the slowest before"
            why = f"no step was done in {limit}; every thread's stack is in the journal"
            return "watchdog", f"ended by the watchdog: {why}"
        case "timeout":
            limits = "to its first step within TimeoutStartSec=, or to its end within TimeoutStopSec="
            return "timeout", f"ended by systemd: it did not come {limits} of the unit"
        case _:
            return None


def _then(told: list[Entry], ending: str, ended: float, after: list[Entry] | None, now: UnitState | None) -> str:
    """What was done after an attempt that has ended."""
    stopped = _last(told, MESSAGE_ID=STOPPED) or {}
    exited = _exited(told)
    scheduled = _last(told, MESSAGE_ID=RESTARTS)
    why_not = ""
    if any(_message(e).endswith(TOO_QUICKLY) for e in told if e.get("_PID") == "1"):
        why_not = "not restarted because of too many attempts (start-limit): systemctl reset-failed, then start it"
    elif ending == "complete":
        why_not = "not restarted because it is complete"
    elif ending == "stopped" or stopped.get("JOB_TYPE") == "stop":
        why_not = "not restarted because it was stopped"
    elif exited.get("EXIT_STATUS") == CANNOT_START:
        why_not = "not restarted because another attempt would end the same way (exit code 78)"
    if after:
        gap = span(_time(after[0]) - ended)
        if scheduled and not why_not:
            return f"restarted after {gap}"
        if stopped.get("JOB_TYPE") == "restart":
            return "restarted by systemctl"
        if not why_not or ending in ("complete", "stopped"):
            return f"started again {gap} later"
        return f"{why_not}; started again {gap} later"
    if not why_not and (scheduled or (now is not None and now.sub == "auto-restart")):
        return "about to be restarted"
    return why_not or "not restarted; the journal does not say why"


def _exited(told: list[Entry]) -> Entry:
    """How the main process ended, or, if there was none, the one that failed; empty if none did."""
    return _last(told, MESSAGE_ID=EXITED, COMMAND="ExecStart") or _last(told, MESSAGE_ID=EXITED) or {}


def _under_way(trained: bool, now: UnitState | None) -> tuple[str, str]:
    if now is None:
        return "its end is not in the journal", "systemd cannot be asked whether it still runs"
    word = "stopping" if now.active == "deactivating" else "training" if trained else "starting"
    return now.status or "has not said anything yet", f"still {word}"


def _remarks(told: list[Entry]) -> tuple[str, ...]:
    """What an attempt said beside its beginning and end: of each kind the first, and how many more there are."""
    kinds: dict[str, list[Entry]] = {}
    for entry in told:
        event = _event(entry)
        good_news = event == "after" and int(entry.get("PRIORITY", WARNING)) > WARNING
        if event in (*REMARKS, "xid") and not good_news:
            kinds.setdefault(event, []).append(entry)
    if "gpu-failed" in kinds:
        kinds.pop("xid", None)  # the same, as it happened
    return tuple(
        _message(found[0]) + (f" (and {len(found) - 1} more like it)" if len(found) > 1 else "")
        for found in kinds.values()
    )


def _event(entry: Entry) -> str:
    return str(entry.get("DFLASH_EVENT", ""))


def _time(entry: Entry) -> float:
    return int(entry["__REALTIME_TIMESTAMP"]) / 1e6


def _message(entry: Entry) -> str:
    """MESSAGE on one line, safe for a terminal; journalctl gives what is no plain text as a list of bytes."""
    value = entry.get("MESSAGE") or ""
    if isinstance(value, list):
        value = bytes(value).decode(errors="backslashreplace") if all(type(b) is int for b in value) else value[-1]
    return printable(str(value))


def _first(told: Iterable[Entry], **fields: str) -> Entry | None:
    return next((e for e in told if all(e.get(name) == value for name, value in fields.items())), None)


def _last(told: list[Entry], **fields: str) -> Entry | None:
    return _first(reversed(told), **fields)


def table(run: str, told: list[Attempt]) -> str:
    """The attempts for people, oldest first, at most the last MOST: a line each, below it what became of it."""
    if not told:
        return (
            f"the journal tells of no attempt of {run}; the first begins with: systemctl start dflash-train@{run}"
        )
    lines = [f"{len(told)} attempts, of which these are the last {MOST}"] if len(told) > MOST else []
    for number, attempt in list(enumerate(told, start=1))[-MOST:]:
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(attempt.began))
        lasted = span((time.time() if attempt.ended is None else attempt.ended) - attempt.began)
        lines.append(f"{number:>3}  {began}, {lasted}, {_steps(attempt)}")
        lines += [f"     {text}" for text in (*attempt.remarks, attempt.text, attempt.then)]
    return "\n".join(lines)


def _steps(attempt: Attempt) -> str:
    if attempt.first_step is None:
        return "no step"
    return f"steps {attempt.first_step} to {attempt.last_step}"


def as_json(run: str, told: list[Attempt]) -> str:
    """The same for programs: the run, how many attempts there are, and the last MOST of them, oldest first."""
    values = {"run": run, "count": len(told), "attempts": [asdict(attempt) for attempt in told[-MOST:]]}
    return json.dumps(values, indent=2)
