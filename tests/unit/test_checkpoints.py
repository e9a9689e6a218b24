"""What is read of the checkpoints in an output directory, by a start and by dflashctl."""

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from dflash_agent import checkpoints, cli, runfile
from dflash_agent.checkpoints import Damaged, check_newest, newest_whole, survey, verify
from dflash_agent.findings import Finding
from dflash_agent.runfile import RunFile, from_flags
from nodes import a_node
from test_checkpoint import directory_of, flip_a_bit, save_steps


@pytest.mark.parametrize("name", ["state.pt", "drafter/model.safetensors"])
@pytest.mark.parametrize(
    "fault", ["first bit", "middle bit", "last bit", "truncated", "longer", "missing", "a directory"]
)
def test_every_damage_is_named_and_the_one_before_is_taken(name: str, fault: str, tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20)
    path = directory_of(tmp_path, 20) / name
    size = path.stat().st_size
    match fault:
        case "truncated":
            os.truncate(path, size - 1)
        case "longer":
            os.truncate(path, size + 1)
        case "missing" | "a directory":
            path.unlink()
            if fault == "a directory":
                path.mkdir()
        case _:
            flip_a_bit(path, {"first": 0, "middle": 4 * size + 3, "last": 8 * size - 1}[fault.split()[0]])
    with pytest.raises(Damaged, match=re.escape(name)):
        verify(directory_of(tmp_path, 20))
    newest, (skipped,) = newest_whole(tmp_path)
    assert newest == directory_of(tmp_path, 10)
    assert skipped.path == directory_of(tmp_path, 20)
    assert name in skipped.reason


def test_a_manifest_cut_at_any_byte_is_damage(tmp_path: Path) -> None:
    save_steps(tmp_path, 10)
    manifest = directory_of(tmp_path, 10) / "manifest.json"
    text = manifest.read_text().rstrip()
    manifest.write_text(text)
    verify(directory_of(tmp_path, 10))
    for size in range(len(text)):
        manifest.write_text(text[:size])
        with pytest.raises(Damaged, match="manifest"):
            verify(directory_of(tmp_path, 10))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[]", "manifest"),
        ('{"format": 1, "step": 10}', "files"),
        ('{"format": 1, "step": 10, "files": []}', "manifest"),
        ('{"format": 1, "step": 10, "files": {"state.pt": {"size": 50000}}}', "sha256"),
        ('{"format": 2, "step": 10, "files": {}}', "format is 2, this version reads 1"),
        ('{"format": 1, "step": 20, "files": {}}', "of step 20"),
        ("\x00" * 100, "manifest"),
    ],
)
def test_a_manifest_that_says_something_else_is_damage(text: str, reason: str, tmp_path: Path) -> None:
    save_steps(tmp_path, 10)
    (directory_of(tmp_path, 10) / "manifest.json").write_text(text)
    with pytest.raises(Damaged, match=reason):
        verify(directory_of(tmp_path, 10))


def test_a_checkpoint_without_its_manifest_is_skipped(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20)
    (directory_of(tmp_path, 20) / "manifest.json").unlink()
    newest, (skipped,) = newest_whole(tmp_path)
    assert newest == directory_of(tmp_path, 10)
    assert skipped.reason == "it has no manifest.json"


def damage(output: Path, *steps: int) -> None:
    for step in steps:
        (directory_of(output, step) / "state.pt").write_bytes(b"torn")


def a_run(output: Path) -> RunFile:
    return from_flags("run1", {"target.model": "/srv/model", "data.dir": "/srv/data", "output.dir": str(output)})


def test_a_survey_tells_every_one_newest_first_with_its_size(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20, 30)
    damage(tmp_path, 20)
    found = list(survey(tmp_path))
    assert [(one.step, one.reason) for one in found] == [
        (30, ""),
        (20, "state.pt has 4 bytes instead of 50000"),
        (10, ""),
    ]
    manifest = directory_of(tmp_path, 30) / "manifest.json"
    assert found[0].bytes == 100_000 + manifest.stat().st_size
    assert found[0].path == directory_of(tmp_path, 30)


def test_one_that_is_pruned_while_it_is_read_is_left_out(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20, 30)
    found = survey(tmp_path)
    assert next(found).step == 30
    shutil.rmtree(directory_of(tmp_path, 20))
    assert [one.step for one in found] == [10]


def test_the_newest_whole_one_is_found_without_reading_the_older_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_steps(tmp_path, 10, 20)
    read: list[Path] = []
    monkeypatch.setattr(checkpoints, "verify", read.append)
    assert newest_whole(tmp_path) == (directory_of(tmp_path, 20), [])
    assert read == [directory_of(tmp_path, 20)]


