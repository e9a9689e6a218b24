"""The frozen target: the right states, no more layers than needed, and the mask token."""

import json
from pathlib import Path

import pytest
import torch
from conftest import make_target
from dflash_trainer.errors import CannotStart
from dflash_trainer.target import (
    choose_mask_token,
    load_causal_lm,
    load_target,
    read_config,
    target_fingerprint,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "qwen3_5_text"])
def test_tapped_states_are_the_states_after_those_layers(model_type: str, tmp_path: Path) -> None:
    directory = make_target(tmp_path / model_type, model_type)
    whole = load_causal_lm(directory, CPU, torch.float32)
    ids = torch.randint(3, 90, (2, 12))
    with torch.no_grad():
        reference = whole(ids, output_hidden_states=True).hidden_states
    target = load_target(directory, (0, 2), CPU, torch.float32)
    assert len(target.decoder.layers) == 3
    torch.testing.assert_close(target.states(ids), torch.cat((reference[1], reference[3]), dim=-1))
    assert torch.equal(target.head, whole.get_output_embeddings().weight)
    assert not target.head.requires_grad


def test_the_state_after_the_last_layer_is_taken_before_the_final_norm(target_dir: Path) -> None:
    ids = torch.randint(3, 90, (1, 6))
    whole = load_causal_lm(target_dir, CPU, torch.float32)
    seen = {}
    whole.get_decoder().layers[3].register_forward_hook(lambda *call: seen.update(state=call[2]))
    with torch.no_grad():
        whole(ids)
    state = seen["state"][0] if isinstance(seen["state"], tuple) else seen["state"]
    torch.testing.assert_close(load_target(target_dir, (3,), CPU, torch.float32).states(ids), state)


def test_padding_at_the_end_does_not_change_the_states_of_real_tokens(target_dir: Path) -> None:
    target = load_target(target_dir, (1, 2), CPU, torch.float32)
    ids = torch.randint(3, 90, (1, 9))
    padded = torch.cat((ids, torch.zeros(1, 5, dtype=torch.long)), dim=1)
    torch.testing.assert_close(target.states(ids), target.states(padded)[:, :9])


def test_a_missing_or_damaged_target_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(CannotStart, match=r"has no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CannotStart, match=r"config\.json cannot be read"):
        read_config(tmp_path)
    directory = make_target(tmp_path / "t")
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(CannotStart) as caught:
        load_causal_lm(directory, CPU, torch.float32)
    assert str(directory) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_fingerprint_tells_other_weights_of_the_same_shape(tmp_path: Path) -> None:
    directory = make_target(tmp_path / "t")
    before = target_fingerprint(directory)
    assert before == target_fingerprint(directory)
    weights = directory / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-10] ^= 1
    weights.write_bytes(content)
    assert target_fingerprint(directory) != before


def tokenizer(directory: Path, special: dict[int, str], largest: int) -> Path:
    added = [{"id": i, "content": text, "special": True} for i, text in special.items()]
    vocabulary = {f"t{i}": i for i in range(largest + 1)}
    (directory / "tokenizer.json").write_text(json.dumps({"added_tokens": added, "model": {"vocab": vocabulary}}))
    return directory


def test_a_token_called_mask_is_taken_first(tmp_path: Path) -> None:
    tokenizer(tmp_path, {2: "<|end|>", 5: "<|mask|>", 6: "<|other|>"}, largest=9)
    assert choose_mask_token(tmp_path, 20, {1, 2}, -1) == 5


def test_else_the_first_id_past_the_tokenizer_where_the_embedding_has_room(tmp_path: Path) -> None:
    tokenizer(tmp_path, {2: "<|end|>"}, largest=9)
    assert choose_mask_token(tmp_path, 20, {1, 2}, -1) == 10


def test_else_a_special_token_that_neither_data_nor_template_uses(tmp_path: Path) -> None:
    tokenizer(tmp_path, {2: "<|end|>", 3: "<a>", 4: "<b>", 5: "<c>"}, largest=9)
    (tmp_path / "chat_template.jinja").write_text("{{ '<c>' }}")
    assert choose_mask_token(tmp_path, 10, {1, 2, 3}, -1) == 4
    with pytest.raises(CannotStart, match="mask_token_id"):
        choose_mask_token(tmp_path, 10, {1, 2, 3, 4}, -1)


def test_a_mask_token_that_is_a_real_token_is_refused(tmp_path: Path) -> None:
    tokenizer(tmp_path, {}, largest=9)
    assert choose_mask_token(tmp_path, 10, {1, 2}, 8) == 8
    with pytest.raises(CannotStart, match="occurs in the data"):
        choose_mask_token(tmp_path, 10, {1, 2, 8}, 8)
    with pytest.raises(CannotStart, match="beyond the target's vocabulary"):
        choose_mask_token(tmp_path, 10, {1, 2}, 10)
