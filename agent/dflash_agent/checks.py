"""The checks before a start: quick ones, of files and space, by the user who trains. Nothing is started or written.

`dflashctl verify` prints them all; the launcher refuses to start on the first kind that says so. What needs the
trainer's libraries (the data's content, the vocabulary) is checked by `dflash-train check`.
"""

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dflash_agent import runtime
from dflash_agent.dataset import data_files
from dflash_agent.findings import Finding
from dflash_agent.runfile import MIXTURE_WIDTH, STATE_DIR, ConfigError, RunFile, load
from dflash_agent.words import size

PRIVATE_DIRS = (Path("/tmp"), Path("/var/tmp"))
SHARED_MEMORY = Path("/dev/shm")
SHARED_BYTES = 64 << 20  # what containers get by default
USER = "dflash"
DEADLINE = 600  # seconds for reading the whole data set
MASTER_BYTES = 12  # a parameter of a checkpoint's state: float32 master and AdamW's two moments
EXPORT_BYTES = 4  # and of its export, at most


def check_run(run: RunFile) -> Iterator[Finding]:
    """Every quick check of a run, as the user that this process runs as."""
    yield from check_private(run)
    if run.train.dp_pairs != 1:
        yield Finding(
            "config", "refuse", f"dp_pairs = {run.train.dp_pairs}: this version trains one pair", "set it to 1"
        )
    yield from check_target(Path(run.target.model))
    yield from check_data(Path(run.data.dir))
    if run.drafter.init_from:
        yield check_drafter(Path(run.drafter.init_from))
    if run.eval.prompts:
        yield check_prompts(Path(run.eval.prompts))
    output = list(check_output(Path(run.output.dir), made_by_unit=STATE_DIR / run.name))
    yield from output
    if all(finding.severity == "ok" for finding in output):
        yield from check_space(run)
    yield from check_shm()
    yield check_runtime()


def check_private(run: RunFile) -> Iterator[Finding]:
    """Paths that the unit would not see: it has /tmp and /var/tmp to itself (PrivateTmp=, systemd.exec(5))."""
    paths = {"model": run.target.model, "data dir": run.data.dir, "output dir": run.output.dir}
    paths |= {"init_from": run.drafter.init_from, "prompts of [eval]": run.eval.prompts}
    for key, value in paths.items():
        for private in PRIVATE_DIRS:
            if Path(value).is_relative_to(private):
                yield Finding(
                    "config",
                    "refuse",
                    f"{key} {value} lies below {private}, which the unit has to itself",
                    "use another directory",
                )


def check_target(directory: Path) -> Iterator[Finding]:
    """A Hugging Face directory whose weight files are all there and as long as they say."""
    try:
        config = json.loads((directory / "config.json").read_text())
        sizes = config.get("text_config", config)
        missing = [k for k in ("hidden_size", "num_hidden_layers", "vocab_size") if k not in sizes]
    except FileNotFoundError:
        yield Finding(
            "target-missing", "refuse", f"target {directory} has no config.json", "give a Hugging Face directory"
        )
        return
    except (OSError, ValueError, AttributeError) as error:
        yield Finding(
            "target-missing",
            "refuse",
            f"target {directory}: config.json cannot be read: {_reason(error)}",
            "make it readable for user dflash, or copy it again",
        )
        return
    if missing:
        yield Finding("target-incomplete", "refuse", f"target {directory}: config.json lacks {', '.join(missing)}")
        return
    try:
        shards = _shards(directory)
        damaged = [problem for name in shards if (problem := _shard_problem(directory / name))]
    except (OSError, ValueError, KeyError, AttributeError) as error:
        yield Finding("target-incomplete", "refuse", f"target {directory}: {_reason(error)}", "copy it again")
        return
    for problem in damaged:
        yield Finding("target-incomplete", "refuse", f"target {directory}: {problem}", "copy it again")
    if not (directory / "tokenizer.json").exists():
        yield Finding(
            "target-incomplete",
            "warn",
            f"target {directory} has no tokenizer.json",
            "evaluation needs it, and so does choosing a mask token",
        )
    if not damaged:
        whole = sum((directory / name).stat().st_size for name in shards)
        yield Finding(
            "target", "ok", f"target {directory}: {config.get('model_type')}, {size(whole)} in {len(shards)} files"
        )


