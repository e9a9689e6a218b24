"""The quick checks, on real directories with real faults."""

import json
import multiprocessing
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import make_target
from dflash_agent import checks
from dflash_agent.checks import check_data, check_drafter, check_output, check_private, check_space, check_target
from dflash_agent.findings import Finding
from dflash_agent.runfile import RunFile, from_flags


def codes(findings: object) -> list[tuple[str, str]]:
    assert not isinstance(findings, Finding)
    return [(f.code, f.severity) for f in findings]  # type: ignore[attr-defined]


def become_nobody() -> None:
    os.setgid(65534)
    os.setuid(65534)


def output_findings(directory: Path) -> list[Finding]:
    return list(check_output(directory))


def run_on(target: Path, data: Path, output: Path) -> RunFile:
    return from_flags("r", {"target.model": str(target), "data.dir": str(data), "output.dir": str(output)})


def test_shared_memory_that_is_nearly_full_is_warned_of_and_none_at_all_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "SHARED_MEMORY", tmp_path / "none")
    assert list(checks.check_shm()) == []
    monkeypatch.setattr(checks, "SHARED_MEMORY", tmp_path)
    assert codes(checks.check_shm()) == [("shm-space", "ok")]
    monkeypatch.setattr(checks, "SHARED_BYTES", 1 << 60)
    (finding,) = checks.check_shm()
    assert (finding.code, finding.severity) == ("shm-space", "warn")
    assert str(tmp_path) in finding.text


def test_a_whole_target_is_fine_and_its_size_is_told(target_dir: Path) -> None:
    findings = list(check_target(target_dir))
    assert ("target", "ok") in codes(findings)
    assert "llama" in findings[-1].text


@pytest.mark.parametrize("fault", ["missing", "truncated", "padded", "header", "empty"])
def test_a_weight_file_that_is_not_what_its_header_says_is_refused(fault: str, tmp_path: Path) -> None:
    weights = make_target(tmp_path / "t") / "model.safetensors"
    content = weights.read_bytes()
    changed = {"truncated": content[:-1], "padded": content + b"x", "header": content[:50], "empty": b""}
    if fault == "missing":
        weights.unlink()
    else:
        weights.write_bytes(changed[fault])
    findings = list(check_target(tmp_path / "t"))
    assert ("target-incomplete", "refuse") in codes(findings)
    assert any("model.safetensors" in f.text for f in findings)
    assert ("target", "ok") not in codes(findings)


def test_every_shard_that_the_index_names_must_be_there(tmp_path: Path) -> None:
    directory = make_target(tmp_path / "t")
    (directory / "model.safetensors").rename(directory / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (finding,) = [f for f in check_target(directory) if f.severity == "refuse"]
    assert "model-00002-of-00002.safetensors is missing" in finding.text


def test_no_target_and_a_broken_config_are_told_apart(tmp_path: Path) -> None:
    assert codes(check_target(tmp_path)) == [("target-missing", "refuse")]
    (tmp_path / "config.json").write_text("{")
    assert codes(check_target(tmp_path)) == [("target-missing", "refuse")]
    (tmp_path / "config.json").write_text('{"hidden_size": 3}')
    assert codes(check_target(tmp_path)) == [("target-incomplete", "refuse")]


def test_data_files_that_are_named_must_be_there(dataset_dir: Path, tmp_path: Path) -> None:
    assert codes(check_data(dataset_dir)) == [("data", "ok")]
    assert codes(check_data(tmp_path)) == [("data-missing", "refuse")]
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "gone.arrow"}]}')
    (finding,) = check_data(tmp_path)
    assert finding.code == "data-missing"
    assert "gone.arrow" in finding.text
    (tmp_path / "state.json").write_text("[]")
    assert codes(check_data(tmp_path)) == [("data-unreadable", "refuse")]


