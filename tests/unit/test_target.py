"""The frozen target: the right states, no more layers than needed, and the mask token."""

import functools
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_target
from dflash_trainer.errors import CannotStart
from dflash_trainer.target import (
    causal_convolution,
    check_kernels,
    choose_mask_token,
    compile_layers,
    kernels,
    load_causal_lm,
    load_target,
    read_config,
    target_fingerprint,
)
from safetensors.torch import load_file, save_file

CPU = torch.device("cpu")


FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "gemma2",
    "gemma3_text",
)


@pytest.mark.parametrize("model_type", FAMILIES)
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


@pytest.mark.parametrize("model_type", FAMILIES)
def test_final_states_are_those_that_the_head_turns_into_logits(model_type: str, tmp_path: Path) -> None:
    directory = make_target(tmp_path / model_type, model_type)
    ids = torch.randint(3, 90, (2, 12))
    target = load_target(directory, (0, 2), CPU, torch.float32, final=True)
    tapped, final = target.states_and_final(ids)
    assert final is not None
    logits = final @ target.head.T
    with torch.no_grad():
        whole = target.model(ids, output_hidden_states=True)
    if cap := getattr(target.model.config, "final_logit_softcapping", None):
        logits = cap * torch.tanh(logits / cap)
    torch.testing.assert_close(logits, whole.logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(tapped, torch.cat([whole.hidden_states[i + 1] for i in (0, 2)], dim=-1))


def test_its_model_writes_while_the_decoder_collects_states(target_dir: Path) -> None:
    target = load_target(target_dir, (0, 1), CPU, torch.float32, generates=True)
    assert (len(target.decoder.layers), len(target.model.get_decoder().layers)) == (2, 4)
    ids = torch.randint(3, 90, (1, 12))
    expected = target.states(ids)
    written: list[torch.Tensor] = []

    def write(*_: Any) -> None:
        if not written:
            written.append(target.model(torch.randint(3, 90, (1, 5))).logits)

    target.decoder.layers[1].register_forward_pre_hook(write)
    assert torch.equal(target.states(ids), expected)
    assert written


def make_multimodal_target(directory: Path) -> Any:
    """A tiny model as Qwen3.6 is published: a vision tower around a hybrid text model, head and embedding apart."""
    from transformers.models.qwen3_5 import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    text = make_target(directory / "text", "qwen3_5_text")
    sizes = json.loads((text / "config.json").read_text()) | {"tie_word_embeddings": False}
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 32,
        "out_hidden_size": 32,
        "patch_size": 4,
        "num_position_embeddings": 16,
    }
    torch.manual_seed(0)
    config = Qwen3_5Config(text_config=sizes, vision_config=vision, tie_word_embeddings=False)
    model = Qwen3_5ForConditionalGeneration(config)
    model.save_pretrained(directory / "whole", max_shard_size="50KB")
    return model.eval()


