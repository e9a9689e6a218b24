"""What is written of a drafter: held against the tables of docs/checkpoint.md, by name and by value."""

import argparse
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_target
from dflash_agent.runfile import from_flags
from dflash_trainer import export
from dflash_trainer.drafter import Drafter, load_drafter, save_drafter
from dflash_trainer.drafter_config import DrafterConfig
from dflash_trainer.errors import CannotStart
from dflash_trainer.inputs import drafter_config
from dflash_trainer.target import read_config
from drafting import drafter_config as small_config
from safetensors.torch import load_file, save_file

DOCUMENT = (Path(__file__).parents[2] / "docs/checkpoint.md").read_text()
SECOND = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5}
EVERYTHING = SECOND | {
    "layer_types": ("sliding_attention", "full_attention"),
    "sliding_window": 9,
    "is_causal": True,
    "input_embedding_scale": 5.5,
    "output_multiplier": 0.5,
    "final_logit_softcapping": 3.0,
}


def documented(heading: str) -> Iterator[tuple[str, list[str]]]:
    """First column and the others, of the table below a heading."""
    section = DOCUMENT.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    for line in section.splitlines():
        if found := re.match(r"\| `([^`]+)` \|(.*)\|$", line):
            yield found[1], [cell.strip() for cell in found[2].split("|")]


def flat(values: dict[str, Any]) -> set[str]:
    own = {f"dflash_config.{name}" for name in values["dflash_config"]}
    return {*values} - {"dflash_config"} | own


def made(**changes: Any) -> Drafter:
    drafter = Drafter(replace(small_config(), **changes))
    drafter.reset_parameters(0)
    return drafter


def run(source: Path, output: Path, *more: str) -> int:
    parser = argparse.ArgumentParser()
    export.add_arguments(parser)
    return export.run(parser.parse_args([str(source), str(output), *more]))


@pytest.fixture
def drafter_dir(tmp_path: Path) -> Path:
    drafter = made()
    save_drafter(drafter.state_dict(), drafter.config, tmp_path / "drafter", torch.float32)
    return tmp_path / "drafter"


def test_the_documented_entries_are_those_that_are_written() -> None:
    entries = {name for name, _ in documented("config.json")}
    assert entries == flat(made(**EVERYTHING).config.to_json("bfloat16"))
    least = flat(made().config.to_json("bfloat16"))
    optional = {name for name in entries - least if name.startswith("dflash_config.") or name == "is_causal"}
    assert entries - least == optional
    assert {"dflash_config.target_layer_ids", "dflash_config.mask_token_id"} <= least


@pytest.mark.parametrize("second", [False, True])
def test_the_documented_tensors_are_those_that_are_written(second: bool, tmp_path: Path) -> None:
    drafter = made(**SECOND if second else {})
    save_drafter(drafter.state_dict(), drafter.config, tmp_path, torch.bfloat16)
    written = load_file(tmp_path / "model.safetensors")
    sizes = {"H": 32, "n": 2, "heads": 4, "kv heads": 2, "dim": 8, "inner": 64}
    sizes |= {"V": 64, "taps": 2, "groups": 4, "rank": 6, "2": 2}
    expected = {}
    for name, (shape, kind) in documented("Tensors"):
        if kind == "all" or second:
            factors = [[sizes[word] for word in side.split("·")] for side in shape.split(" × ")]
            expected |= {
                name.replace(".i.", f".{i}."): tuple(int(torch.tensor(side).prod()) for side in factors)
                for i in range(2)
            }
    assert {name: tuple(tensor.shape) for name, tensor in written.items()} == expected
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    if not second:
        assert len(written) == 11 * 2 + 3


@pytest.mark.parametrize("changes", [{}, EVERYTHING])
def test_a_configuration_comes_back_as_it_was(changes: dict[str, Any]) -> None:
    config = made(**changes).config
    assert DrafterConfig.from_json(json.loads(json.dumps(config.to_json("float32")))) == config


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dflash_config": {"causal": True}}, "causal"),
        ({"dflash_config": {"attention_sink_bias": True, "use_swa": True}}, "attention_sink_bias, use_swa"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}}, "factor, rope_type"),
        ({"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.25}}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling"),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": None}, "sliding_window is missing"),
        ({"layer_types": ["linear_attention"] * 2}, "unknown layer_types linear_attention"),
    ],
)
def test_a_published_drafter_of_a_kind_that_is_not_known_is_refused(
    change: dict[str, Any], reason: str, drafter_dir: Path
) -> None:
    values = json.loads((drafter_dir / "config.json").read_text())
    change = change | {"dflash_config": values["dflash_config"] | change.get("dflash_config", {})}
    (drafter_dir / "config.json").write_text(json.dumps(values | change))
    with pytest.raises(CannotStart, match=f"is not a drafter that can be read: ValueError: .*{reason}"):
        load_drafter(drafter_dir)


def test_a_block_size_beside_the_other_entries_of_dflash_is_read_too(drafter_dir: Path) -> None:
    values = json.loads((drafter_dir / "config.json").read_text())
    values["dflash_config"]["block_size"] = values.pop("block_size")
    values["rope_parameters"] |= {"partial_rotary_factor": 1.0}
    values["rope_scaling"] = None
    (drafter_dir / "config.json").write_text(json.dumps(values))
    assert load_drafter(drafter_dir).config == small_config()


