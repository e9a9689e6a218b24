"""A training as systemd owns it: ready, killed, resumed, stopped, refused, told."""

import hashlib
import json
from pathlib import Path

from conftest import save_dataset
from container import Machine
from dflash_agent import outputs

from .node import DATA, journal, make_run, show, wait_for

OUTPUTS = "/var/lib/dflash/runs"


def output_of(node: Machine, name: str) -> Path:
    return node.path(f"{OUTPUTS}/{name}")


def step_of(node: Machine, name: str) -> int:
    row = outputs.last_metrics(output_of(node, name))
    return row["step"] if row else 0


def drafter_hash(node: Machine, name: str) -> str:
    weights = sorted(output_of(node, name).glob("checkpoints/*/drafter/model.safetensors"))[-1]
    return hashlib.sha256(weights.read_bytes()).hexdigest()


def wait_until_done(node: Machine, unit: str, seconds: float = 180) -> None:
    wait_for(lambda: show(node, unit, "ActiveState") in ("inactive", "failed"), seconds, f"{unit} to end")


def test_start_returns_after_the_first_step_and_the_run_belongs_to_dflash(node: Machine) -> None:
    unit = make_run(node, "ready", max_steps=600)
    node.run("systemctl", "start", unit)
    assert step_of(node, "ready") >= 1
    assert show(node, unit, "ActiveState") == "active"
    assert show(node, unit, "Slice") == "dflash.slice"
    assert show(node, unit, "StatusText").startswith("step ")
    main = show(node, unit, "MainPID")
    assert node.run("stat", "-c", "%U", f"/proc/{main}").stdout.strip() == "dflash"
    wait_until_done(node, unit)
    assert show(node, unit, "Result") == "success"
    assert "complete at step 600/600" in journal(node, unit)
    again = node.run("systemctl", "start", unit)  # nothing is left to do, and that is no failure
    assert again.returncode == 0
    wait_until_done(node, unit)
    assert show(node, unit, "Result") == "success"


def test_killed_twice_it_resumes_with_back_off_and_ends_with_the_same_drafter_bit_for_bit(node: Machine) -> None:
    settings = {"max_steps": 900, "save_interval": 100, "log_interval": 10, "keep_last": 2}
    unbroken = make_run(node, "unbroken", **settings)
    node.run("systemctl", "start", unbroken)
    wait_until_done(node, unbroken)
    unit = make_run(node, "broken", **settings)
    node.run("systemctl", "start", unit)
    for step in (230, 560):
        wait_for(lambda step=step: step_of(node, "broken") >= step, 120, f"step {step}")  # type: ignore[misc]
        node.run("systemctl", "kill", "--kill-whom=main", "--signal=SIGKILL", unit)
        wait_for(lambda: show(node, unit, "ActiveState") != "active", 30, "the kill to be noticed")
        wait_for(lambda: show(node, unit, "ActiveState") == "active", 120, "the restart to take a step")
    wait_until_done(node, unit)
    assert show(node, unit, "Result") == "success"
    told = journal(node, unit)
    assert told.count("resuming from") == 2
    assert "restart 2: waiting 5 s" in told
    assert drafter_hash(node, "broken") == drafter_hash(node, "unbroken")
    unbroken_loss, loss = (outputs.last_metrics(output_of(node, name)) for name in ("unbroken", "broken"))
    assert unbroken_loss is not None
    assert loss is not None
    assert unbroken_loss["loss"] == loss["loss"]


def test_stop_saves_a_checkpoint_and_the_next_start_goes_on_from_it(node: Machine) -> None:
    unit = make_run(node, "stopped", max_steps=5000, save_interval=5000)
    node.run("systemctl", "start", unit)
    node.run("systemctl", "stop", unit)
    assert show(node, unit, "Result") == "success"
    assert show(node, unit, "ExecMainStatus") == "0"
    ((step, _),) = outputs.checkpoint_dirs(output_of(node, "stopped"))
    node.run("systemctl", "start", unit)
    assert f"resuming from {OUTPUTS}/stopped/checkpoints/{outputs.checkpoint_name(step)}" in journal(node, unit)
    status = json.loads(node.run("dflashctl", "status", "stopped", "--json").stdout)[0]
    assert status["state"] == "training"
    assert status["step"] > step
    assert status["total_steps"] == 5000
    table = node.run("dflashctl", "status").stdout
    assert "stopped" in table
    assert f"step-{step:08}" in table
    node.run("systemctl", "stop", unit)


def test_data_that_cannot_be_trained_on_is_refused_once_with_the_reason_on_the_terminal(node: Machine) -> None:
    save_dataset(node.path("/srv/tiny/bad"), {"input_ids": [[5, 6, 4000]], "loss_mask": [[1, 1, 1]]})
    unit = make_run(node, "bad-data", data_dir="/srv/tiny/bad")
    failed = node.run("systemctl", "start", unit, check=False)
    assert failed.returncode != 0
    assert show(node, unit, "ExecMainStatus") == "78"
    assert show(node, unit, "NRestarts") == "0"
    assert show(node, unit, "ActiveState") == "failed"
    assert "token 4000" in node.run("systemctl", "status", unit, check=False).stdout
    assert "token 4000" in node.run("dflashctl", "status", "bad-data").stdout
    verified = node.run("dflashctl", "verify", "bad-data", check=False)
    assert verified.returncode == 78
    assert "token 4000" in verified.stdout


def test_changed_settings_are_refused_and_fresh_begins_anew(node: Machine) -> None:
    unit = make_run(node, "changed")
    node.run("systemctl", "start", unit)
    wait_until_done(node, unit)
    before = drafter_hash(node, "changed")
    node.run("sed", "-i", "s/^lr = .*/lr = 1e-4/", "/etc/dflash/runs/changed.toml")
    assert node.run("systemctl", "start", unit, check=False).returncode != 0
    assert "train.lr 0.002 there, 0.0001 now" in node.run("systemctl", "status", unit, check=False).stdout
    assert drafter_hash(node, "changed") == before
    aside = node.run("dflashctl", "fresh", "changed").stdout
    assert "previous-" in aside
    node.run("systemctl", "start", unit)
    wait_until_done(node, unit)
    assert show(node, unit, "Result") == "success"
    assert drafter_hash(node, "changed") != before


def test_the_journal_has_fields_for_programs(node: Machine) -> None:
    unit = make_run(node, "fields")
    node.run("systemctl", "start", unit)
    wait_until_done(node, unit)
    lines = node.run("journalctl", "--unit", unit, "--output=json", "DFLASH_EVENT=step").stdout.splitlines()
    entries = [json.loads(line) for line in lines]
    assert [int(entry["DFLASH_STEP"]) for entry in entries] == [1, 5, 10, 15, 20]
    for entry in entries:
        assert entry["DFLASH_RUN"] == "fields"
        assert entry["_SYSTEMD_UNIT"] == unit
        assert float(entry["DFLASH_LOSS"]) > 0
        assert float(entry["DFLASH_TOKENS_PER_S"]) > 0
        assert entry["MESSAGE"].startswith("step ")


def test_a_running_training_survives_the_removal_of_its_data(node: Machine) -> None:
    node.run("cp", "-r", DATA, "/srv/tiny/fleeting")
    unit = make_run(node, "fleeting", data_dir="/srv/tiny/fleeting", max_steps=300)
    node.run("systemctl", "start", unit)
    node.run("rm", "-r", "/srv/tiny/fleeting")
    wait_until_done(node, unit)
    assert show(node, unit, "Result") == "success"
