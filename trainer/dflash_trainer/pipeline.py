"""The stages before the drafter's step: loader → target, each a thread, joined by bounded channels.

    token store → batch plan → loader ──channel──▶ target ──channel──▶ drafter step (the main thread)

While the drafter trains on batch i the target runs batch i+1; on one GPU the two share it on two streams.
"""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dflash_trainer.channel import Channel, run_stage
from dflash_trainer.loader import Batch, Cutter
from dflash_trainer.memory import PieceLimit
from dflash_trainer.target import Target

DEPTH = 2


@dataclass(frozen=True, slots=True)
class Tapped:
    """A batch on the device and the target's states of it."""

    batch: Batch
    context: Tensor  # [B, T, n·H]
    ready: torch.cuda.Event | None

    def wait(self) -> None:
        """Makes the current CUDA stream wait for the states; nothing on CPU."""
        if self.ready is None:
            return
        stream = torch.cuda.current_stream()
        stream.wait_event(self.ready)
        for tensor in (self.context, *(getattr(self.batch, n) for n in Batch.__slots__)):
            if isinstance(tensor, Tensor):
                tensor.record_stream(stream)


@dataclass(slots=True)
class Pipeline:
    """The channels of a running pipeline, and how long each stage worked and waited."""

    batches: Channel[Batch]
    tapped: Channel[Tapped]
    started: float = field(default_factory=time.monotonic)

    def stage_seconds(self) -> dict[str, dict[str, float]]:
        """Of each stage since the start: seconds waiting for input, waiting for room, and the rest, busy."""
        total = time.monotonic() - self.started
        loader_out, target_in = self.batches.waited_for_room, self.batches.waited_for_input
        target_out, drafter_in = self.tapped.waited_for_room, self.tapped.waited_for_input
        return {
            name: {
                "busy": round(total - before - after, 3),
                "input": round(before, 3),
                "output": round(after, 3),
            }
            for name, before, after in (
                ("loader", 0.0, loader_out),
                ("target", target_in, target_out),
                ("drafter", drafter_in, 0.0),
            )
        }


def tap_in_pieces(target: Target, batch: Batch, limit: PieceLimit) -> Tensor:
    """The target's states [B, T, n·H] of a batch, as many rows at a time as memory allows."""
    rows, length = batch.input_ids.shape

    def work(begin: int, end: int) -> Tensor:
        return target.states(batch.input_ids[begin:end])

    parts = limit.in_pieces(rows, length, work, lambda: None, batch.step + 1)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@contextlib.contextmanager
def pipeline(
    cutter: Cutter, target: Target, device: torch.device, first_step: int, total_steps: int, limit: PieceLimit
) -> Iterator[Pipeline]:
    """Runs the stages from `first_step` on; leaving the context ends them. Their errors come out of `tapped`."""
    line = Pipeline(Channel(DEPTH), Channel(DEPTH))

    def load() -> None:
        for step in range(first_step, total_steps):
            line.batches.put(cutter.cut(step))

    def tap() -> None:
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream) if stream else contextlib.nullcontext():
            for batch in line.batches:
                here = batch.to(device)
                context = tap_in_pieces(target, here, limit)
                line.tapped.put(Tapped(here, context, stream.record_event() if stream else None))

    threads = [run_stage("loader", load, line.batches), run_stage("target", tap, line.tapped)]
    try:
        yield line
    finally:
        line.batches.close()
        line.tapped.close()
        for thread in threads:
            thread.join()
