"""Small real things that many tests need: a target, a dataset, a run."""

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from dflash_trainer import store as stores
from dflash_trainer.store import TokenStore

# A time limit on an example measures how busy the machine is.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")

VOCABULARY = 96
MASK_TOKEN = 95


def make_target(directory: Path, model_type: str = "llama") -> Path:
    """A tiny random target of a real architecture, saved as transformers saves it."""
    import transformers

    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 64,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if model_type == "qwen3_5_text":
        sizes |= {
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"] * 2,
        }
    config: Any = transformers.AutoConfig.for_model(model_type, **sizes)
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    for parameter in model.parameters():
        parameter.data.mul_(4 if parameter.dim() > 1 else 1)  # spread enough to make choices, not ties
    model.get_input_embeddings().weight.data.mul_(4)  # as large as a trained head's, so that a drafter can be sure
    model.save_pretrained(directory)
    return directory


def save_dataset(directory: Path, columns: dict[str, Sequence[Sequence[int]]]) -> Path:
    """A dataset directory as datasets.save_to_disk makes it."""
    from datasets import Dataset

    Dataset.from_dict(columns).save_to_disk(directory)
    return directory


def make_dataset(directory: Path, rows: int = 48) -> Path:
    """Rows that count upwards by a step of their own, so that there is something to learn."""
    rng = np.random.default_rng(0)
    ids, masks = [], []
    for _ in range(rows):
        length, start, stride = rng.integers(16, 40), rng.integers(3, 90), rng.integers(1, 4)
        ids.append((3 + (start + stride * np.arange(length)) % (MASK_TOKEN - 3)).tolist())
        masks.append([0] * 5 + [1] * (int(length) - 5))
    return save_dataset(directory, {"input_ids": ids, "loss_mask": masks})


def load_store(directory: Path, max_length: int, vocab_size: int) -> TokenStore:
    """The token store of a dataset directory, by way of a cache that is used once."""
    with tempfile.TemporaryDirectory() as cache:
        return stores.load_store(directory, max_length, vocab_size, Path(cache))


@pytest.fixture(scope="session", autouse=True)
def cache_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where trainings of these tests keep what can be made again."""
    directory = tmp_path_factory.mktemp("cache")
    os.environ["CACHE_DIRECTORY"] = str(directory)
    return directory


@pytest.hookimpl(tryfirst=True)  # xdist reads the marks in this hook
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that share a container or a virtual machine go to the same worker, where there are several."""
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            for shared in {"node", "node_image"} & set(getattr(item, "fixturenames", ())):
                item.add_marker(pytest.mark.xdist_group(shared))


@contextlib.contextmanager
def small_disk(directory: Path, size: int) -> Iterator[Path]:
    """A file system of so many bytes; mounting needs root."""
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", directory], check=True)
    try:
        yield directory
    finally:
        subprocess.run(["umount", directory], check=True)


@pytest.fixture(scope="session")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama."""
    return make_target(tmp_path_factory.mktemp("target") / "llama")


@pytest.fixture(scope="session")
def dataset_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny dataset for it."""
    return make_dataset(tmp_path_factory.mktemp("data") / "counting")


@pytest.fixture
def train_flags(target_dir: Path, dataset_dir: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """Command line of a run of 20 steps that takes seconds; keyword arguments add or replace flags."""

    def flags(**changes: object) -> list[str]:
        values: dict[str, object] = {
            "target-model": target_dir,
            "data-dir": dataset_dir,
            "output-dir": tmp_path / "out",
            "epochs": 20,
            "max-steps": 20,
            "token-budget": 256,
            "max-length": 256,
            "max-anchors": 8,
            "block-size": 4,
            "draft-layers": 2,
            "mask-token-id": MASK_TOKEN,
            "log-interval": 5,
            "save-interval": 5,
            "lr": 2e-3,
        }
        values |= {name.replace("_", "-"): value for name, value in changes.items()}
        return [word for name, value in values.items() for word in (f"--{name}", str(value))]

    return flags
