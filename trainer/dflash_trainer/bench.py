"""How fast a pair of target and drafter trains here, and what the machine allows: `python -m dflash_trainer.bench`.

Random weights and tokens of a shape, made on the spot; the trainer's own pipeline and step. Prints a table: for
each batch (sequences × tokens) the target's forward alone, the drafter's step alone, and both as a run has them,
beside what the counted operations would take at the measured rate of a large matrix product.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from dflash_agent.runfile import from_flags
from torch import nn

from dflash_trainer import autotune
from dflash_trainer.drafter_config import DrafterConfig, spaced_layer_ids
from dflash_trainer.float8 import TYPE, Float8Linear, product, to_float8
from dflash_trainer.loader import Batch, Cutter
from dflash_trainer.loss import position_weights
from dflash_trainer.memory import PieceLimit
from dflash_trainer.pipeline import DEPTH, Tapped, pipeline
from dflash_trainer.plan import make_plan
from dflash_trainer.step import Trainer
from dflash_trainer.store import Survey, TokenStore
from dflash_trainer.target import Target, compile_layers, kernels, random_target

MATRIX = {"cuda": 8192, "cpu": 1024}  # rows and columns of the product that the machine's rate is measured with
WARM_UP = 3  # steps: kernels are compiled and tuned
BEFORE = WARM_UP + 2 * DEPTH + 1  # of a run: until the channels are as full as they will be
AROUND = BEFORE + 2 * DEPTH + 1
IDLE_STEPS = 6
QWEN = {
    "model_type": "qwen3_5_text",
    "hidden_size": 5120,
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "intermediate_size": 17408,
    "vocab_size": 248320,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
}
TINY = QWEN | {
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 512,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


@dataclass(frozen=True, slots=True)
class Shape:
    """A target's sizes and those of its drafter: layers, heads, kv heads, head size."""

    target: dict[str, Any]
    drafter: tuple[int, int, int, int]


SHAPES = {"Qwen3.6-27B": Shape(QWEN, (5, 32, 8, 128)), "tiny": Shape(TINY, (2, 4, 2, 16))}


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds of a step, and trillions of operations counted in it."""

    target_s: float
    drafter_s: float
    run_s: float
    target_tflop: float
    drafter_tflop: float
    gigabytes: float  # the most that torch reserved


def main(arguments: list[str] | None = None) -> int:
    """Prints the table."""
    args = parse(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if device.type == "cuda":
        autotune.make_thread_safe()
    shape = SHAPES[args.shape]
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    rate = matrix_rate(device, dtype)
    target_rate = matrix_rate(device, TYPE) if args.float8 else rate
    config = drafter_of(shape, args.block_size)
    target = random_target(target_config(shape), config.target_layer_ids, device, dtype)
    if args.float8:
        to_float8(target.decoder.layers)
    if device.type == "cuda" and not args.no_compile:
        compile_layers(target.decoder)
    by = ", ".join(f"{work} by {package}" for work, package in kernels(target.decoder).items())
    print(
        f"{name}, torch {torch.__version__}, {args.shape}, block {args.block_size}, {args.anchors} anchors; "
        f"matrix products at {rate:.3g} TFLOP/s, the target's at {target_rate:.3g}; {by}"
    )
    heads = ("target s", "drafter s", "in turn", "run s", "Ktok/s", "limit s", "reached %", "GB")
    print("  ".join([f"{'batch':12}", *(f"{head:>9}" for head in heads)]), flush=True)
    batches = [tuple(int(word) for word in words.split("x")) for words in args.batch]
    trainer = make_trainer(config, target, device)
    for rows, length in batches:
        trainer.limit = fresh_limit()
        row = measure(trainer, rows, length, args.anchors, args.steps)
        limit = row.target_tflop / target_rate + row.drafter_tflop / rate
        figures = (
            *(row.target_s, row.drafter_s, row.target_s + row.drafter_s, row.run_s),
            *(rows * length / row.run_s / 1000, limit, 100 * limit / row.run_s, row.gigabytes),
        )
        print("  ".join([f"{rows} × {length:<8}", *(f"{figure:9.3g}" for figure in figures)]), flush=True)
    if device.type == "cuda":  # apart: the profiler slows what it watches
        for rows, length in batches:
            trainer.limit = fresh_limit()
            idle = idle_share(trainer, rows, length, args.anchors, IDLE_STEPS, args.kernels)
            print(f"{rows} × {length}: the GPU idle for {100 * idle:.2f} % of {IDLE_STEPS} steps", flush=True)
    return 0


def make_trainer(config: DrafterConfig, target: Target, device: torch.device) -> Trainer:
    """With a fresh drafter."""
    run = from_flags("bench", {"target.model": "/nowhere", "data.dir": "/nowhere"})
    return Trainer(run, config, target, device, 10_000, None, fresh_limit())


def fresh_limit() -> PieceLimit:
    """Whole batches, until one does not fit."""
    return PieceLimit(Path("/nowhere"))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        "python -m dflash_trainer.bench", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--shape", choices=SHAPES, default="Qwen3.6-27B")
    parser.add_argument("--batch", nargs="+", default=["1x8192", "4x2048", "8x1024"], metavar="ROWSxTOKENS")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--anchors", type=int, default=512, help="for each sequence (default: 512)")
    parser.add_argument("--float8", action="store_true", help="a target whose matrix products run on float8")
    parser.add_argument("--no-compile", action="store_true", help="do not compile the target's layers")
    parser.add_argument("--kernels", type=int, default=0, help="print so many kernels of each batch, by time")
    parser.add_argument("--steps", type=int, default=10, help="that are measured (default: 10)")
    return parser.parse_args(arguments)


def target_config(shape: Shape) -> Any:
    """The target's transformers configuration."""
    from transformers import AutoConfig

    sizes = dict(shape.target)
    return AutoConfig.for_model(sizes.pop("model_type"), **sizes)


