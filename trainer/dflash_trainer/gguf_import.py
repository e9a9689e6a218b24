"""`dflash-train import-gguf`: a GGUF model → a Hugging Face directory that a run can use as its target."""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from dflash_trainer.errors import CannotStart


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
    """Dequantizes to float32 into `output`, which appears whole or not at all.

    float32, since a CPU trains in it and a rounding on the way would make another target. Raises CannotStart.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if output.exists():
        raise CannotStart(f"{output} exists; remove it or name another directory")
    if not gguf.is_file():
        raise CannotStart(f"{gguf} is not a file; give a GGUF model")
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    try:
        model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**where)
    except (OSError, ValueError, KeyError) as error:
        raise CannotStart(f"{gguf} cannot be imported: {' '.join(str(error).split())[:300]}") from error
    ends = gguf_ids(gguf)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(ends["eos"])
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(ends.get("padding", ends["eos"]))
    for name in ("eos", "bos", "padding"):
        attribute = {"padding": "pad"}.get(name, name) + "_token_id"
        setattr(model.generation_config, attribute, ends.get(name, ends["eos"] if name == "padding" else None))
    unfinished = output.with_name(f".{output.name}.writing")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    mark_special_tokens(unfinished / "tokenizer.json", gguf_control_tokens(gguf))
    for path in unfinished.iterdir():
        path.chmod(0o644)
    unfinished.rename(output)


def gguf_ids(gguf: Path) -> dict[str, int]:
    """The token ids that the file's metadata names: eos, and bos and padding if it has them."""
    reader = _reader(gguf)
    found = {}
    for name in ("bos", "eos", "padding"):
        value = reader.get_field(f"tokenizer.ggml.{name}_token_id")
        if value is not None:
            found[name] = int(value.contents())
    if "eos" not in found:
        raise CannotStart(f"{gguf} names no end token (tokenizer.ggml.eos_token_id); it cannot be a target")
    return found


def gguf_control_tokens(gguf: Path) -> dict[int, str]:
    """Ids and texts of the tokens that the file calls control tokens (type 3)."""
    reader = _reader(gguf)
    tokens, types = reader.get_field("tokenizer.ggml.tokens"), reader.get_field("tokenizer.ggml.token_type")
    if tokens is None or types is None:
        return {}
    texts = tokens.contents()
    return {i: texts[i] for i, kind in enumerate(types.contents()) if kind == 3}


def mark_special_tokens(path: Path, control: dict[int, str]) -> None:
    """Lists every control token in tokenizer.json as a special one, which the conversion forgets to do."""
    tokenizer = json.loads(path.read_text())
    added = {token["id"]: token for token in tokenizer["added_tokens"]}
    for i, content in control.items():
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        added[i] = {"id": i, "content": content, "special": True, **plain}
    tokenizer["added_tokens"] = [added[i] for i in sorted(added)]
    path.write_text(json.dumps(tokenizer, ensure_ascii=False, indent=1) + "\n")


def _reader(gguf: Path) -> Any:
    from gguf import GGUFReader

    return GGUFReader(gguf)
