"""The story of a run, out of entries that real runs have left in a journal, and a few that are made up."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from dflash_agent import cli, manager, runfile, story
from dflash_agent.manager import UnitState
from dflash_agent.story import Attempt, Entry, attempts, parse

JOURNALS = Path(__file__).parent / "journals"
INACTIVE = UnitState("inactive", "dead", "success", "", 0, 0.0)


def entries(name: str) -> list[Entry]:
    """What story.read gave for a run of that kind."""
    return parse((JOURNALS / f"{name}.jsonl").read_text().splitlines())


def told(name: str, now: UnitState | None = INACTIVE) -> list[Attempt]:
    return attempts(entries(name), now)


def steps(name: str) -> list[tuple[int | None, int | None]]:
    return [(attempt.first_step, attempt.last_step) for attempt in told(name)]


def endings(name: str) -> list[str]:
    return [attempt.ending for attempt in told(name)]


def test_a_run_that_completes(capsys: pytest.CaptureFixture[str]) -> None:
    (attempt,) = told("complete")
    assert (attempt.first_step, attempt.last_step, attempt.ending) == (0, 20, "complete")
    assert attempt.text == "complete at step 20/20, drafter in /var/lib/dflash/runs/complete/drafter"
    assert attempt.then == "not restarted because it is complete"
    assert attempt.remarks == ()
    assert attempt.ended is not None
    assert 6 < attempt.ended - attempt.began < 7
    assert capsys.readouterr().err == ""


def test_a_run_that_is_killed_twice_and_completes() -> None:
    assert endings("killed") == ["killed", "killed", "complete"]
    assert steps("killed") == [(0, 230), (200, 560), (500, 900)]
    first, second, last = told("killed")
    assert (first.text, first.then) == ("killed by SIGKILL", "restarted after 5 s")
    assert second.then == "restarted after 5 s"
    assert last.remarks == ("restart 2: waiting 5 s before the next attempt",)


def test_a_run_that_trains() -> None:
    now = UnitState("active", "running", "success", "step 501/900 · loss 1.2", 2, 0.0)
    *_, last = told("running", now)
    assert (last.ended, last.ending, last.last_step) == (None, "", 501)
    assert (last.text, last.then) == ("step 501/900 · loss 1.2", "still training")
    *_, last = told("running", None)
    assert (last.ended, last.then) == (None, "systemd cannot be asked whether it still runs")
    starting = UnitState("activating", "start-pre", "success", "waiting for clean GPUs", 2, 0.0)
    begun = [entry for entry in entries("running") if "DFLASH_EVENT" not in entry]
    last = attempts(begun, starting)[-1]
    assert (last.text, last.then) == ("waiting for clean GPUs", "still starting")


def test_a_node_that_goes_down_leaves_an_attempt_without_an_end() -> None:
    cut = [e for e in entries("killed") if not (e.get("MESSAGE_ID") == story.EXITED or "UNIT_RESULT" in e)]
    first, _, _ = attempts([e for e in cut if e.get("MESSAGE_ID") not in (story.RESTARTS, story.STOPPED)], INACTIVE)
    assert first.ending == "lost"
    assert "may have gone down" in first.text
    assert first.then == "started again 5 s later"
    *_, last = told("running", INACTIVE)
    assert (last.ending, last.then) == ("lost", "not restarted since")
    assert last.ended is not None


def test_stops_by_hand_at_every_time() -> None:
    assert endings("stopped") == ["stopped", "stopped", "killed", "stopped", "stopped"]
    assert steps("stopped") == [(0, 2), (None, None), (2, 3), (2, 4), (4, 6)]
    ready, starting, between, restarted, last = told("stopped")
    assert ready.text.startswith("stopped at step 2/5000, drafter in ")
    assert ready.then == "started again 0 s later"
    assert starting.text == "stopped before its first step"
    assert between.then == "not restarted because it was stopped; started again 0 s later"
    assert restarted.then == "restarted by systemctl"
    assert last.then == "not restarted because it was stopped"


def test_what_cannot_start_as_configured_is_refused_with_its_reason() -> None:
    assert endings("refused") == ["refused"] * 3
    trainer, launcher, config = told("refused")
    assert trainer.text.startswith("refused: data /srv/tiny/bad/")
    assert "token 4000" in trainer.text
    assert launcher.text.startswith("refused: data-missing: data /srv/tiny/gone")
    assert config.text.startswith("refused: config: /etc/dflash/runs/refused.toml is not TOML")
    assert config.then == "not restarted because another attempt would end the same way (exit code 78)"


def test_a_refusal_for_busy_gpus_is_tried_again() -> None:
    first, second = told("gpu")
    assert first.text.startswith("refused: gpu-busy: GPU 0")
    assert first.then == "restarted after 5 s"
    assert second.ending == "stopped"
    assert second.remarks == ()  # that the memory is back needs no words


def test_the_watchdog() -> None:
    first, second = told("watchdog")
    assert first.ending == "watchdog"
    assert "WatchdogSec=" in first.text
    assert first.then == "restarted after 5 s"
    assert second.ending == "stopped"


def test_timeouts_of_a_start_and_of_a_stop() -> None:
    start, stop = told("timeout")
    assert (start.ending, stop.ending) == ("timeout", "timeout")
    assert "TimeoutStartSec=" in start.text
    assert "TimeoutStopSec=" in stop.text
    assert "before that: stopped at step 2/6978" in stop.text
    assert stop.then == "not restarted because it was stopped"


def test_the_start_limit() -> None:
    first, second = told("limit")
    assert first.then == "restarted after 0 s"
    assert (second.ending, second.text) == ("killed", "killed by SIGKILL")
    assert "start-limit" in second.then
    assert "systemctl reset-failed" in second.then


def test_what_says_nothing_itself() -> None:
    segfault, no_executable, before = told("spawn")
    assert segfault.text == "killed by SIGSEGV"
    assert no_executable.text.startswith("failed: ExecStart ended with exit code 203: ")
    assert no_executable.text.endswith("Failed at step EXEC spawning /nonexistent: No such file or directory")
    assert before.text == "failed: ExecStartPre ended with exit code 1 and said nothing"


def test_skipped_checkpoints_are_remarked_on() -> None:
    complete, older, none_left = told("damaged")
    assert complete.ending == "complete"
    assert (older.first_step, older.last_step) == (15, 20)
    assert len(older.remarks) == 1
    assert "step-00000020: state.pt has 4 bytes" in older.remarks[0]
    assert none_left.remarks[0].endswith("(and 2 more like it)")
    assert none_left.ending == "refused"
    assert "holds no whole checkpoint" in none_left.text


def changed(name: str, **fields: str) -> list[Entry]:
    """The entries of the first attempt of a run that was killed, with another result."""
    first = told(name)[0].invocation
    return [
        {**entry, **({"UNIT_RESULT": fields["result"]} if "UNIT_RESULT" in entry else {})}
        for entry in entries(name)
        if first in (entry.get("INVOCATION_ID"), entry.get("_SYSTEMD_INVOCATION_ID"))
    ]


def test_results_that_are_hard_to_bring_about() -> None:
    # A kill by the kernel leaves the same entries as any other, but for the result (systemd.service(5)).
    (attempt,) = attempts(changed("killed", result="oom-kill"), INACTIVE)
    assert attempt.ending == "oom-kill"
    assert "was out of memory" in attempt.text
    (attempt,) = attempts(changed("killed", result="core-dump"), INACTIVE)
    assert attempt.ending == "killed"
    (attempt,) = attempts(changed("killed", result="resources"), INACTIVE)
    assert (attempt.ending, attempt.text) == ("failed", "failed: resources, as systemd calls it")
    assert attempt.then == "about to be restarted"


def said(event: str, message: object, **fields: str) -> dict[str, Any]:
    first = entries("killed")[0]
    return {
        "__REALTIME_TIMESTAMP": first["__REALTIME_TIMESTAMP"],
        "_SYSTEMD_INVOCATION_ID": first["INVOCATION_ID"],
        "_PID": "7",
        "DFLASH_EVENT": event,
        "MESSAGE": message,
        **fields,
    }


def test_a_failure_that_is_worth_another_attempt_is_told_with_its_last_sentence() -> None:
    own = [e for e in changed("killed", result="exit-code") if e.get("MESSAGE_ID") != story.EXITED]
    exited = {**entries("refused")[0], **own[0], "MESSAGE_ID": story.EXITED, "EXIT_STATUS": "75"}
    failed = said("failed", "GPU out of memory; lower --token-budget", DFLASH_EXIT_CODE="75")
    (attempt,) = attempts([*own, failed, exited], INACTIVE)
    assert (attempt.ending, attempt.text) == ("failed", "failed: GPU out of memory; lower --token-budget")
    assert attempt.then == "about to be restarted"


@pytest.mark.parametrize("event", ["stopped", "complete"])
def test_an_attempt_that_ends_before_a_step_tells_none(event: str) -> None:
    own = [e for e in entries("stopped") if e.get("INVOCATION_ID") == told("stopped")[1].invocation]
    begun, ended = own[0], own[-2:]
    word = said(event, f"{event}: nothing was done", _SYSTEMD_INVOCATION_ID=begun["INVOCATION_ID"])
    (attempt,) = attempts([begun, word, *ended], INACTIVE)
    assert (attempt.ending, attempt.text) == (event, f"{event}: nothing was done")
    assert (attempt.first_step, attempt.last_step) == (None, None)


def test_a_second_signal_ends_it_without_a_checkpoint() -> None:
    cut = [e for e in entries("stopped") if e.get("DFLASH_EVENT") != "stopped"]
    assert attempts(cut, INACTIVE)[0].text == "stopped at once, without a last checkpoint"


def test_remarks_are_told_once_a_kind_on_one_line_and_an_xid_belongs_to_the_run() -> None:
    xid = said("xid", "GPU 0: Xid 79: has fallen off the bus", _SYSTEMD_INVOCATION_ID="the-agent's")
    more = [
        said("step-skipped", "step 7: the gradient is not finite, step skipped"),
        said("step-skipped", "step 8: the gradient is not finite, step skipped"),
        said("save-failed", list(b"no\nroom \x1b")),
        said("after", "after the run: GPU 0 is held", PRIORITY="4"),
        xid,
    ]
    (attempt,) = attempts([*changed("killed", result="signal"), *more], INACTIVE)
    assert attempt.remarks == (
        "step 7: the gradient is not finite, step skipped (and 1 more like it)",
        "no room ?",
        "after the run: GPU 0 is held",
        "GPU 0: Xid 79: has fallen off the bus",
    )


def test_the_table_tells_the_last_twenty_and_how_many_there_are() -> None:
    many = told("killed") * 9
    lines = story.table("killed", many).splitlines()
    assert lines[0] == "27 attempts, of which these are the last 20"
    assert lines[1].startswith("  8  2026-12-02 ")
    assert lines[-3].split() == ["restart", "2:", "waiting", "5", "s", "before", "the", "next", "attempt"]
    assert len([line for line in lines if ", steps " in line]) == 20
    few = story.table("killed", told("killed"))
    assert few.splitlines()[0].startswith("  1  2026-12-02 ")
    assert "9 s, steps 0 to 230\n     killed by SIGKILL\n     restarted after 5 s\n" in few
    values = json.loads(story.as_json("killed", many))
    assert (values["run"], values["count"], len(values["attempts"])) == ("killed", 27, 20)
    assert values["attempts"][-1]["ending"] == "complete"


def test_no_entries_are_no_attempts() -> None:
    assert attempts([], INACTIVE) == []
    assert "systemctl start dflash-train@run1" in story.table("run1", [])


def test_a_line_that_is_cut_short_is_left_out() -> None:
    lines = (JOURNALS / "complete.jsonl").read_text().splitlines()
    assert len(parse([*lines, lines[0][:40]])) == len(lines)


@pytest.fixture
def known_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that dflashctl knows, and a journal of its own; nobody asks the system's."""
    run = runfile.from_flags("run1", {"target.model": "/m", "data.dir": "/d"})
    (tmp_path / "run1.toml").write_text(runfile.render(run))
    (tmp_path / "machine-id").write_text("0123\n")
    (tmp_path / "0123").mkdir()
    (tmp_path / "0123" / "system.journal").touch()
    monkeypatch.setattr(runfile, "RUNS_DIR", tmp_path)
    monkeypatch.setattr(story, "JOURNALS", (tmp_path, tmp_path / "nowhere"))
    monkeypatch.setattr(story, "MACHINE_ID", tmp_path / "machine-id")
    monkeypatch.setattr(manager, "unit_state", lambda _: INACTIVE)
    return tmp_path


