"""The story of real runs, and their checkpoints, as dflashctl tells them on a booted node."""

import json
from typing import Any

from container import Machine
from dflash_agent import outputs

from .node import make_run, show, start, wait_for
from .test_faults import drop_in
from .test_training import output_of, step_of, wait_until_done


def explain(node: Machine, name: str) -> list[dict[str, Any]]:
    """The attempts of a run."""
    told: dict[str, Any] = json.loads(node.run("dflashctl", "explain", name, "--json").stdout)
    assert told["count"] == len(told["attempts"])
    attempts: list[dict[str, Any]] = told["attempts"]
    return attempts


def test_a_run_that_is_killed_and_completes_is_told_while_and_after_it_trains(node: Machine) -> None:
    unit = make_run(node, "told", max_steps=600, save_interval=100)
    start(node, unit)
    wait_for(lambda: step_of(node, "told") >= 120, 120, "step 120")
    node.run("systemctl", "kill", "--kill-whom=main", "--signal=SIGKILL", unit)
    wait_for(lambda: show(node, unit, "NRestarts") == "1", 60, "the restart")
    wait_for(lambda: show(node, unit, "ActiveState") == "active", 120, "the first step")
    killed, now = explain(node, "told")
    assert (killed["ending"], killed["text"]) == ("killed", "killed by SIGKILL")
    assert killed["first_step"] == 0
    assert killed["last_step"] >= 120
    assert killed["then"].startswith("restarted after ")
    if not now["ending"]:  # it may have been faster than we
        assert now["then"] == "still training"
        assert now["ended"] is None
    wait_until_done(node, unit)
    _, complete = explain(node, "told")
    assert (complete["first_step"], complete["last_step"]) == (killed["last_step"] // 100 * 100, 600)
    assert complete["text"].startswith("complete at step 600/600")
    assert complete["then"] == "not restarted because it is complete"
    table = node.run("dflashctl", "explain", "told").stdout
    assert "killed by SIGKILL" in table
    assert "complete at step 600/600" in table


def test_a_stop_and_a_refusal_are_told_with_their_reasons(node: Machine) -> None:
    unit = make_run(node, "halted", max_steps=5000)
    start(node, unit)
    node.run("systemctl", "stop", unit)
    node.run("sed", "-i", 's,^dir = .*data.*,dir = "/srv/tiny/gone",', "/etc/dflash/runs/halted.toml")
    assert node.run("systemctl", "start", unit, check=False).returncode != 0
    stopped, refused = explain(node, "halted")
    assert (stopped["ending"], stopped["first_step"]) == ("stopped", 0)
    assert stopped["then"].startswith("started again ")
    assert refused["text"].startswith("refused: data-missing: data /srv/tiny/gone")
    assert refused["last_step"] is None
    assert "exit code 78" in refused["then"]


def test_the_start_limit_is_told_as_the_reason_why_there_is_no_other_attempt(node: Machine) -> None:
    unit = make_run(node, "limited", max_steps=1_000_000)
    with drop_in(node, unit, "[Unit]\nStartLimitBurst=1\n[Service]\nRestartSec=100ms\n"):
        start(node, unit)
        node.run("systemctl", "kill", "--kill-whom=main", "--signal=SIGKILL", unit)
        wait_for(lambda: show(node, unit, "ActiveState") == "failed", 60, "the limit")
        (attempt,) = explain(node, "limited")
        assert attempt["text"] == "killed by SIGKILL"
        assert "start-limit" in attempt["then"]


def test_who_may_not_read_the_journal_is_told_to_use_sudo(node: Machine) -> None:
    make_run(node, "secret")
    command = ("dflashctl", "explain", "secret")
    user = ("setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups")
    refused = node.run(*user, *command, check=False)
    assert refused.returncode == 78
    assert refused.stderr.count("\n") == 1
    assert refused.stderr.endswith("Permission denied; this needs root: sudo dflashctl explain secret\n")
    assert "no attempt of secret" in node.run(*command).stdout
    reader = ("setpriv", "--reuid=nobody", "--regid=nogroup", "--groups=systemd-journal")
    assert "no attempt of secret" in node.run(*reader, *command).stdout


def test_a_damaged_checkpoint_is_named_with_the_one_that_a_start_uses_instead(node: Machine) -> None:
    unit = make_run(node, "torn", max_steps=1_000_000)
    assert "begins at step 0" in node.run("dflashctl", "checkpoints", "torn").stdout
    start(node, unit)
    wait_for(lambda: step_of(node, "torn") >= 20, 120, "step 20")
    node.run("systemctl", "stop", unit)
    *_, (before, _), (last, newest) = outputs.checkpoint_dirs(output_of(node, "torn"))
    assert f"checkpoint: step {last}, " in node.run("dflashctl", "verify", "torn").stdout
    state = newest / "state.pt"
    state.write_bytes(state.read_bytes()[:-1] + b"!")
    lines = node.run("dflashctl", "checkpoints", "torn").stdout.splitlines()
    assert "damaged: state.pt does not match its checksum" in lines[1]
    assert lines[2].endswith("whole, a start goes on from it")
    warned = node.run("dflashctl", "verify", "torn").stdout
    assert f"warn    checkpoint-damaged: step {last} (state.pt does not match its checksum)" in warned
    start(node, unit)
    node.run("systemctl", "stop", unit)
    attempt = explain(node, "torn")[-1]
    assert attempt["first_step"] == before
    assert "state.pt does not match its checksum" in attempt["remarks"][0]
    for _, directory in outputs.checkpoint_dirs(output_of(node, "torn")):
        (directory / "state.pt").unlink()
    assert node.run("dflashctl", "checkpoints", "torn", check=False).returncode == 1
    refused = node.run("dflashctl", "verify", "torn", check=False)
    assert refused.returncode == 78
    assert "holds no whole checkpoint" in refused.stdout
