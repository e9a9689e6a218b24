"""The frozen target: its tapped hidden states, its embedding and its head."""

import contextlib
import copy
import hashlib
import inspect
import json
import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor, nn

from dflash_trainer.compiling import compiled
from dflash_trainer.errors import CannotStart, is_compiling, is_out_of_memory
from dflash_trainer.loss import LogitShape

SAMPLE_BYTES = 1 << 20
DELTA_RULE = "delta rule"
CHOICE = "implementation"  # what transformers' wrapper of such a function calls the one that it chose
CONVOLUTION = "convolution"
CONVOLUTION_NAME = "causal_conv1d_fn"
LINEAR_ATTENTION = {  # names of these functions in transformers' modules
    DELTA_RULE: ("torch_chunk_gated_delta_rule", "chunk_gated_delta_rule"),
    CONVOLUTION: (CONVOLUTION_NAME,),
}


@dataclass(frozen=True, slots=True)
class Target:
    """`decoder` gives the tapped states; it ends with the last tapped layer, unless `final` states are wanted too.

    `model` is the transformers model that the decoder was made from. Its layers are other objects over the same
    weights: it may generate in one thread while the decoder runs in another.
    """

    model: Any
    decoder: Any
    taps: tuple[nn.Module, ...]
    embedding: Tensor  # [V, H]
    head: Tensor  # [V, H]; the same storage as the embedding where the target ties them
    whole: bool  # whether the decoder runs to the end, final norm included
    logit_shape: LogitShape

    def states(self, input_ids: Tensor) -> Tensor:
        """Tapped states [B, T, n·H] of input_ids [B, T], in the order of the tapped layers. Raises CannotStart."""
        return self.states_and_final(input_ids)[0]

    @torch.no_grad()
    def states_and_final(self, input_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """The same, and what the head turns into logits [B, T, H]: the states after the final norm, if `whole`.

        Rows are padded at the end: a causal target's states of real tokens do not see the padding. Raises
        CannotStart if its layers cannot be compiled.
        """
        collected: dict[nn.Module, Tensor] = {}

        def collect(layer: nn.Module, _inputs: tuple[Any, ...], output: Any) -> None:
            collected[layer] = output[0] if isinstance(output, tuple) else output

        hooks = [layer.register_forward_hook(collect) for layer in self.taps]
        try:
            out = self.decoder(input_ids=input_ids, use_cache=False)
        except RuntimeError as error:
            if not is_compiling(error):
                raise
            reason = " ".join(str(error).split())[:300]
            raise CannotStart(
                f'the target\'s layers cannot be compiled: {reason}; set compile = "never" in [target]'
            ) from error
        finally:
            for hook in hooks:
                hook.remove()
        tapped = torch.cat([collected[layer] for layer in self.taps], dim=-1)
        return tapped, out.last_hidden_state if self.whole else None


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


def load_causal_lm(directory: Path, device: torch.device, dtype: torch.dtype, layers: int | None = None) -> Any:
    """The target's text model, frozen, or its first layers only; each tensor goes from its file to the device.

    What else a multimodal model holds is left in the files. Raises CannotStart if it cannot be loaded, also for
    want of a weight, which transformers would make up.
    """
    from transformers import AutoModelForCausalLM

    config = read_config(directory)
    if layers is not None:
        _keep_layers(config, layers)
    try:
        with _quiet():  # the weights that are left out on purpose fill pages
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                directory,
                config=config,
                dtype=dtype,
                device_map={"": device},
                local_files_only=True,
                ignore_mismatched_sizes=True,  # they are in the report, by name
                output_loading_info=True,
            )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        if is_out_of_memory(error):
            raise
        detail = " ".join(str(error).split())[:300]
        raise CannotStart(
            f"target {directory} cannot be loaded: {detail}; check it with `dflashctl verify`"
        ) from error
    model, report = loaded
    bad = sorted({*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])})
    if bad:
        raise CannotStart(
            f"target {directory}: {len(bad)} weights are missing or of another shape, such as {bad[0]}; copy it "
            f"again"
        )
    return model.eval().requires_grad_(False)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' warnings, and without its bars where nobody watches them."""
    from transformers.utils.logging import disable_progress_bar

    if not sys.stderr.isatty():
        disable_progress_bar()  # type: ignore[no-untyped-call]  # a journal would get it as one long line
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _keep_layers(config: Any, layers: int) -> None:
    """Shortens a configuration, and what it lists for each layer."""
    before = int(config.num_hidden_layers)
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == before:
            setattr(config, name, value[:layers])
    config.num_hidden_layers = layers


def load_target(
    directory: Path,
    layer_ids: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype,
    generates: bool = False,
    final: bool = False,
) -> Target:
    """The target up to its last tapped layer; all of it if it `generates` or its `final` states are wanted.

    Raises CannotStart for one that a drafter cannot use.
    """
    model = load_causal_lm(directory, device, dtype, None if generates or final else max(layer_ids) + 1)
    if model.get_output_embeddings().bias is not None:
        raise CannotStart(f"target {directory}: its LM head has a bias, which a DFlash checkpoint cannot express")
    return tap(model, layer_ids, final)


