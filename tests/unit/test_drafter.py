"""The drafter: shapes, its place in a sequence, and the checkpoint that servers read."""

import json
from pathlib import Path

import pytest
import torch
from dflash_trainer.drafter import Drafter, load_drafter, save_drafter
from dflash_trainer.drafter_config import DrafterConfig, spaced_layer_ids
from dflash_trainer.errors import CannotStart

CONFIG = DrafterConfig(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=48,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    vocab_size=90,
    max_position_embeddings=128,
    num_target_layers=6,
    block_size=4,
    mask_token_id=7,
    target_layer_ids=(1, 3),
)


def make_drafter() -> Drafter:
    drafter = Drafter(CONFIG)
    drafter.reset_parameters(0)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.mul_(6 if parameter.dim() > 1 else 1)
    return drafter


def test_tapped_layers_are_spaced_as_published() -> None:
    assert spaced_layer_ids(64, 5) == (1, 16, 31, 46, 61)
    assert spaced_layer_ids(36, 5) == (1, 9, 17, 25, 33)
    assert spaced_layer_ids(30, 1) == (15,)


def test_the_same_seed_gives_the_same_weights_and_another_other_ones() -> None:
    first, again, other = Drafter(CONFIG), Drafter(CONFIG), Drafter(CONFIG)
    for drafter, seed in ((first, 1), (again, 1), (other, 2)):
        drafter.reset_parameters(seed)
    assert torch.equal(first.fc.weight, again.fc.weight)
    assert not torch.equal(first.fc.weight, other.fc.weight)


@torch.no_grad()
@pytest.mark.parametrize("size", [0.001, 0.2, 5.0])
def test_a_fresh_drafter_is_not_sure_of_anything_however_large_the_head(size: float) -> None:
    drafter = Drafter(CONFIG)
    drafter.reset_parameters(0)
    head = torch.randn(90, 32) * size
    drafter.calm_output(head)
    hidden = drafter(torch.randn(1, 64, 32), torch.arange(64)[None], torch.randn(1, 5, 64))
    assert (hidden @ head.T).std() < 1.3
    assert drafter.norm.weight.max() <= 1


@torch.no_grad()
def test_a_block_in_a_batch_of_blocks_gives_what_it_gives_alone_with_only_its_context() -> None:
    drafter = make_drafter()
    anchors = torch.tensor([[9, 3, 4], [12, 0, 0]])
    context = torch.randn(2, 14, 2 * CONFIG.hidden_size)
    noise = torch.randn(2, 3 * 4, CONFIG.hidden_size)
    positions = (anchors[:, :, None] + torch.arange(4)).flatten(1)
    together = drafter(noise, positions, context, drafter.masks(anchors, 14))
    for row, block in ((0, 0), (0, 1), (0, 2), (1, 0)):
        at, own = int(anchors[row, block]), slice(block * 4, block * 4 + 4)
        alone = drafter(noise[row : row + 1, own], positions[row : row + 1, own], context[row : row + 1, :at])
        torch.testing.assert_close(together[row, own], alone[0], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_nothing_at_or_after_the_anchor_reaches_a_block() -> None:
    drafter = make_drafter()
    anchors = torch.tensor([[6, 2]])
    positions = (anchors[:, :, None] + torch.arange(4)).flatten(1)
    noise, context = torch.randn(1, 8, 32), torch.randn(1, 10, 64)
    mask = drafter.masks(anchors, 10)
    before = drafter(noise, positions, context, mask)
    context[:, 6:] += 100
    assert torch.equal(before[:, :4], drafter(noise, positions, context, mask)[:, :4])
    context[:, 2:6] += 100
    after = drafter(noise, positions, context, mask)
    assert torch.equal(before[:, 4:], after[:, 4:])
    assert not torch.allclose(before[:, :4], after[:, :4])


def test_a_saved_drafter_loads_with_the_same_weights(tmp_path: Path) -> None:
    drafter = make_drafter()
    save_drafter(drafter.state_dict(), CONFIG, tmp_path, torch.float32)
    loaded = load_drafter(tmp_path)
    assert loaded.config == CONFIG
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name


def test_the_config_says_what_servers_need_and_inherits_no_partial_or_multimodal_rotation(
    tmp_path: Path,
) -> None:
    save_drafter(make_drafter().state_dict(), CONFIG, tmp_path, torch.bfloat16)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["model_type"] == "qwen3"
    assert config["dflash_config"] == {"target_layer_ids": [1, 3], "mask_token_id": 7}
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 1e4
    text = json.dumps(config)
    assert "partial_rotary_factor" not in text
    assert "mrope" not in text


def test_the_tensors_are_named_as_readers_look_for_them(tmp_path: Path) -> None:
    from safetensors import safe_open

    save_drafter(make_drafter().state_dict(), CONFIG, tmp_path, torch.bfloat16)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
        assert file.get_tensor("fc.weight").shape == (32, 64)
        assert file.get_tensor("fc.weight").dtype == torch.bfloat16
    layer = {f"self_attn.{p}_proj" for p in "qkvo"} | {"self_attn.q_norm", "self_attn.k_norm"}
    layer |= {f"mlp.{p}_proj" for p in ("gate", "up", "down")} | {
        "input_layernorm",
        "post_attention_layernorm",
    }
    expected = {f"layers.{i}.{part}.weight" for i in range(2) for part in layer}
    assert names == expected | {"fc.weight", "hidden_norm.weight", "norm.weight"}
    assert len(names) == 11 * 2 + 3


@pytest.mark.parametrize("damage", ["no config", "no weights", "other sizes", "not json", "truncated"])
def test_a_directory_that_is_no_drafter_is_refused_in_one_line(tmp_path: Path, damage: str) -> None:
    save_drafter(make_drafter().state_dict(), CONFIG, tmp_path, torch.float32)
    config = tmp_path / "config.json"
    if damage == "no config":
        config.unlink()
    elif damage == "no weights":
        (tmp_path / "model.safetensors").unlink()
    elif damage == "truncated":
        weights = tmp_path / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:3000])
    elif damage == "not json":
        config.write_text("{")
    else:
        config.write_text(config.read_text().replace('"intermediate_size": 48', '"intermediate_size": 64'))
    with pytest.raises(CannotStart) as caught:
        load_drafter(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
