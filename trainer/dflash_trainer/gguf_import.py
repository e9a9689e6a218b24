"""`dflash-train import-gguf`: a GGUF model → a Hugging Face directory that a run can use as its target."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_trainer.errors import CannotStart
from dflash_trainer.whole import whole_directory

CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL


@dataclass(frozen=True, slots=True)
class TokenIds:
    """What a GGUF file's metadata says of its tokens."""

    named: dict[str, int]  # eos, pad, and bos if there is one: by the names that transformers has for them
    control: dict[int, str]  # ids and texts of the tokens that are never text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `dflash-train import-gguf`."""
    parser.add_argument("gguf", type=Path, metavar="FILE", help="the GGUF file")
    parser.add_argument("output", type=Path, metavar="DIR", help="directory to make")


def run(args: argparse.Namespace) -> int:
    """Imports and says where."""
    import_gguf(args.gguf, args.output)
    print(f"{args.output}: made from {args.gguf}")
    return 0


def import_gguf(gguf: Path, output: Path) -> None:
    """Dequantizes to float32 into `output`, which appears whole or not at all. Raises CannotStart.

    float32, although bfloat16 takes half the disk: scale · 4 bits + minimum does not fit the 8 bits of bfloat16's
    significand, so rounding would make another target, and a CPU computes in float32 anyway.
    """
    if output.exists():
        raise CannotStart(f"{output} exists; remove it or name another directory")
    ids = read_token_ids(gguf)
    model, tokenizer = _load(gguf)
    for token, text in ids.control.items():
        if tokenizer.encode(text, add_special_tokens=False) != [token]:
            raise CannotStart(f"{gguf}: transformers' tokenizer does not read {text} as its token {token}")
    for name, token in ids.named.items():  # transformers 5.15 takes the begin token for the end
        setattr(tokenizer, f"{name}_token", tokenizer.convert_ids_to_tokens(token))
        setattr(model.config, f"{name}_token_id", token)
        setattr(model.generation_config, f"{name}_token_id", token)
    tokenizer.clean_up_tokenization_spaces = False
    with whole_directory(output) as unfinished:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)


def read_token_ids(gguf: Path) -> TokenIds:
    """The token ids in the file's metadata; padding is the end token where it names none. Raises CannotStart."""
    try:
        from gguf import GGUFReader

        fields = GGUFReader(gguf).fields
        contents = {name: field.contents() for name, field in fields.items() if name.startswith("tokenizer.ggml.")}
    except ImportError as error:
        raise CannotStart(f"GGUF files cannot be read: {error}; pip install gguf accelerate") from error
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise CannotStart(f"{gguf} is not a whole GGUF file: {error}; download it again") from error
    values: dict[str, Any] = {name.removeprefix("tokenizer.ggml."): value for name, value in contents.items()}
    if "eos_token_id" not in values:
        raise CannotStart(f"{gguf} names no end token (tokenizer.ggml.eos_token_id); it cannot be a target")
    named = {"eos": values["eos_token_id"], "pad": values.get("padding_token_id", values["eos_token_id"])}
    if "bos_token_id" in values:
        named["bos"] = values["bos_token_id"]
    kinds = values.get("token_type", [])
    return TokenIds(named, {i: values["tokens"][i] for i, kind in enumerate(kinds) if kind == CONTROL_TOKEN})


def _load(gguf: Path) -> tuple[Any, Any]:
    """transformers' model, in float32, and tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    try:
        model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        return model, AutoTokenizer.from_pretrained(**where)
    except Exception as error:  # the conversion raises what it likes
        raise CannotStart(f"{gguf} cannot be imported: {' '.join(str(error).split())[:300]}") from error