def _shards(directory: Path) -> list[str]:
    index = directory / "model.safetensors.index.json"
    if index.exists():
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    return ["model.safetensors"]


def _shard_problem(path: Path) -> str | None:
    """Why a safetensors file is not whole: its header says how long it must be."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > size:
                return f"{path.name} is truncated or no safetensors file ({size} bytes)"
            header = json.loads(file.read(length))
        needed = (
            8 + length + max((t["data_offsets"][1] for n, t in header.items() if n != "__metadata__"), default=0)
        )
    except FileNotFoundError:
        return f"weight file {path.name} is missing"
    except (struct.error, ValueError, KeyError, TypeError):
        return f"{path.name} is truncated or no safetensors file"
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror}"
    return None if size == needed else f"{path.name} has {size} bytes instead of {needed}"


def check_data(directory: Path) -> Iterator[Finding]:
    """A dataset directory with every file that it should have."""
    try:
        sizes = []
        for path in data_files(directory):
            with path.open("rb") as file:  # readable, not only there
                sizes.append(os.fstat(file.fileno()).st_size)
    except FileNotFoundError as error:
        yield Finding(
            "data-missing",
            "refuse",
            f"data {directory}: {_reason(error)}",
            "give a dataset directory, as `dflash-train prepare` makes it",
        )
    except (OSError, ValueError) as error:
        yield Finding(
            "data-unreadable",
            "refuse",
            f"data {directory} cannot be read: {error if isinstance(error, ValueError) else _reason(error)}",
            "make it readable for user dflash, or copy it again",
        )
    else:
        yield Finding("data", "ok", f"data {directory}: {size(sum(sizes))} in {len(sizes)} files")


def check_drafter(directory: Path) -> Finding:
    """The drafter that a run begins with: its weight file is there and as long as it says."""
    hint = "give the directory of a drafter: config.json and model.safetensors"
    try:
        layers = json.loads((directory / "config.json").read_text())["num_hidden_layers"]
        problem = _shard_problem(directory / "model.safetensors")
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = _reason(error)
    if problem is not None:
        return Finding("config", "refuse", f"init_from {directory}: {problem}", hint)
    return Finding("config", "ok", f"begins with the drafter {directory} of {layers} layers")


def check_prompts(path: Path) -> Finding:
    """The held-out prompts: a file of lines that can be read; the trainer's own checks look into them."""
    try:
        with path.open("rb") as file:
            lines = sum(1 for line in file if line.strip())
    except OSError as error:
        return Finding("config", "refuse", f"prompts of [eval] {_reason(error)}", "give a file of JSON lines")
    if not lines:
        return Finding("config", "refuse", f"prompts of [eval] {path} is empty", "give a file of JSON lines")
    return Finding("config", "ok", f"{lines} held-out prompts in {path}")


def check_output(directory: Path, made_by_unit: Path | None = None) -> Iterator[Finding]:
    """A directory that can be written, or made; the unit itself makes `made_by_unit` (StateDirectory=)."""
    if directory == made_by_unit and not directory.exists():
        yield Finding("output", "ok", f"output {directory}: is made at the first start")
        return
    existing = directory
    try:
        while not existing.exists():
            existing = existing.parent
        is_directory = existing.is_dir()
    except PermissionError:
        yield Finding(
            "output-unwritable",
            "refuse",
            f"output {directory}: user {_user()} may not enter a directory on the way to {existing}",
            f"sudo chmod o+x its parents, or sudo install -d -o dflash -g dflash {directory}",
        )
        return
    if not is_directory:
        yield Finding("output-unwritable", "refuse", f"output {directory}: {existing} is not a directory")
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield Finding(
            "output-unwritable",
            "refuse",
            f"output {directory}: user {_user()} may not write to {existing}",
            f"sudo install -d -o dflash -g dflash {directory}",
        )
    else:
        yield Finding("output", "ok", f"output {directory}: can be written")


def check_space(run: RunFile) -> Iterator[Finding]:
    """Room for the checkpoints that are kept and the one being written."""
    one = checkpoint_bytes(run)
    if one is None:
        return
    directory = Path(run.output.dir)
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    wanted = one * (run.output.keep_last + 1)
    text = f"{size(free)} free at {existing}; a checkpoint takes about {size(one)}"
    if free < 2 * one:
        yield Finding("disk-space", "refuse", text, "free space, or choose another output directory")
    elif free < wanted:
        keep = run.output.keep_last
        yield Finding("disk-space", "warn", f"{text}, {keep} are kept", "lower keep_last, or free space")
    else:
        yield Finding("disk-space", "ok", text)


