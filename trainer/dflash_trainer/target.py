"""The frozen target: its tapped hidden states, its embedding and its head."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from dflash_trainer.errors import CannotStart

SAMPLE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Target:
    """`decoder` runs up to the last tapped layer only and returns nothing of use: `taps` collects the states."""

    decoder: nn.Module
    taps: tuple[nn.Module, ...]
    embedding: Tensor  # [V, H]
    head: Tensor  # [V, H]; the same storage as the embedding where the target ties them

    @torch.no_grad()
    def states(self, input_ids: Tensor) -> Tensor:
        """Tapped states [B, T, n·H] of input_ids [B, T], in the order of the tapped layers.

        Rows are padded at the end: a causal target's states of real tokens do not see the padding.
        """
        collected: dict[nn.Module, Tensor] = {}

        def collect(layer: nn.Module, _inputs: tuple[Any, ...], output: Any) -> None:
            collected[layer] = output[0] if isinstance(output, tuple) else output

        hooks = [layer.register_forward_hook(collect) for layer in self.taps]
        try:
            self.decoder(input_ids=input_ids, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        return torch.cat([collected[layer] for layer in self.taps], dim=-1)


def read_config(directory: Path) -> Any:
    """The text part of the target's transformers configuration. Raises CannotStart if there is none."""
    from transformers import AutoConfig

    if not (directory / "config.json").is_file():  # else transformers takes the path for a name on a hub
        raise CannotStart(f"target {directory} has no config.json; give a Hugging Face model directory")
    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True).get_text_config()
    except (OSError, ValueError, KeyError) as error:
        detail = " ".join(str(error).split())[:300]
        raise CannotStart(
            f"target {directory}: config.json cannot be read ({detail}); give a Hugging Face model directory"
        ) from error


def load_causal_lm(directory: Path, device: torch.device, dtype: torch.dtype) -> Any:
    """The whole target as a transformers model, frozen. Raises CannotStart if it cannot be loaded."""
    from transformers import AutoModelForCausalLM

    try:
        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, local_files_only=True)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        detail = " ".join(str(error).split())[:300]
        raise CannotStart(
            f"target {directory} cannot be loaded: {detail}; check it with `dflashctl verify`"
        ) from error
    model.to(device)
    return model.eval().requires_grad_(False)


def load_target(directory: Path, layer_ids: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Target:
    """The target cut after its last tapped layer. Raises CannotStart for one that a drafter cannot use."""
    model = load_causal_lm(directory, device, dtype)
    head = model.get_output_embeddings()
    if head.bias is not None:
        raise CannotStart(f"target {directory}: its LM head has a bias, which a DFlash checkpoint cannot express")
    decoder = model.get_decoder()
    taps = tuple(decoder.layers[i] for i in layer_ids)
    decoder.layers = decoder.layers[: max(layer_ids) + 1]
    decoder.norm = nn.Identity()
    return Target(decoder, taps, model.get_input_embeddings().weight, head.weight)


def target_fingerprint(directory: Path) -> str:
    """sha256 over the configuration and, of each weight file, name, size, first and last MiB.

    Cheap for 54 GB, and enough to tell one target from another that was saved in its place.
    """
    digest = hashlib.sha256()
    config = json.loads((directory / "config.json").read_text())
    for noise in ("_name_or_path", "transformers_version"):
        config.pop(noise, None)
    digest.update(json.dumps(config, sort_keys=True).encode())
    for path in sorted(directory.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(SAMPLE_BYTES))
            file.seek(max(0, size - SAMPLE_BYTES))
            digest.update(file.read())
    return digest.hexdigest()


def choose_mask_token(directory: Path, vocab_size: int, used: set[int], wanted: int) -> int:
    """The id that stands for "to be predicted": never a token that the data or the chat template uses.

    `wanted` ≥ 0 is taken if it is free. Else, in this order: a token that the tokenizer calls a mask; the
    first id past the tokenizer's, where the embedding is larger (as published for Qwen3.6: 248070); a special token
    that nothing uses. Raises CannotStart if there is none.
    """
    if wanted >= 0:
        if wanted >= vocab_size:
            raise CannotStart(f"mask_token_id {wanted} is beyond the target's vocabulary of {vocab_size}")
        if wanted in used:
            raise CannotStart(
                f"mask_token_id {wanted} occurs in the data, so it is a real token; choose one that does not"
            )
        return wanted
    try:
        tokenizer = json.loads((directory / "tokenizer.json").read_text())
        added: dict[int, Any] = {int(token["id"]): token for token in tokenizer["added_tokens"]}
        largest = max([*added, *_vocabulary_ids(tokenizer)])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CannotStart(
            f"target {directory}: tokenizer.json gives no vocabulary ({type(error).__name__}: {error}); "
            f"set mask_token_id to an id that no text uses"
        ) from error
    spoken = _template_text(directory)
    free = {
        i: token["content"]
        for i, token in sorted(added.items())
        if token.get("special") and i not in used and i < vocab_size and token["content"] not in spoken
    }
    masks = [i for i, content in free.items() if "mask" in content.lower()]
    beyond = [largest + 1] if largest + 1 < vocab_size else []
    choices: list[int] = [*masks, *beyond, *reversed(free)]
    if not choices:
        raise CannotStart(
            f"target {directory}: no reserved token is free to be the mask; set mask_token_id to an id that no "
            f"text uses"
        )
    return choices[0]


def _vocabulary_ids(tokenizer: dict[str, Any]) -> list[int]:
    vocabulary = tokenizer["model"]["vocab"]
    return list(vocabulary.values()) if isinstance(vocabulary, dict) else list(range(len(vocabulary)))


def _template_text(directory: Path) -> str:
    """Everything that names tokens in use: the chat template and the begin, end and padding tokens."""
    text = ""
    for name in ("chat_template.jinja", "tokenizer_config.json", "generation_config.json"):
        path = directory / name
        if path.exists():
            content = path.read_text()
            if name == "tokenizer_config.json":
                values = json.loads(content)
                values.pop("added_tokens_decoder", None)
                for listing in ("additional_special_tokens", "extra_special_tokens"):
                    values.pop(listing, None)
                content = json.dumps(values, ensure_ascii=False)
            text += content
    return text
