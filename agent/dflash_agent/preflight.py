"""ExecStartPre of dflash-train@.service, as root: proves that GPUs are clean, and leases them.

Nothing is refused here: an exit code of ExecStartPre would be retried whatever it means (systemd.service(5),
RestartPreventExitStatus=). The verdict goes into a file that the launcher, the main process, acts on.
"""

import json
import os
import pwd
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash_agent import leases, manager, outputs, runtime
from dflash_agent.checks import USER, findings_of
from dflash_agent.config import AgentConfig, load_config
from dflash_agent.findings import Finding
from dflash_agent.holders import Holder
from dflash_agent.journal import notify, say
from dflash_agent.leases import Leased, StoreFailed
from dflash_agent.reap import forbidden, reap
from dflash_agent.runfile import ALL_GPUS, NO_GPUS, ConfigError, RunFile, check_name, load, path_of, seconds
from dflash_agent.verdict import Choice, Snapshot, choose, take_snapshot
from dflash_agent.words import span
from dflash_agent.xids import short_bus_id

VERDICTS_DIR = Path("/run/dflash/verdicts")
EXIT_RETRY, EXIT_CANNOT_START = 75, 78
RESTART_SECONDS = 5  # RestartSec= of the unit
LONGEST_BACK_OFF = 600  # seconds
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 5.0  # seconds between two looks at the GPUs
TELL_EVERY = 5.0  # seconds
SETTLE = 10.0  # seconds in which memory of a process that has ended may come back, whatever the policy
REAP_ROUNDS = 3
EXTEND = "EXTEND_TIMEOUT_USEC=600000000"  # of TimeoutStartSec=, while we wait and say so


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the launcher does: become the trainer on these GPUs, or exit with this code and these reasons."""

    invocation: str
    exit_code: int  # 0: go
    gpus: tuple[str, ...] = ()  # UUIDs
    indices: tuple[int, ...] = ()  # the same as nvidia-smi counts them
    buses: tuple[str, ...] = ()  # and where they sit, as domain:bus:device
    findings: tuple[Finding, ...] = ()
    complete: str = ""  # nothing is left to train, in one sentence; then exit_code is 0 and no GPU is leased


def main(arguments: list[str] | None = None) -> int:
    """`preflight NAME`, before a start."""
    words = sys.argv[1:] if arguments is None else arguments
    if len(words) != 1:
        print("usage: preflight NAME", file=sys.stderr)
        return 2
    try:
        name = check_name(words[0])
    except ConfigError as error:
        say(words[0], str(error), priority=3)
        return EXIT_CANNOT_START
    # A stop while we wait is no failure, but death by a signal would be one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    back_off(name)
    notify("STATUS=preflight")
    result = decide(name)
    write(name, result)
    return 0


def decide(name: str) -> Verdict:
    """The whole preflight of a run. Does not raise for anything that a person can mend."""
    invocation = os.environ.get("INVOCATION_ID", "")
    try:
        path = path_of(name)
        run, config = load(path), load_config()
    except ConfigError as error:
        return Verdict(invocation, EXIT_CANNOT_START, findings=(Finding("config", "refuse", str(error)),))
    step = outputs.completed(run)
    if step is not None:
        drafter = Path(run.output.dir) / outputs.DRAFTER_LINK
        text = f"complete: step {step} was the last, drafter in {drafter}; to train anew: dflashctl fresh {name}"
        return Verdict(invocation, 0, complete=text)
    checks = tuple(findings_of([runtime.PYTHON, "-m", "dflash_agent.checks", str(path)]))
    for finding in checks:
        if finding.severity == "warn":
            say(name, finding.line(), priority=4, DFLASH_EVENT="warned", DFLASH_CODE=finding.code)
    refusals = tuple(finding for finding in checks if finding.severity == "refuse")
    if refusals:
        return Verdict(invocation, EXIT_CANNOT_START, findings=refusals)
    try:
        choice = wait_for_gpus(run, config)
    except (OSError, StoreFailed) as error:
        text = f"the GPUs cannot be leased: {error}"
        return Verdict(invocation, EXIT_RETRY, findings=(Finding("gpu-leased", "refuse", text),))
    if choice.refusals:
        settled = choice.hopeless or run.preflight.on_dirty == "fail"
        return Verdict(invocation, EXIT_CANNOT_START if settled else EXIT_RETRY, findings=choice.refusals)
    for finding in choice.findings:
        level = 4 if finding.severity == "warn" else 6
        say(name, finding.line(), priority=level, DFLASH_EVENT="preflight", DFLASH_CODE=finding.code)
    return Verdict(
        invocation,
        0,
        gpus=tuple(gpu.uuid for gpu in choice.gpus),
        indices=tuple(gpu.index for gpu in choice.gpus),
        buses=tuple(short_bus_id(gpu.bus_id) for gpu in choice.gpus),
    )


def wanted_devices(run: RunFile, given: Mapping[str, str]) -> str:
    """`devices` of the run file; CUDA_VISIBLE_DEVICES of a drop-in names them where the file leaves it open."""
    visible = given.get("CUDA_VISIBLE_DEVICES")
    if run.preflight.devices != ALL_GPUS or visible is None:
        return run.preflight.devices
    return NO_GPUS if visible in ("", "-1") else visible


def gpus_wanted(run: RunFile) -> int:
    """How many GPUs "auto" takes: target and drafter of a pair share one."""
    return run.train.dp_pairs


def judge_run(run: RunFile, snapshot: Snapshot) -> Choice:
    """The GPUs that a run would get now, and what is to be said of them; nothing is leased."""
    return choose(snapshot, wanted_devices(run, os.environ), gpus_wanted(run), manager.unit_of(run.name))


def wait_for_gpus(
    run: RunFile,
    config: AgentConfig,
    look: Callable[[AgentConfig], Snapshot] = take_snapshot,
    lease: Callable[[Choice, str, Snapshot], None] | None = None,
) -> Choice:
    """GPUs that are clean and leased, or why there are none after all that the policy allows.

    Raises OSError or StoreFailed if a lease cannot be had or kept.
    """
    unit = manager.unit_of(run.name)
    patience = 0.0 if run.preflight.on_dirty == "fail" else seconds(run.preflight.wait)
    begin = time.monotonic()
    told = begin - TELL_EVERY
    pause = FIRST_PAUSE
    rounds = 0
    while True:
        snapshot = look(config)
        choice = judge_run(run, snapshot)
        if not choice.refusals:
            try:
                (lease or take_leases)(choice, unit, snapshot)
            except Leased:  # another start was faster; the next look sees it
                time.sleep(0.05)
                continue
            return choice
        waited = time.monotonic() - begin
        if choice.hopeless:
            return choice
        if run.preflight.on_dirty == "reap" and rounds < REAP_ROUNDS:
            targets = reap_targets(snapshot, choice, unit)
            if targets:
                rounds += 1
                _reap(run.name, targets, rounds)
                continue
        limit = max(patience, SETTLE) if is_settling(snapshot, choice) else patience
        if waited >= limit:
            return _with_times(choice, waited, rounds)
        if time.monotonic() - told >= TELL_EVERY:
            told = time.monotonic()
            _tell(run.name, choice, waited, limit)
        time.sleep(min(pause, max(0.05, limit - waited)))
        pause = min(pause * 1.5, LONGEST_PAUSE)


def is_settling(snapshot: Snapshot, choice: Choice) -> bool:
    """Whether all that stands in the way is memory that no living process holds, as just after a kill."""
    living = {holder.pid for holder in snapshot.holders if holder.alive}
    return all(f.code == "gpu-memory-unexplained" or (f.pid and f.pid not in living) for f in choice.refusals)


def reap_targets(snapshot: Snapshot, choice: Choice, unit: str) -> list[Holder]:
    """The holders that may be ended, on GPUs where that may be enough to make them clean.

    Of several processes that have a node open, any may be the one that holds the memory.
    """
    try:
        uid = pwd.getpwnam(USER).pw_uid
    except KeyError:
        return []
    by_pid = {holder.pid: holder for holder in snapshot.holders if holder.alive}
    by_gpu: dict[str, list[Finding]] = {}
    for finding in choice.refusals:
        by_gpu.setdefault(finding.gpu, []).append(finding)
    targets: dict[int, Holder] = {}
    for found in by_gpu.values():
        ours = {f.pid for f in found if f.pid in by_pid and forbidden(by_pid[f.pid], uid, unit) is None}
        if all(f.pid in ours or f.code in ("gpu-held", "gpu-memory-unexplained") for f in found):
            targets |= {pid: by_pid[pid] for pid in ours}
    return list(targets.values())


def _reap(name: str, targets: list[Holder], round_number: int) -> None:
    uid = pwd.getpwnam(USER).pw_uid
    again = " again (something starts it anew)" if round_number > 1 else ""
    notify(f"STATUS=ending {len(targets)} processes that were left behind{again}")
    for outcome in reap(targets, uid):
        text = f"reap{again}: {outcome.holder.line()} {outcome.text}"
        say(
            name,
            text,
            priority=5 if outcome.ended else 3,
            DFLASH_EVENT="reaped",
            DFLASH_PID=str(outcome.holder.pid),
        )


def _tell(name: str, choice: Choice, waited: float, limit: float) -> None:
    first, more = choice.refusals[0], len(choice.refusals) - 1
    text = f"waiting for clean GPUs ({span(waited)} of {span(limit)}): {first.text}"
    text += f" (and {more} more reasons)" if more else ""
    notify(f"STATUS={text}\n{EXTEND}")
    say(name, text, priority=5, DFLASH_EVENT="waiting", DFLASH_CODE=first.code)


def _with_times(choice: Choice, waited: float, rounds: int) -> Choice:
    """The choice, its reasons telling how long was waited and that what was ended came back."""
    if waited < 1 and not rounds:
        return choice
    note = f", after waiting {span(waited)}" if waited >= 1 else ""
    note += f"; ended {rounds} times and started anew by something" if rounds >= REAP_ROUNDS else ""
    found = [
        Finding(f.code, f.severity, f.text + (note if f.severity == "refuse" else ""), f.hint, f.gpu, f.pid)
        for f in choice.findings
    ]
    return Choice(choice.gpus, tuple(found), choice.hopeless)


def take_leases(choice: Choice, unit: str, snapshot: Snapshot) -> None:
    """Leases all GPUs of a choice or none, and gives up what the unit had before and uses no more.

    Raises Leased, OSError, StoreFailed.
    """
    ours = {uuid for uuid, lease in snapshot.leases.items() if lease.unit == unit}
    taken: dict[str, int] = {}
    try:
        leases.LEASES_DIR.mkdir(parents=True, exist_ok=True)
        for gpu in choice.gpus:
            if gpu.uuid not in ours:
                taken[gpu.uuid] = leases.acquire(gpu.uuid, unit)
        for uuid, descriptor in taken.items():
            leases.keep(uuid, descriptor)
        for uuid in ours - {gpu.uuid for gpu in choice.gpus}:
            leases.drop(uuid)
    finally:
        for descriptor in taken.values():
            os.close(descriptor)


def back_off(name: str) -> None:
    """Waits 5, 10, 20, … up to 600 s before an automatic restart, the unit's own 5 s included."""
    try:
        restarts: int = manager.unit_state(manager.unit_of(name)).restarts
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
    return min(RESTART_SECONDS << min(restarts - 1, 30), LONGEST_BACK_OFF) - RESTART_SECONDS


def write(name: str, result: Verdict) -> None:
    """Puts a verdict where the launcher reads it."""
    VERDICTS_DIR.mkdir(parents=True, exist_ok=True)
    fresh = VERDICTS_DIR / f".{name}.new"
    fresh.write_text(json.dumps(asdict(result)))
    fresh.chmod(0o644)
    fresh.replace(VERDICTS_DIR / f"{name}.json")


def read(name: str) -> Verdict | None:
    """The newest verdict on a run; None if there is none that can be read."""
    try:
        values = json.loads((VERDICTS_DIR / f"{name}.json").read_text())
        findings = tuple(Finding(**finding) for finding in values.pop("findings"))
        lists: dict[str, Any] = {name: tuple(values.pop(name)) for name in ("gpus", "indices", "buses")}
        return Verdict(**values, **lists, findings=findings)
    except (OSError, ValueError, TypeError, KeyError):
        return None


if __name__ == "__main__":
    sys.exit(main())