def drafter_of(shape: Shape, block_size: int) -> DrafterConfig:
    """The drafter for a shape."""
    layers, heads, kv_heads, head_dim = shape.drafter
    depth, vocabulary = shape.target["num_hidden_layers"], shape.target["vocab_size"]
    return DrafterConfig(
        hidden_size=shape.target["hidden_size"],
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=shape.target["intermediate_size"],
        rms_norm_eps=1e-6,
        rope_theta=1e7,
        vocab_size=vocabulary,
        max_position_embeddings=shape.target["max_position_embeddings"],
        num_target_layers=depth,
        block_size=block_size,
        mask_token_id=vocabulary - 1,
        target_layer_ids=spaced_layer_ids(depth, layers),
    )


def measure(trainer: Trainer, rows: int, length: int, anchors: int, steps: int) -> Row:
    """The figures of one kind of batch, each over so many steps."""
    total = WARM_UP + steps
    target, config, device = trainer.target, trainer.drafter.config, trainer.device
    cutter = random_cutter(config, rows, length, anchors, steps + AROUND)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    batch = cutter.cut(0).to(device)
    target_s = timed(lambda _: target.states(batch.input_ids), total, device)
    drafter_s = drafter_seconds(trainer, Tapped(batch, target.states(batch.input_ids), None, None), total)
    run_s = run_for(cutter, trainer, steps)
    if trainer.limit.splits:
        print(f"{rows} × {length}: did not fit, done in pieces of {trainer.limit.tokens} tokens", file=sys.stderr)
    gigabytes = torch.cuda.max_memory_reserved() / 1e9 if device.type == "cuda" else 0.0
    return Row(
        target_s,
        drafter_s,
        run_s,
        target_operations(target, rows, length) / 1e12,
        drafter_operations(config, batch) / 1e12,
        gigabytes,
    )


def drafter_seconds(trainer: Trainer, tapped: Tapped, total: int) -> float:
    """Median seconds of a step."""
    return timed(lambda i: trainer.settle(trainer.step(i + 1, tapped)), total, trainer.device)


def run_for(cutter: Cutter, trainer: Trainer, steps: int, profiler: Any = None) -> float:
    """Seconds a step, with the pipeline and the loop of a training.

    The cutter has AROUND more batches: the first ones warm up and fill the channels, and those that follow keep the
    target busy to the last that counts. A profiler sees what counts only.
    """
    ahead = None
    began = 0.0
    with pipeline(cutter, trainer.target, trainer.device, 0, steps + AROUND, trainer.limit) as line:
        for step, tapped in enumerate(line.tapped, start=1):
            now = trainer.step(step, tapped)
            if ahead is not None:
                trainer.settle(ahead)
            ahead = now
            if step == BEFORE:
                if profiler is not None:
                    profiler.start()
                began = time.monotonic()
            if step == BEFORE + steps:
                seconds = time.monotonic() - began
                if profiler is not None:
                    profiler.stop()
                return seconds / steps
    raise AssertionError("fewer batches than steps")


