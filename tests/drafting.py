"""Targets whose text wanders, and drafters that guess some of it: what acceptance lengths are tested with."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dflash_trainer.completions import generate
from dflash_trainer.drafter import Drafter
from dflash_trainer.drafter_config import DrafterConfig, spaced_layer_ids
from dflash_trainer.loader import Batch, Cutter
from dflash_trainer.loss import position_weights
from dflash_trainer.plan import make_plan
from dflash_trainer.step import block_loss
from dflash_trainer.store import Survey, TokenStore
from dflash_trainer.target import Target, load_causal_lm, load_target

CPU = torch.device("cpu")
VOCABULARY, MASK_TOKEN = 64, 63
END_TOKEN = 2
PROMPTS = [[5, 9, 20], [33, 8, 41, 17, 3, 60], [12] * 4, [50, 2, 50, 2], list(range(20, 40)), [44]]


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """These models are too small for more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def wandering_target(directory: Path, model_type: str) -> Path:
    """A tiny random target with a head of its own, so that it does not only repeat its last token."""
    import transformers

    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 64,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": END_TOKEN,
        "pad_token_id": 0,
    }
    if model_type == "qwen3_5_text":
        sizes |= {
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
        }
    if model_type == "mistral":
        sizes |= {"sliding_window": 8}
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(model_type, **sizes))
    for parameter in model.parameters():
        parameter.data.mul_(6 if parameter.dim() > 1 else 1)
    model.save_pretrained(directory)
    return directory


def add_tokenizer(directory: Path) -> Path:
    """Gives a target a tokenizer of one word a token, "w0" to "w59", and a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"w{i}": i for i in range(60)} | {"<user>": 60, "<assistant>": 61, "<system>": 62}
    vocabulary = {"<end>" if i == END_TOKEN else word: i for word, i in vocabulary.items()}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<end>")
    tokenizer.chat_template = (
        "{% for turn in messages %}<{{ turn.role }}> {{ turn.content }} <end> {% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    tokenizer.save_pretrained(directory)
    return directory


def drafter_config(layers: int = 2, block_size: int = 6) -> DrafterConfig:
    """Sizes of a drafter for a wandering target."""
    return DrafterConfig(
        hidden_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=64,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        vocab_size=VOCABULARY,
        max_position_embeddings=256,
        num_target_layers=6,
        block_size=block_size,
        mask_token_id=MASK_TOKEN,
        target_layer_ids=spaced_layer_ids(6, layers),
    )


def trained_drafter(
    target_dir: Path,
    config: DrafterConfig,
    prompts: Sequence[Sequence[int]],
    steps: int,
    lr: float = 5e-3,
    spoil: Callable[[Batch], Batch] = lambda batch: batch,
) -> Drafter:
    """A drafter trained for a few steps, by the trainer's own loss, on what the target writes after the prompts."""
    model = load_causal_lm(target_dir, CPU, torch.float32)
    rows = [[*prompt, *generate(model, [prompt], 60, 0.0)[0]] for prompt in prompts]
    masks = [np.arange(len(row)) >= len(prompt) for row, prompt in zip(rows, prompts, strict=True)]
    offsets = np.cumsum([0, *map(len, rows)])
    mask = np.concatenate(masks).astype(np.uint8)
    tokens = np.concatenate(rows).astype(np.int32)
    survey = Survey(offsets, np.arange(len(rows)), np.bincount(tokens) > 0, int(mask.sum()), "", {}, 0)
    store = TokenStore(tokens, mask, survey)
    plan = make_plan(np.diff(offsets), 1024, 0, steps, steps)
    cutter = Cutter(store, plan, 0, 64, config.mask_token_id, position_weights(config.block_size, 0.0).numpy())
    target: Target = load_target(target_dir, config.target_layer_ids, CPU, torch.float32)
    drafter = Drafter(config)
    drafter.reset_parameters(0)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=lr)
    for step in range(steps):
        batch = spoil(cutter.cut(step))
        loss, _ = block_loss(drafter, target, batch, target.states(batch.input_ids))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter.eval()