@pytest.mark.parametrize(
    ("saved", "damaged", "code", "severity", "words"),
    [
        ((), (), "checkpoint", "ok", ["begins at step 0"]),
        ((10, 20), (), "checkpoint", "ok", ["step 20, 0 s old"]),
        ((10, 20), (10,), "checkpoint", "ok", ["step 20"]),
        (
            (10, 20),
            (20,),
            "checkpoint-damaged",
            "warn",
            ["step 20 (state.pt has 4", "on from step 10, 0 s old"],
        ),
        ((10, 20), (10, 20), "checkpoint-damaged", "refuse", ["no whole checkpoint, 2 damaged", "step 10 (state"]),
    ],
)
def test_the_finding_says_what_a_start_would_make_of_them(
    saved: tuple[int, ...], damaged: tuple[int, ...], code: str, severity: str, words: list[str], tmp_path: Path
) -> None:
    save_steps(tmp_path, *saved)
    damage(tmp_path, *damaged)
    finding = check_newest(a_run(tmp_path))
    assert (finding.code, finding.severity) == (code, severity)
    for word in words:
        assert word in finding.text
    assert bool(finding.hint) == (severity == "refuse")


def test_the_finding_is_told_to_a_caller_of_another_user(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save_steps(tmp_path / "out", 10)
    path = tmp_path / "run1.toml"
    path.write_text(runfile.render(a_run(tmp_path / "out")))
    assert checkpoints.main([str(path)]) == 0
    told = Finding(**json.loads(capfd.readouterr().out))
    assert replace(told, text="") == Finding("checkpoint", "ok", "")
    assert checkpoints.main([str(tmp_path / "gone.toml")]) == 0
    assert Finding(**json.loads(capfd.readouterr().out)).severity == "refuse"


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The output directory of run1, which dflashctl knows."""
    monkeypatch.setattr(runfile, "RUNS_DIR", tmp_path)
    (tmp_path / "run1.toml").write_text(runfile.render(a_run(tmp_path / "out")))
    return tmp_path / "out"


def test_the_command_lists_them_and_marks_the_one_that_a_start_uses(
    output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_steps(output, 10, 20, 30)
    damage(output, 30)
    assert cli.main(["checkpoints", "run1"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["STEP", "WRITTEN", "SIZE", "STATE"]
    assert [line.split()[0] for line in lines] == ["30", "20", "10"]
    assert [re.split(r"  +", line)[-1] for line in lines] == [
        "damaged: state.pt has 4 bytes instead of 50000",
        "whole, a start goes on from it",
        "whole",
    ]
    assert cli.main(["checkpoints", "run1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [(one["step"], one["whole"], one["used"]) for one in told] == [
        (30, False, False),
        (20, True, True),
        (10, True, False),
    ]


def test_the_command_fails_if_there_are_only_damaged_ones_and_not_if_there_are_none(
    output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["checkpoints", "run1"]) == 0
    assert "begins at step 0" in capsys.readouterr().out
    assert cli.main(["checkpoints", "run1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    save_steps(output, 10)
    damage(output, 10)
    assert cli.main(["checkpoints", "run1"]) == 1
    assert cli.main(["checkpoints", "run1", "--json"]) == 1


@pytest.mark.parametrize("as_root", [False, True])
def test_verify_tells_of_the_newest_and_refuses_where_a_start_would(
    as_root: bool, output: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "quick_checks", lambda *_: iter(()))
    monkeypatch.setattr(cli, "deep_checks", lambda *_: iter(()))
    monkeypatch.setattr(cli, "take_snapshot", lambda _: replace(a_node(), hardware=False))
    if as_root:
        asked: list[list[str]] = []
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        monkeypatch.setattr(cli, "findings_of", lambda command: asked.append(command) or iter(()))
        cli.main(["verify", "run1"])
        assert [command[1:] for command in asked] == [
            ["-m", "dflash_agent.checkpoints", str(output.with_name("run1.toml"))]
        ]
        return
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    save_steps(output, 10, 20)
    cli.main(["verify", "run1"])
    assert "ok      checkpoint: step 20" in capsys.readouterr().out
    damage(output, 20)
    cli.main(["verify", "run1"])
    assert "warn    checkpoint-damaged: step 20" in capsys.readouterr().out
    damage(output, 10)
    assert cli.main(["verify", "run1"]) == 78
    assert "refuse  checkpoint-damaged: output" in capsys.readouterr().out