def idle_share(trainer: Trainer, rows: int, length: int, anchors: int, steps: int, kernels_shown: int) -> float:
    """The share of a run's time in which the GPU has no kernel and no copy under way, by torch's profiler.

    Prints the kernels that take the most time; of two at once each counts whole.
    """
    from torch.profiler import ProfilerActivity, profile

    cutter = random_cutter(trainer.drafter.config, rows, length, anchors, steps + AROUND)
    profiler = profile(activities=[ProfilerActivity.CUDA])
    run_for(cutter, trainer, steps, profiler)
    events: Any = profiler.events()  # type: ignore[no-untyped-call]
    spent: Counter[str] = Counter()
    spans: list[tuple[float, float]] = []
    for event in events:
        if event.device_type.name == "CUDA":
            spans.append((event.time_range.start, event.time_range.end))
            spent[event.name] += event.time_range.elapsed_us()
    for name, microseconds in spent.most_common(kernels_shown):
        print(f"    {microseconds / 1000 / steps:8.2f} ms a step  {name[:100]}")
    spans.sort()
    busy, until = 0.0, spans[0][0]
    for begin, end in spans:
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    return 1 - busy / (until - spans[0][0])


def timed(work: Callable[[int], object], count: int, device: torch.device) -> float:
    """Median seconds of a call, those that warm up left out."""
    seconds = []
    for i in range(count):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.monotonic()
        work(i)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.monotonic() - began)
    return median(seconds[WARM_UP:])


def random_cutter(config: DrafterConfig, rows: int, length: int, anchors: int, batches: int) -> Cutter:
    """Batches of random tokens, all of them supervised."""
    count = rows * batches
    tokens = np.random.default_rng(0).integers(0, config.vocab_size - 1, count * length, np.int32)
    offsets = np.arange(count + 1, dtype=np.int64) * length
    used = np.ones(config.vocab_size, np.bool_)
    store = TokenStore(
        tokens, np.ones(len(tokens), np.uint8), Survey(offsets, np.arange(count), used, len(tokens), "", {}, 0)
    )
    plan = make_plan(np.diff(offsets), rows * length, 0, 1)
    weights = position_weights(config.block_size, 0.0).numpy()
    return Cutter(store, plan, 0, anchors, config.mask_token_id, weights)


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """TFLOP/s of a square matrix product; of float8 with a scale for each row."""
    size = MATRIX[device.type]
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    if dtype == TYPE:
        ones = torch.ones(size, 1, device=device)
        seconds = timed(lambda _: product(a, ones, b, ones.T, torch.bfloat16), WARM_UP + 20, device)
    else:
        seconds = timed(lambda _: a @ b, WARM_UP + 20, device)
    return 2 * size**3 / seconds / 1e12


def target_operations(target: Target, rows: int, length: int) -> float:
    """Of a forward: two for each weight and token; attention's pairs; the delta rule by its chunks of 64."""
    tokens = rows * length
    config: Any = target.decoder.config
    products = (nn.Linear, Float8Linear)
    linear: float = sum(2 * m.weight.numel() for m in target.decoder.modules() if isinstance(m, products))
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    pairs = rows * length * (length + 1) / 2
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = 4 * config.num_attention_heads * head_dim * pairs * kinds.count("full_attention")
    delta = 0.0
    if "linear_attention" in kinds:
        key, value = config.linear_key_head_dim, config.linear_value_head_dim
        of_a_head = 6 * key * value + 4 * 64 * (key + value)
        delta = tokens * config.linear_num_value_heads * of_a_head * kinds.count("linear_attention")
    return float(linear * tokens + attention + delta)


def drafter_operations(config: DrafterConfig, batch: Batch) -> float:
    """Of a step: forward, and twice that backward where both inputs need a gradient.

    The states need none, so `fc` costs two thirds; of the head only the gradient by the hidden states is formed.
    """
    context, blocks = batch.input_ids.numel(), batch.block_ids.numel()
    hidden, dim = config.hidden_size, config.head_dim
    q, kv = config.num_attention_heads * dim, 2 * config.num_key_value_heads * dim
    of_a_block = hidden * (2 * q + kv + 3 * config.intermediate_size)
    layers = config.num_hidden_layers
    linear = 3 * 2 * layers * (blocks * of_a_block + context * hidden * kv)
    linear += 2 * 2 * context * len(config.target_layer_ids) * hidden * hidden
    head = 2 * 2 * len(batch.labels) * hidden * config.vocab_size
    seen = batch.anchors.sum().item() + batch.anchors.numel() * config.block_size
    attention = layers * 3.5 * 4 * q * seen * config.block_size  # backward forms the scores once more
    return float(linear + head + attention)


if __name__ == "__main__":
    sys.exit(main())