def test_of_a_multimodal_model_the_text_part_is_loaded_as_far_as_it_is_tapped(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = make_multimodal_target(tmp_path)
    assert len(list((tmp_path / "whole").glob("*.safetensors"))) > 2
    ids = torch.randint(3, 90, (2, 12))
    with torch.no_grad():
        reference = whole(input_ids=ids, output_hidden_states=True).hidden_states
    capfd.readouterr()
    target = load_target(tmp_path / "whole", (0, 2), CPU, torch.float32)
    torch.testing.assert_close(target.states(ids), torch.cat((reference[1], reference[3]), dim=-1))
    assert torch.equal(target.head, whole.lm_head.weight)
    assert torch.equal(target.embedding, whole.get_input_embeddings().weight)
    names = {name for name, _ in target.decoder.named_parameters()}
    assert not [name for name in names if "visual" in name or name.startswith(("layers.3", "norm"))]
    said = "".join(capfd.readouterr())
    assert "UNEXPECTED" not in said
    assert "Loading" not in said  # a bar, where there is no terminal


def test_a_weight_that_is_missing_is_refused_and_not_made_up(tmp_path: Path) -> None:
    directory = make_target(tmp_path / "t")
    weights = load_file(directory / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    for changed in ({name: weights[name][:-1].clone()}, {}):
        others = {other: weight for other, weight in weights.items() if other != name}
        save_file(others | changed, directory / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CannotStart, match=rf"target .*{re.escape(name)}") as caught:
            load_target(directory, (0, 1), CPU, torch.float32)
        assert "\n" not in str(caught.value)
    load_target(directory, (0,), CPU, torch.float32)  # which does not need it


def test_which_kernels_do_the_work_is_known_and_a_gpu_without_those_of_linear_attention_is_refused(
    target_dir: Path, tmp_path: Path
) -> None:
    plain = kernels(load_target(target_dir, (1,), CPU, torch.float32).decoder)
    assert plain == {"attention": "sdpa"}
    hybrid = kernels(load_target(make_target(tmp_path / "t", "qwen3_5_text"), (1,), CPU, torch.float32).decoder)
    assert hybrid == {"attention": "sdpa", "delta rule": "torch", "convolution": "torch"}
    gpu = torch.device("cuda", 0)
    with pytest.raises(CannotStart, match=r"flash-linear-attention cannot be imported; install it"):
        check_kernels(hybrid, gpu, slow_allowed=False)
    for found, device, allowed in ((hybrid, gpu, True), (hybrid, CPU, False), (plain, gpu, False)):
        check_kernels(found, device, allowed)
    check_kernels(hybrid | {"delta rule": "fla"}, gpu, slow_allowed=False)


@pytest.mark.parametrize(
    ("function", "package"), [(functools.partial(len), "functools"), (len, "builtins"), (None, "torch")]
)
def test_kernels_that_are_not_written_in_python_are_named_too(
    function: Any, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load_target(make_target(tmp_path / "t", "qwen3_5_text"), (1,), CPU, torch.float32)
    monkeypatch.setattr("transformers.models.qwen3_5.modeling_qwen3_5.causal_conv1d_fn", function)
    assert kernels(target.decoder)["convolution"] == package


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What torch.compile makes in a test; it is run as it is, for a GPU's compiler is not here."""
    made: list[Any] = []
    compile_with = torch.compile

    def backend(graph: Any, _inputs: Any) -> Any:
        made.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda f, dynamic: compile_with(f, dynamic=dynamic, backend=backend))
    torch.compiler.reset()
    yield made
    torch.compiler.reset()


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "qwen3_5_text"])
def test_compiled_layers_give_the_same_states_and_share_what_was_compiled(
    model_type: str, graphs: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = functools.partial(load_target, make_target(tmp_path / "t", model_type), (0, 3), CPU, torch.float32)
    sizes = ((2, 30), (3, 41), (2, 12))
    batches = [torch.randint(3, 90, size) for size in sizes]
    expected = [load().states(ids) for ids in batches]
    target = load()
    if model_type == "qwen3_5_text":  # what a GPU has; the slow path stands in, as it is never compiled
        monkeypatch.setattr(
            "dflash_trainer.target.kernels", lambda _: {"delta rule": "fla", "convolution": "torch"}
        )
        module = sys.modules[type(target.decoder.layers[0]).__module__]
        for name in ("causal_conv1d_fn", "torch_chunk_gated_delta_rule"):
            monkeypatch.setattr(module, name, getattr(module, name))  # compile_layers() changes them
    compile_layers(target.decoder)
    for ids, states in zip(batches, expected, strict=True):
        torch.testing.assert_close(target.states(ids), states, rtol=1e-4, atol=1e-5)
    # Not for each layer, nor for each size; the delta rule cuts a layer of its kind into pieces.
    assert len(graphs) <= (6 if model_type == "qwen3_5_text" else 1)


def test_layers_on_the_slow_path_of_linear_attention_are_not_compiled(graphs: list[Any], tmp_path: Path) -> None:
    target = load_target(make_target(tmp_path / "t", "qwen3_5_text"), (1,), CPU, torch.float32)
    compile_layers(target.decoder)
    target.states(torch.randint(3, 90, (1, 8)))
    assert not graphs


def test_layers_that_cannot_be_compiled_are_a_reason_not_to_start(
    target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_graph: Any, _inputs: Any) -> Any:
        raise NotImplementedError("no such\ninstruction")

    compile_with = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, dynamic: compile_with(f, dynamic=dynamic, backend=broken))
    torch.compiler.reset()
    target = load_target(target_dir, (1,), CPU, torch.float32)
    compile_layers(target.decoder)
    with pytest.raises(CannotStart, match=r'instruction.*; set compile = "never" in \[target\]$') as caught:
        target.states(torch.randint(3, 90, (1, 8)))
    assert "\n" not in str(caught.value)
    torch.compiler.reset()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_the_convolution_is_that_of_transformers(bias: bool, activation: str | None) -> None:
    from transformers.models.qwen3_5 import modeling_qwen3_5

    theirs = inspect.unwrap(modeling_qwen3_5.causal_conv1d_fn)
    states, weight = torch.randn(2, 6, 11), torch.randn(6, 4)
    added = torch.randn(6) if bias else None
    for dtype, error in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
        words = (states.to(dtype), weight.to(dtype), None if added is None else added.to(dtype), activation)
        found = causal_convolution(*words)
        assert found.dtype == dtype
        torch.testing.assert_close(found, theirs(*words), rtol=error, atol=error)


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