def test_an_output_that_can_be_made_is_fine_and_one_below_a_file_is_not(tmp_path: Path) -> None:
    assert codes(check_output(tmp_path / "a" / "b")) == [("output", "ok")]
    assert codes(check_output(tmp_path / "made", made_by_unit=tmp_path / "made")) == [("output", "ok")]
    (tmp_path / "file").write_text("")
    assert codes(check_output(tmp_path / "file" / "b")) == [("output-unwritable", "refuse")]
    assert not (tmp_path / "a").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
@pytest.mark.parametrize(("mode", "reason"), [(0o755, "may not write"), (0o700, "may not enter")])
def test_the_rights_are_those_of_the_user_that_runs_the_check(mode: int, reason: str) -> None:
    locked = Path(tempfile.mkdtemp(dir="/var/tmp"))  # tmp_path itself lies below a directory for root alone
    locked.chmod(mode)
    try:
        with multiprocessing.get_context("fork").Pool(1, initializer=become_nobody) as pool:
            (finding,) = pool.apply(output_findings, (locked / "a",))
    finally:
        locked.rmdir()
    assert (finding.code, finding.severity) == ("output-unwritable", "refuse")
    assert reason in finding.text


def test_a_path_that_only_the_host_sees_is_refused(tmp_path: Path) -> None:
    run = run_on(Path("/srv/t"), Path("/var/tmp/d"), Path("/srv/o"))
    (finding,) = check_private(run)
    assert finding.severity == "refuse"
    assert "/var/tmp/d" in finding.text
    assert not list(check_private(run_on(Path("/dev/shm/t"), Path("/workspace/d"), Path("/srv/o"))))
    assert tmp_path.is_absolute()


@pytest.mark.parametrize("second", [False, True])
def test_a_checkpoint_is_estimated_as_large_as_the_trainer_makes_it(
    second: bool, target_dir: Path, tmp_path: Path
) -> None:
    import torch
    from dflash_trainer.drafter import Drafter, save_drafter
    from dflash_trainer.inputs import drafter_config
    from dflash_trainer.target import read_config

    run = run_on(target_dir, tmp_path, tmp_path)
    parts = {"conv_kernel_size": 3, "conv_group_size": 4, "selector_rank": 8} if second else {}
    run = replace(run, drafter=replace(run.drafter, layers=3, **parts))
    drafter = Drafter(drafter_config(run, read_config(target_dir), 1))
    real = 16 * sum(parameter.numel() for parameter in drafter.parameters())
    estimate = checks.checkpoint_bytes(run)
    assert estimate is not None
    assert 0.9 * real < estimate <= real
    save_drafter(drafter.state_dict(), drafter.config, tmp_path / "begun", torch.float32)
    begun = run_on(target_dir, tmp_path, tmp_path)
    begun = replace(begun, drafter=replace(begun.drafter, init_from=str(tmp_path / "begun")))
    assert checks.checkpoint_bytes(begun) == estimate
    assert check_drafter(tmp_path / "begun").severity == "ok"
    (tmp_path / "begun/model.safetensors").write_bytes(b"")
    cut = check_drafter(tmp_path / "begun")
    assert (cut.code, cut.severity) == ("config", "refuse")
    assert "model.safetensors is truncated" in cut.text
    missing = check_drafter(tmp_path / "nowhere")
    assert missing.severity == "refuse"
    assert "nowhere/config.json: No such file" in missing.text


def test_too_little_room_is_refused_with_the_numbers(target_dir: Path, tmp_path: Path) -> None:
    run = run_on(target_dir, tmp_path, tmp_path / "out")
    assert codes(check_space(run)) == [("disk-space", "ok")]
    huge = replace(run, drafter=replace(run.drafter, intermediate=10**12))
    (finding,) = check_space(huge)
    assert (finding.code, finding.severity) == ("disk-space", "refuse")
    assert "free at" in finding.text
    kept = replace(run, output=replace(run.output, keep_last=10**12))
    assert codes(check_space(kept)) == [("disk-space", "warn")]