def random_target(config: Any, layer_ids: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Target:
    """A target of these sizes with random weights, made on the device, up to its last tapped layer."""
    from transformers import AutoModelForCausalLM

    _keep_layers(config, max(layer_ids) + 1)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    return tap(model.eval().requires_grad_(False), layer_ids)


def tap(model: Any, layer_ids: tuple[int, ...], final: bool = False) -> Target:
    """What of a frozen transformers model a drafter is trained with."""
    decoder = _double(model.get_decoder())
    decoder.config = copy.deepcopy(decoder.config)
    depth = len(decoder.layers) if final else max(layer_ids) + 1
    decoder.layers = nn.ModuleList(_double(layer) for layer in decoder.layers[:depth])
    if not final:
        _keep_layers(decoder.config, depth)
        decoder.norm = nn.Identity()
    taps = tuple(decoder.layers[i] for i in layer_ids)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return Target(model, decoder, taps, embedding, head, final, logit_shape(model.config.get_text_config()))


def logit_shape(config: Any) -> LogitShape:
    """What a target of this configuration does to the products with its head (Granite, Cohere, Gemma)."""
    divided, multiplied = getattr(config, "logits_scaling", None), getattr(config, "logit_scale", None)
    cap = getattr(config, "final_logit_softcapping", None)
    return LogitShape(float(1 / divided if divided else multiplied or 1), float(cap or 0))


def embedding_scale(config: Any) -> float:
    """What a target of this configuration multiplies its embeddings by (Gemma, Granite)."""
    if config.model_type.startswith("gemma"):
        return float(config.hidden_size**0.5)
    return float(getattr(config, "embedding_multiplier", None) or 1.0)


def _double(module: nn.Module) -> Any:
    """Another module over the same parameters and parts, with hooks and attributes of its own."""
    double = copy.copy(module)
    vars(double).update({name: copy.copy(value) for name, value in vars(module).items() if isinstance(value, dict)})
    return double


def compile_layers(decoder: Any) -> None:
    """Has the layers compiled, so that what is between the matrix products takes few passes over memory.

    Not with torch's own delta rule, which goes through a sequence chunk by chunk.
    """
    found = kernels(decoder)
    if found.get(DELTA_RULE) == "torch":
        return
    for module in _modules(decoder):
        if found.get(CONVOLUTION) == "torch" and hasattr(module, CONVOLUTION_NAME):
            setattr(module, CONVOLUTION_NAME, causal_convolution)
        for name in LINEAR_ATTENTION[DELTA_RULE]:
            if hasattr(module, name):
                # transformers 5.17 takes the slow path if torch 2.11 compiles, which says that it exports.
                setattr(module, name, torch.compiler.disable(getattr(module, name)))  # type: ignore[no-untyped-call]
    for layer in decoder.layers:
        layer.forward = compiled(layer.forward)


def causal_convolution(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
) -> Tensor:
    """transformers' function of this kind as a sum over the taps, which the compiler merges with its neighbours.

    hidden_states [B, C, T], weight [C, taps], bias [C]; the result is as the first in shape and type. torch's own
    (47 ms of a forward of Qwen3.6-27B's on an H200) wants the states turned round in memory first (71 ms).
    """
    from transformers.activations import ACT2FN

    taps, length = weight.shape[-1], hidden_states.shape[-1]
    # As the states lie in memory, channels last: else the compiler turns the result round too.
    padded = F.pad(hidden_states.transpose(1, 2), (0, 0, taps - 1, 0))
    out = sum(padded[:, i : i + length].float() * weight[:, i].float() for i in range(taps))
    assert isinstance(out, Tensor)
    if bias is not None:
        out = out + bias.float()
    if activation is not None:
        out = ACT2FN[activation](out)
    return out.to(hidden_states.dtype).transpose(1, 2)


def kernels(decoder: Any) -> dict[str, str]:
    """Which package does what in a target's layers; "torch" is the slow path of linear attention.

    Found where transformers keeps its choice: a function in the module of the layer's class, or one that it wraps.
    """
    found = {"attention": str(getattr(decoder.config, "_attn_implementation", "unknown"))}
    for module in _modules(decoder):
        for title, names in LINEAR_ATTENTION.items():
            for name in names:
                if name in vars(module):
                    found[title] = _package(vars(module)[name])
    return found


def _modules(decoder: Any) -> set[Any]:
    """The Python modules of a decoder's classes."""
    return {sys.modules[type(part).__module__] for part in decoder.modules()}


def _package(function: Any) -> str:
    """The package that a function of transformers' in the end calls."""
    if function is None:  # how versions before 5 say that there is none
        return "torch"
    with contextlib.suppress(TypeError):  # of what is not written in Python
        function = inspect.unwrap(function, stop=lambda f: CHOICE in inspect.getclosurevars(f).nonlocals)
        function = inspect.getclosurevars(function).nonlocals.get(CHOICE, function)
    package = (getattr(function, "__module__", None) or type(function).__module__).partition(".")[0]
    return "torch" if package == "transformers" else package


def check_kernels(found: Mapping[str, str], device: torch.device, slow_allowed: bool) -> None:
    """Raises CannotStart if a GPU would run linear attention without kernels for it."""
    if device.type == "cuda" and found.get(DELTA_RULE) == "torch" and not slow_allowed:
        raise CannotStart(
            "the target has Gated DeltaNet layers and no kernels for them: flash-linear-attention cannot be "
            'imported; install it, or set slow_kernels = "allow" in [target], which makes a step many times as long'
        )


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
