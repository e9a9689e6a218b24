"""dflashctl as a person types it; what needs a booted system is in tests/system."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from dflash_agent import cli, runfile, runtime

FLAGS = ["--target-model", "/srv/model", "--data-dir", "/srv/data"]


@pytest.fixture(autouse=True)
def runs_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the run files, one of the test's own."""
    directory = tmp_path / "runs"
    monkeypatch.setattr(runfile, "RUNS_DIR", directory)
    monkeypatch.setattr(cli, "need_root", lambda: None)
    monkeypatch.setattr(runtime, "RUNTIME_DIR", tmp_path / "runtime")
    return directory


def test_new_writes_a_commented_file_and_says_what_comes_next(
    runs_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["new", "run1", *FLAGS, "--lr", "1e-3"]) == 0
    path = runs_dir / "run1.toml"
    assert runfile.load(path).train.lr == 1e-3
    assert path.stat().st_mode & 0o777 == 0o644
    assert "# peak learning rate" in path.read_text()
    assert "systemctl start dflash-train@run1" in capsys.readouterr().out


def test_new_does_not_overwrite_unless_forced_and_then_keeps_the_old_one(
    runs_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["new", "run1", *FLAGS])
    assert cli.main(["new", "run1", *FLAGS, "--lr", "1"]) == 78
    assert "--force" in capsys.readouterr().err
    assert cli.main(["new", "run1", *FLAGS, "--lr", "1", "--force"]) == 0
    assert runfile.load(runs_dir / "run1.toml").train.lr == 1
    assert "lr = 0.0006" in (runs_dir / "run1.toml~").read_text()
    assert sorted(p.name for p in runs_dir.iterdir()) == ["run1.toml", "run1.toml~"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["new", "Run", *FLAGS], "a-z, 0-9"),
        (["new", "run1", "--target-model", "/m"], "--data-dir"),
        (["new", "run1", *FLAGS, "--lr", "-1"], "above 0"),
        (["verify", "gone"], "dflashctl new gone"),
        (["verify", "../x"], "a-z, 0-9"),
        (["status", "gone"], "does not exist"),
        (["fresh", "gone"], "dflashctl new gone"),
    ],
)
def test_what_is_not_right_is_refused_in_one_line(
    words: list[str], reason: str, runs_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 78
    error = capsys.readouterr().err
    assert error.startswith("dflashctl: ")
    assert error.count("\n") == 1
    assert reason in error
    assert not runs_dir.exists()


def test_an_unknown_flag_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["new", "run1", *FLAGS, "--learning-rate", "1"])
    assert caught.value.code == 2
    assert "--learning-rate" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_without_root_it_says_sudo(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.undo()
    os.seteuid(65534)
    try:
        assert cli.main(["new", "never-made", *FLAGS]) == 78
        assert cli.main(["runtime", "install"]) == 78
    finally:
        os.seteuid(0)
    assert capsys.readouterr().err.count("sudo dflashctl") == 2


def test_status_without_systemd_tells_what_the_files_tell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    (output / "checkpoints" / "step-00000020").mkdir(parents=True)
    row = {"step": 25, "total_steps": 90, "loss": 3.25, "tokens_per_s": 400.0, "eta_s": 60.0}
    (output / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    cli.main(["new", "run1", *FLAGS, "--output-dir", str(output)])
    capsys.readouterr()
    assert cli.main(["status"]) == 0
    shown = capsys.readouterr().out
    assert "25/90" in shown
    assert "3.250" in shown
    assert "step-00000020" in shown
    assert "systemd cannot be asked" in shown or "stopped" in shown
    assert cli.main(["status", "run1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["step"] == 25


def test_a_damaged_run_file_does_not_hide_the_other_runs(
    runs_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["new", "good", *FLAGS])
    (runs_dir / "bad.toml").write_text("[")
    capsys.readouterr()
    assert cli.main(["status"]) == 0
    shown = capsys.readouterr().out
    assert "good" in shown
    assert "bad.toml is not TOML" in shown


def test_no_runs_and_no_runtime_say_what_to_type(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status"]) == 0
    assert "dflashctl new NAME" in capsys.readouterr().out
    assert cli.main(["runtime", "list"]) == 0
    assert "dflashctl runtime install" in capsys.readouterr().out


def test_completion_offers_subcommands_and_flags() -> None:
    script = Path(__file__).parents[2] / "agent" / "completion" / "dflashctl"
    agent = next(p for p in sys.path if p.endswith("agent"))
    code = f"""
    _init_completion() {{
        words=("${{COMP_WORDS[@]}}"); cword=$COMP_CWORD; cur=${{words[cword]}}; prev=${{words[cword - 1]}}
    }}
    dflashctl() {{ PYTHONPATH={agent} {sys.executable} -m dflash_agent.cli "$@"; }}
    source {script}
    COMP_WORDS=(dflashctl ""); COMP_CWORD=1; _dflashctl; echo "${{COMPREPLY[@]}}"
    COMP_WORDS=(dflashctl ve); COMP_CWORD=1; _dflashctl; echo "${{COMPREPLY[@]}}"
    COMP_WORDS=(dflashctl runtime r); COMP_CWORD=2; _dflashctl; echo "${{COMPREPLY[@]}}"
    COMP_WORDS=(dflashctl new run1 --max-a); COMP_CWORD=3; _dflashctl; echo "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    offered, *others = done.stdout.splitlines()
    assert [word for line in others for word in line.split()] == ["verify", "rollback", "--max-anchors"]
    parser = cli.build_parser()
    (commands,) = (action.choices for action in parser._actions if isinstance(action.choices, dict))
    assert {word for word in offered.split() if not word.startswith("-")} == set(commands)
