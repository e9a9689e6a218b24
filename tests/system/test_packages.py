"""The packages on a node: what they install, what they leave alone, what they leave behind."""

import json
import subprocess
import time
from pathlib import Path

from container import Machine

from .node import apt, install, journal, make_run, show, start

UNITS = ("dflash-train@run1.service", "dflash-runtime.service", "dflash.slice")


def owner(node: Machine, path: str) -> str:
    return node.run("stat", "--format", "%U:%G %a", path).stdout.strip()


def test_lintian_has_no_complaint(repository: Path) -> None:
    (changes,) = repository.glob("*.changes")
    done = subprocess.run(
        ["lintian", "--allow-root", "--fail-on", "error,warning", str(changes)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_files_are_as_packaged_and_owned_by_root(node: Machine) -> None:
    for package in ("dflash", "dflash-agent", "dflash-trainer", "dflash-wheelhouse-cpu"):
        altered = node.run("dpkg", "--verify", package, check=False).stdout.splitlines()
        assert [line for line in altered if "/usr/share/doc" not in line] == []  # the tree is made without those
    paths = ("/etc/dflash/runs", "/var/lib/dflash", "/var/lib/dflash/runs", "/var/lib/dflash/runtime")
    assert {path: owner(node, path) for path in paths} == dict.fromkeys(paths, "root:root 755")
    assert owner(node, "/usr/libexec/dflash/launch") == "root:root 755"
    assert node.run("find", "/var/lib/dflash/runtime/current/", "!", "-user", "root").stdout == ""


def test_user_has_no_shell_and_may_use_gpus(node: Machine) -> None:
    user = node.run("getent", "passwd", "dflash").stdout.strip().split(":")
    assert user[5:] == ["/var/lib/dflash", "/usr/sbin/nologin"]
    assert {"video", "render"} <= set(node.run("id", "--name", "--groups", "dflash").stdout.split())


def test_units_hold_no_mistake_and_little_exposure(node: Machine) -> None:
    verified = node.run("systemd-analyze", "verify", "--man=no", *UNITS, check=False)
    assert (verified.returncode, verified.stdout, verified.stderr) == (0, "", "")
    # in tenths; what is left is network, devices, home directories and writable code
    node.run("systemd-analyze", "security", "--no-pager", "--threshold=21", UNITS[0])


def test_manuals_and_completion_are_there(node: Machine) -> None:
    for page in ("man1/dflash-train.1.gz", "man5/dflash-run.5.gz", "man8/dflashctl.8.gz"):
        assert "SYNOPSIS" in node.run("zcat", f"/usr/share/man/{page}").stdout
    script = ". /usr/share/bash-completion/bash_completion; _completion_loader dflashctl; complete -p dflashctl"
    assert "_dflashctl" in node.run("bash", "-c", script, check=False).stdout


def test_runtime_came_from_the_wheelhouse_and_is_used(node: Machine) -> None:
    assert "from /usr/share/dflash/wheelhouse/cpu" in journal(node, "dflash-runtime.service")
    assert "current" in node.run("dflashctl", "runtime", "list").stdout
    assert node.run("dflash-train", "--version").stdout.strip() == node.run("dflashctl", "--version").stdout.strip()
    node.run("/var/lib/dflash/runtime/current/bin/python", "-m", "pip", "check")
    began = time.monotonic()
    node.run("systemctl", "start", "dflash-runtime")
    assert time.monotonic() - began < 10  # it is there already
    assert len(list(node.path("/var/lib/dflash/runtime").glob("0*/complete"))) == 1


def test_missing_target_is_refused_within_seconds_and_not_retried(node: Machine) -> None:
    unit = make_run(node, "badpath", target_model="/srv/no-such-target")
    began = time.monotonic()
    started = node.run("systemctl", "start", unit, check=False)
    assert started.returncode != 0
    assert time.monotonic() - began < 10
    assert show(node, unit, "ExecMainStatus") == "78"
    assert show(node, unit, "ActiveState") == "failed"
    assert show(node, unit, "NRestarts") == "0"
    reason = "target /srv/no-such-target has no config.json"
    status = node.run("systemctl", "status", "--no-pager", "--full", unit, check=False).stdout
    assert reason in status
    assert reason in journal(node, unit)
    refused = node.run("journalctl", "--unit", unit, "DFLASH_EVENT=refused", "--output=json", "--no-pager").stdout
    assert json.loads(refused.splitlines()[0])["DFLASH_CODE"] == "target-missing"


def test_training_is_confined_and_outlives_an_upgrade(node: Machine) -> None:
    unit = make_run(node, "upgraded", max_steps=1_000_000, save_interval=1_000_000)
    start(node, unit)
    try:
        pid = show(node, unit, "MainPID")
        lines = node.run("cat", f"/proc/{pid}/status").stdout.splitlines()
        status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        assert node.run("ps", "-o", "user=", "-p", pid).stdout.strip() == "dflash"
        assert (status["NoNewPrivs"], status["Seccomp"], status["CapBnd"]) == ("1", "2", "0" * 16)
        assert show(node, unit, "Slice") == "dflash.slice"
        for path in ("/usr", "/etc", "/boot", "/sys/kernel"):
            denied = node.run("nsenter", "-t", pid, "-m", "touch", f"{path}/written", check=False)
            assert "Read-only file system" in denied.stderr
        apt(node, "install", "--reinstall", "dflash-agent", "dflash-trainer")
        assert show(node, unit, "NeedDaemonReload") == "no"
        assert (show(node, unit, "MainPID"), show(node, unit, "ActiveState")) == (pid, "active")
    finally:
        node.run("systemctl", "stop", unit)
    assert show(node, unit, "Result") == "success"
    assert list(node.path("/var/lib/dflash/runs/upgraded/checkpoints").glob("step-*/manifest.json"))


def test_purge_leaves_runs_and_says_where(bare_node: Machine) -> None:
    install(bare_node, "dflash")
    run_file = bare_node.path("/etc/dflash/runs/mine.toml")
    checkpoint = bare_node.path("/var/lib/dflash/runs/mine/checkpoints/step-00000001/manifest.json")
    cached = bare_node.path("/var/lib/dflash/runtime/an-id/complete")
    for file in (run_file, checkpoint, cached):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("kept\n")
    said = apt(bare_node, "purge", "dflash", "dflash-agent", "dflash-trainer").stdout  # dpkg's stderr, too
    assert "run files are left in /etc/dflash/runs" in said
    assert "outputs of runs are left in /var/lib/dflash/runs" in said
    assert run_file.read_text() == checkpoint.read_text() == "kept\n"
    assert not cached.exists()
    assert bare_node.run("dpkg", "--status", "dflash-agent", check=False).returncode == 1
    install(bare_node, "dflash")
    assert "mine" in bare_node.run("dflashctl", "status").stdout
