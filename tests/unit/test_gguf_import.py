"""A GGUF model as a Hugging Face directory: the weights, and the tokens that the file's metadata names."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from dflash_trainer.chats import load_tokenizer
from dflash_trainer.completions import generate, stop_ids
from dflash_trainer.errors import CannotStart
from dflash_trainer.gguf_import import import_gguf
from dflash_trainer.target import load_causal_lm, read_config

CPU = torch.device("cpu")
HIDDEN, HEADS, KV_HEADS, LAYERS, MLP = 64, 4, 2, 2, 96
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unused>"]
LETTERS = list("abcdefghijklmnopqrstuvwxyz")
TOKENS = [*CONTROL, *LETTERS, "Ġ", "ab", "de"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


def write_gguf(path: Path, **ids: int) -> dict[str, np.ndarray[Any, Any]]:
    """A tiny Llama as llama.cpp has it, with one quantized tensor. Returns the weights that it stands for."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_merges(["a b", "d e"])
    writer.add_token_types([3] * len(CONTROL) + [1] * (len(TOKENS) - len(CONTROL)))
    writer.add_chat_template(TEMPLATE)
    for name, value in ids.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", value)
    rng = np.random.default_rng(0)
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {"token_embd": (len(TOKENS), HIDDEN), "output_norm": (HIDDEN,)}
    for i in range(LAYERS):
        shapes |= {
            f"blk.{i}.attn_norm": (HIDDEN,),
            f"blk.{i}.attn_q": (HIDDEN, HIDDEN),
            f"blk.{i}.attn_k": (kv, HIDDEN),
            f"blk.{i}.attn_v": (kv, HIDDEN),
            f"blk.{i}.attn_output": (HIDDEN, HIDDEN),
            f"blk.{i}.ffn_norm": (HIDDEN,),
            f"blk.{i}.ffn_gate": (MLP, HIDDEN),
            f"blk.{i}.ffn_up": (MLP, HIDDEN),
            f"blk.{i}.ffn_down": (HIDDEN, MLP),
        }
    weights = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    for name, weight in weights.items():
        if name == "token_embd":
            packed = gguf.quants.quantize(weight, gguf.GGMLQuantizationType.Q4_1)
            weights[name] = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q4_1)
            writer.add_tensor(f"{name}.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
        else:
            writer.add_tensor(f"{name}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def test_the_weights_are_those_of_the_file_in_float32(tmp_path: Path) -> None:
    weights = write_gguf(tmp_path / "m.gguf", bos=1, eos=2)
    import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    model = load_causal_lm(tmp_path / "out", CPU, torch.float32)
    layer = model.model.layers[1]
    for ours, name in (
        (model.get_input_embeddings(), "token_embd"),
        (layer.self_attn.v_proj, "blk.1.attn_v"),
        (layer.self_attn.o_proj, "blk.1.attn_output"),
        (layer.mlp.down_proj, "blk.1.ffn_down"),
        (model.model.norm, "output_norm"),
    ):
        assert np.array_equal(ours.weight.numpy(), weights[name]), name
    config = read_config(tmp_path / "out")
    assert (config.num_hidden_layers, config.num_key_value_heads, config.rope_parameters["rope_theta"]) == (
        2,
        2,
        1e4,
    )


def test_the_end_is_the_one_that_the_file_names(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", bos=1, eos=2, padding=0)
    import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    tokenizer, model = load_tokenizer(tmp_path / "out"), load_causal_lm(tmp_path / "out", CPU, torch.float32)
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == (CONTROL[2], CONTROL[0], CONTROL[1])
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (2, 0)
    assert stop_ids(model) == {2}
    assert generate(model, [[1, 5]], 4, 0.0)[0]


def test_without_a_padding_token_the_end_pads(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", bos=1, eos=2)
    import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    assert load_tokenizer(tmp_path / "out").pad_token_id == 2


def test_control_tokens_are_single_ids_and_the_chat_template_is_kept(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", bos=1, eos=2)
    import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    tokenizer = load_tokenizer(tmp_path / "out")
    assert [tokenizer.encode(text, add_special_tokens=False) for text in CONTROL] == [[0], [1], [2], [3]]
    text = tokenizer.apply_chat_template([{"role": "user", "content": "abc"}], tokenize=False)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == [1, TOKENS.index("ab"), TOKENS.index("c"), 2]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "abc"


def test_everybody_may_read_it_and_nothing_else_is_left(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", bos=1, eos=2)
    import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o755
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} == {0o644}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.gguf", "out"]


def test_a_directory_that_exists_is_left_alone(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", bos=1, eos=2)
    (tmp_path / "out").mkdir()
    with pytest.raises(CannotStart, match="out exists; remove it or name another directory"):
        import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_no_file_a_cut_file_and_one_without_an_end_are_refused_in_one_line(tmp_path: Path) -> None:
    write_gguf(tmp_path / "whole.gguf", bos=1, eos=2)
    content = (tmp_path / "whole.gguf").read_bytes()
    for size in (3, 400, len(content) - 20000):
        (tmp_path / f"cut-{size}.gguf").write_bytes(content[:size])
    (tmp_path / "text.gguf").write_text("no model at all, but long enough to hold a header")
    write_gguf(tmp_path / "endless.gguf", bos=1)
    write_gguf(tmp_path / "no-begin.gguf", eos=2)  # transformers 5.15 needs it
    names = ["none", "text", "endless", "no-begin", *(path.stem for path in tmp_path.glob("cut-*"))]
    assert len(names) == 7
    for name in names:
        with pytest.raises(CannotStart) as caught:
            import_gguf(tmp_path / f"{name}.gguf", tmp_path / "out")
        assert f"{name}.gguf" in str(caught.value)
        assert "\n" not in str(caught.value)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