def test_the_command_asks_for_the_last_step_only_where_it_is_not_told(
    known_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert known_run.exists()
    asked: list[list[str]] = []

    def journalctl(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        lines = (JOURNALS / "killed.jsonl").read_text().splitlines(keepends=True)
        chosen = [line for line in lines if ('"step"' in line) == ("DFLASH_EVENT=step" in command)]
        chosen = [line for line in chosen if "--lines=1" not in command or command[-1].partition("=")[2] in line]
        return subprocess.CompletedProcess(command, 0, "".join(chosen), "")

    monkeypatch.setattr(subprocess, "run", journalctl)
    assert cli.main(["explain", "run1", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["attempts"]
    assert [one["last_step"] for one in shown] == [230, 560, 900]
    assert len(asked) == 3  # all, and the last steps of the two that were killed


@pytest.mark.parametrize(
    ("code", "error", "exit_code"), [(1, "", 0), (1, "Failed to open files: Input/output error\n", 1)]
)
def test_a_journal_that_cannot_be_read_is_told_on_one_line(
    code: int,
    error: str,
    exit_code: int,
    known_run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert known_run.exists()
    monkeypatch.setattr(
        subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, code, "", error)
    )
    assert cli.main(["explain", "run1"]) == exit_code
    shown = capsys.readouterr()
    assert shown.err == (f"dflashctl: journalctl failed: {error}" if exit_code else "")
    assert ("systemctl start" in shown.out) == (exit_code == 0)


def test_a_journal_that_hangs_is_told_on_one_line(
    known_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert known_run.exists()

    def hangs(command: list[str], timeout: float, **_: object) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hangs)
    assert cli.main(["explain", "run1"]) == 1
    assert capsys.readouterr().err == "dflashctl: journalctl gave no answer within 60 s; is the disk slow?\n"


def test_a_run_that_is_not_known_is_refused(known_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "gone"]) == 78
    assert capsys.readouterr().err == f"dflashctl: {known_run}/gone.toml does not exist; runs are: run1\n"