def test_the_targets_partial_and_multimodal_rotation_is_not_the_drafters(tmp_path: Path) -> None:
    directory = make_target(tmp_path / "t", "qwen3_5_text")
    values = json.loads((directory / "config.json").read_text())
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    values["rope_parameters"] = rope | {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    (directory / "config.json").write_text(json.dumps(values))
    training = from_flags("r", {"target.model": str(directory), "data.dir": "/d"})
    text = json.dumps(drafter_config(training, read_config(directory), 95).to_json("bfloat16"))
    assert "mrope" not in text
    assert "partial" not in text
    assert json.loads(text)["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e7}


@pytest.mark.parametrize(
    ("name", "tensor", "reason"),
    [
        ("mask_hidden", torch.zeros(32), "the drafter has mask_hidden, which no reader expects"),
        ("fc.weight", torch.zeros(32, 32), r"fc\.weight is \[32, 32\], and config\.json makes it \[32, 64\]"),
        ("norm.weight", None, r"the drafter lacks norm\.weight"),
    ],
)
def test_what_does_not_fit_the_configuration_is_refused_and_nothing_written(
    name: str, tensor: torch.Tensor | None, reason: str, tmp_path: Path
) -> None:
    drafter = made()
    state = drafter.state_dict() | ({} if tensor is None else {name: tensor})
    if tensor is None:
        del state[name]
    with pytest.raises(CannotStart, match=f"{reason}.*; nothing is written"):
        save_drafter(state, drafter.config, tmp_path / "out", torch.float32)
    assert not (tmp_path / "out").exists()


def test_a_drafter_is_exported_in_the_type_asked_for_with_a_card(drafter_dir: Path, tmp_path: Path) -> None:
    assert run(drafter_dir, tmp_path / "half") == 0
    assert run(drafter_dir, tmp_path / "whole", "--dtype", "float32") == 0
    half, whole = (load_file(tmp_path / name / "model.safetensors") for name in ("half", "whole"))
    assert {t.dtype for t in half.values()} == {torch.bfloat16}
    assert all(torch.equal(whole[name], tensor) for name, tensor in load_drafter(drafter_dir).state_dict().items())
    assert json.loads((tmp_path / "half/config.json").read_text())["dtype"] == "bfloat16"
    text = (tmp_path / "half/README.md").read_text()
    assert text.startswith("---\nlibrary_name: transformers\n")
    assert '"num_speculative_tokens": 5}' in text
    with pytest.raises(CannotStart, match="half is not empty; choose another directory"):
        run(drafter_dir, tmp_path / "half")


def test_the_card_has_the_figures_of_the_run(drafter_dir: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    checkpoint = output / "checkpoints/step-00000240"
    checkpoint.mkdir(parents=True)
    drafter_dir.rename(checkpoint / "drafter")
    (output / "run.json").write_text(json.dumps({"settings": {"train.lr": 0.0006, "drafter.layers": 2}}))
    metrics = [
        {"step": 200, "acceptance_length": 2.5, "eval_prompts": 16},
        {"step": 240, "total_steps": 900, "loss": 2.8125, "accuracy": 0.431},
    ]
    (output / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics) + '{"torn')
    for name, source in (("a", output / "checkpoints/step-00000240"), ("b", checkpoint / "drafter")):
        assert run(source, tmp_path / name) == 0
        text = (tmp_path / name / "README.md").read_text()
        for row in ("| lr | 0.0006 |", "| step | 240 of 900 |", "| loss | 2.812 nats |"):
            assert row in text
        assert "| acceptance length at step 200 | 2.50 tokens a step, 16 prompts, greedy |" in text


@pytest.mark.parametrize(
    "changes", [{}, SECOND, {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 9}]
)
def test_to_speculators_and_back_is_the_same_drafter(changes: dict[str, Any], tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps({"architectures": ["Llama"], "num_hidden_layers": 6}))
    drafter = made(**changes)
    save_drafter(drafter.state_dict(), drafter.config, tmp_path / "drafter", torch.float32)
    words = ("--dtype", "float32", "--target-model", str(target))
    run(tmp_path / "drafter", tmp_path / "theirs", "--format", "speculators", *words)
    values = json.loads((tmp_path / "theirs/config.json").read_text())
    assert values["aux_hidden_state_layer_ids"] == [i + 1 for i in drafter.config.target_layer_ids]
    # It may keep the target's head beside the drafter.
    weights = load_file(tmp_path / "theirs/model.safetensors")
    save_file(weights | {"lm_head.weight": torch.zeros(4)}, tmp_path / "theirs/model.safetensors")
    run(tmp_path / "theirs", tmp_path / "back", *words)
    back = load_drafter(tmp_path / "back")
    assert back.config == drafter.config
    assert all(torch.equal(back.state_dict()[name], tensor) for name, tensor in drafter.state_dict().items())
    save_file(weights | {"t2d": torch.zeros(4)}, tmp_path / "theirs/model.safetensors")
    with pytest.raises(CannotStart, match="a vocabulary of its own"):
        run(tmp_path / "theirs", tmp_path / "other", *words)
    with pytest.raises(CannotStart, match="give --target-model"):
        run(tmp_path / "theirs", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_what_speculators_has_no_word_for_is_refused(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target")
    drafter = made(input_embedding_scale=5.5)
    save_drafter(drafter.state_dict(), drafter.config, tmp_path / "drafter", torch.float32)
    words = ("--format", "speculators", "--target-model", str(target))
    with pytest.raises(CannotStart, match="has no word for input_embedding_scale of this drafter"):
        run(tmp_path / "drafter", tmp_path / "out", *words)
    assert not (tmp_path / "out").exists()