def check_shm() -> Iterator[Finding]:
    """Room in shared memory, where libraries keep what processes share, beside a target that somebody put there."""
    try:
        free = shutil.disk_usage(SHARED_MEMORY).free
    except OSError:  # there is none
        return
    text = f"{size(free)} free in {SHARED_MEMORY}"
    if free < SHARED_BYTES:
        hint = f"remove what is not needed: ls -l {SHARED_MEMORY}"
        yield Finding("shm-space", "warn", f"{text}; libraries may need {size(SHARED_BYTES)}", hint)
    else:
        yield Finding("shm-space", "ok", text)


def checkpoint_bytes(run: RunFile) -> int | None:
    """About what one checkpoint takes, from the sizes of target and drafter; None if those cannot be read."""
    wanted = run.drafter
    begun = wanted.init_from  # whose sizes count then
    try:
        config = json.loads((Path(begun or run.target.model) / "config.json").read_text())
        sizes: dict[str, Any] = config.get("text_config", config)
        own: dict[str, Any] = config["dflash_config"] if begun else {}
        hidden = int(sizes["hidden_size"])
        heads = (not begun and wanted.heads) or int(sizes["num_attention_heads"])
        kv_heads = (not begun and wanted.kv_heads) or int(sizes.get("num_key_value_heads") or heads)
        dim = (not begun and wanted.head_dim) or int(
            sizes.get("head_dim") or hidden // int(sizes["num_attention_heads"])
        )
        inner = (not begun and wanted.intermediate) or int(sizes.get("intermediate_size") or MIXTURE_WIDTH * hidden)
        layers = int(sizes["num_hidden_layers"]) if begun else wanted.layers
        taps = len(own["target_layer_ids"] if begun else wanted.target_layer_ids) or layers
        taken = {
            name: int(own.get(name) or 0) if begun else getattr(wanted, name)
            for name in ("conv_kernel_size", "conv_group_size", "selector_rank")
        }
        vocabulary = int(sizes["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    parameters = taps * hidden * hidden + layers * hidden * (2 * dim * (heads + kv_heads) + 3 * inner)
    if kernel := taken["conv_kernel_size"]:
        parameters += layers * 4 * kernel * hidden * (1 + hidden // max(1, taken["conv_group_size"]))
    parameters += taken["selector_rank"] * (2 * vocabulary + hidden)
    return parameters * (MASTER_BYTES + EXPORT_BYTES)


def check_runtime() -> Finding:
    """The trainer's own Python and libraries."""
    current = runtime.current()
    if current is None:
        return Finding(
            "runtime-missing", "refuse", "the trainer's runtime is not installed", "sudo dflashctl runtime install"
        )
    return Finding("runtime", "ok", f"runtime {current.name}")


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return f"{type(error).__name__}: {error}"


def _user() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def findings_of(command: list[str]) -> Iterator[Finding]:
    """The findings that a command prints as JSON lines, run as the user that trains if we may."""
    user = {"user": USER, "group": USER, "extra_groups": []} if os.geteuid() == 0 else {}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            cwd="/",
            check=False,
            **user,  # type: ignore[call-overload]
        )
    except subprocess.TimeoutExpired:
        yield Finding("config", "warn", f"the check took longer than {DEADLINE} s and was ended")
        return
    except (OSError, KeyError, LookupError) as error:
        yield Finding("config", "warn", f"the check could not run as user {USER}: {error}")
        return
    found = 0
    for line in done.stdout.splitlines():
        try:
            yield Finding(**json.loads(line))
            found += 1
        except (ValueError, TypeError):
            continue
    if not found:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        yield Finding("config", "refuse", last)


def main(arguments: list[str]) -> int:
    """`python3 -m dflash_agent.checks FILE`: a JSON line for each finding, for a caller of another user."""
    try:
        findings = list(check_run(load(Path(arguments[0]))))
    except ConfigError as error:
        findings = [Finding("config", "refuse", str(error))]
    for finding in findings:
        print(json.dumps(asdict(finding)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
