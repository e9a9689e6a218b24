"""ExecStopPost of dflash-train@.service, as root, and OnFailure=: what is to be said of an attempt.

It sees that the memory of the GPUs is back, tells which Xid errors there were, and, where the trainer could not say
itself what ended it, says so in the last line (systemd.exec(5), $SERVICE_RESULT).
"""

import os
import sys
import time
from pathlib import Path

from dflash_agent import checkpoints, manager, outputs, story, verdict, xids
from dflash_agent.config import AgentConfig, load_config
from dflash_agent.gpus import Gpu
from dflash_agent.journal import say, say_of
from dflash_agent.preflight import (
    EXIT_CANNOT_START,
    FIRST_PAUSE,
    LONGEST_PAUSE,
    SETTLE,
    VERDICTS_DIR,
    Verdict,
    read,
)
from dflash_agent.runfile import ConfigError, check_name, load, path_of
from dflash_agent.verdict import take_snapshot
from dflash_agent.words import span
from dflash_agent.xids import OF_APPLICATIONS, Xid


def main(arguments: list[str] | None = None) -> int:
    """`aftermath NAME` after an attempt, `aftermath --failed NAME` when there is no other."""
    words = sys.argv[1:] if arguments is None else arguments
    for_good = words[:1] == ["--failed"]
    if len(words) != 1 + for_good:
        print("usage: aftermath [--failed] NAME", file=sys.stderr)
        return 2
    try:
        name = check_name(words[-1])
    except ConfigError as error:
        say(words[-1], str(error), priority=3)
        return EXIT_CANNOT_START
    if for_good:
        say_last_word(name)
        return 0
    before = read(name)
    if before is None or before.invocation != os.environ.get("INVOCATION_ID", ""):
        return 0  # it did not come so far
    if before.gpus:
        look_after(name, before)
    say_ending(name)
    if before.gpus:
        say_xids(name, before)
    return 0


def look_after(name: str, before: Verdict) -> None:
    """Sees that the memory of a run's GPUs is back, and warns with the holder if it is not."""
    try:
        config = load_config()
    except ConfigError:
        config = AgentConfig()
    unit = manager.unit_of(name)
    begin = time.monotonic()
    pause = FIRST_PAUSE
    while True:
        snapshot = take_snapshot(config)
        gpus = [gpu for gpu in snapshot.reading.gpus if gpu.uuid in before.gpus]
        left = [f for gpu in gpus for f in verdict.judge(snapshot, gpu, unit) if f.severity == "refuse"]
        waited = time.monotonic() - begin
        if not left or waited >= SETTLE:
            break
        time.sleep(pause)
        pause = min(pause * 1.5, LONGEST_PAUSE)
    missing = set(before.gpus) - {gpu.uuid for gpu in gpus}
    if snapshot.reading.problem or missing:
        reason = snapshot.reading.problem or f"{', '.join(sorted(missing))} not found"
        say(name, f"after the run: its GPUs cannot be looked at: {reason}", priority=4, DFLASH_EVENT="after")
    for finding in left:
        text = f"after the run, {span(waited)} later: {finding.line()}"
        say(name, text, priority=4, DFLASH_EVENT="after", DFLASH_CODE=finding.code)
    if not left and gpus:
        say(name, f"the memory of {_labels(gpus)} is back", DFLASH_EVENT="after")


def say_ending(name: str) -> None:
    """One sentence on an attempt that others ended; on its own errors the trainer has had the last word."""
    told = story.ended_by_others(os.environ.get("SERVICE_RESULT", ""), os.environ.get("EXIT_STATUS", ""))
    if told is None:
        return
    ending, text = told
    say(name, f"{text}; {_goes_on_from(name)}", priority=3, DFLASH_EVENT="ended", DFLASH_ENDING=ending)


def _goes_on_from(name: str) -> str:
    """Where the next attempt begins, by the sizes of files: it reads their checksums itself."""
    try:
        output = Path(load(path_of(name)).output.dir)
        full = [path for _, path in outputs.checkpoint_dirs(output) if checkpoints.has_all_files(path)]
    except (ConfigError, OSError) as error:
        return f"its checkpoints cannot be looked at: {error}"
    return f"the next attempt goes on from {full[-1]}" if full else "there is no checkpoint to go on from"


def say_xids(name: str, before: Verdict) -> None:
    """The errors of a run's GPUs since its preflight, each once a GPU."""
    try:
        since = (VERDICTS_DIR / f"{name}.json").stat().st_mtime
    except OSError:
        return
    for xid in xids.recent():
        if xid.bus_id in before.buses and xid.time >= since:
            say(name, _sentence(xid), priority=3, DFLASH_EVENT="gpu-failed", DFLASH_XID=str(xid.code))


def _sentence(xid: Xid) -> str:
    who = "the program's fault or the GPU's" if xid.code in OF_APPLICATIONS else "a fault of the GPU or its link"
    hint = "look at `journalctl -k -g Xid`"
    return f"GPU {xid.bus_id} had Xid {xid.code} in this attempt ({xid.meaning}), {who}; {hint}"


def say_last_word(name: str) -> None:
    """When the limit of starts is reached: systemd says only that. A refusal has said what to do."""
    unit = manager.unit_of(name)
    try:
        state = manager.unit_state(unit)
    except manager.ManagerAway as error:
        say_of(unit, f"{unit} has failed; systemd cannot be asked why ({error})", priority=4)
        return
    if state.restarts and (state.result, state.exit_status) != ("exit-code", EXIT_CANNOT_START):
        text = f"{unit} has failed {state.restarts + 1} times and is not started again; mend what its attempts say"
        remedy = f"then: systemctl reset-failed {unit} && systemctl start {unit}"
        say_of(unit, f"{text}, {remedy}", priority=3, DFLASH_EVENT="start-limit", DFLASH_RUN=name)


def _labels(gpus: list[Gpu]) -> str:
    return ", ".join(gpu.label for gpu in gpus)


if __name__ == "__main__":
    sys.exit(main())
