"""The speculators library reads what is exported for it, and its converter makes the same of our own format."""

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_trainer import export
from dflash_trainer.drafter import Drafter, load_drafter, save_drafter
from drafting import drafter_config, wandering_target


@pytest.fixture(scope="module")
def library() -> Any:
    pytest.importorskip("speculators")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import speculators.convert.dflash.converter as converter
        import speculators.models.dflash as models
    return argparse.Namespace(Model=models.DFlashDraftModel, Converter=converter.DFlashConverter)


@pytest.fixture
def target_dir(tmp_path: Path) -> Path:
    return wandering_target(tmp_path / "target", "qwen3")


def run(source: Path, output: Path, *more: str) -> int:
    parser = argparse.ArgumentParser()
    export.add_arguments(parser)
    return export.run(parser.parse_args([str(source), str(output), "--dtype", "float32", *more]))


@pytest.fixture
def drafter(tmp_path: Path) -> Drafter:
    made = Drafter(drafter_config())
    made.reset_parameters(0)
    save_drafter(made.state_dict(), made.config, tmp_path / "drafter", torch.float32)
    return made


def test_the_library_reads_what_is_exported_for_it(
    library: Any, drafter: Drafter, target_dir: Path, tmp_path: Path
) -> None:
    run(tmp_path / "drafter", tmp_path / "out", "--format", "speculators", "--target-model", str(target_dir))
    theirs = library.Model.from_pretrained(str(tmp_path / "out"))
    held = theirs.state_dict()
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(held[name].float(), tensor), name
    assert theirs.target_layer_ids == [i + 1 for i in drafter.config.target_layer_ids]
    assert theirs.config.mask_token_id == drafter.config.mask_token_id
    assert theirs.block_size == drafter.config.block_size
    assert theirs.config.transformer_layer_config.rope_parameters["rope_theta"] == drafter.config.rope_theta


def test_what_the_library_converts_says_the_same_and_comes_back(
    library: Any, drafter: Drafter, target_dir: Path, tmp_path: Path
) -> None:
    library.Converter().convert(tmp_path / "drafter", tmp_path / "theirs", str(target_dir), validate=False)
    run(tmp_path / "drafter", tmp_path / "ours", "--format", "speculators", "--target-model", str(target_dir))
    theirs, ours = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("theirs", "ours"))
    for name in ("speculators_model_type", "block_size", "draft_vocab_size", "aux_hidden_state_layer_ids"):
        assert theirs[name] == ours[name]
    assert theirs["mask_token_id"] == ours["mask_token_id"]
    assert theirs["speculators_config"]["verifier"] == ours["speculators_config"]["verifier"]
    assert theirs["speculators_config"]["algorithm"] == ours["speculators_config"]["algorithm"]
    run(tmp_path / "theirs", tmp_path / "back", "--target-model", str(target_dir))
    back = load_drafter(tmp_path / "back")
    assert back.config == drafter.config
    assert all(torch.equal(back.state_dict()[name], tensor) for name, tensor in drafter.state_dict().items())
