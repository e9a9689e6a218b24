"""The stages before the drafter's step: loader → target, each a thread, joined by bounded channels.

    token store → batch plan → loader ──channel──▶ target ──channel──▶ drafter step (the main thread)

While the drafter trains on batch i the target runs batch i+1; on one GPU the two share it on two streams.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dflash_trainer.channel import Channel, run_stage
from dflash_trainer.loader import Batch, Cutter
from dflash_trainer.memory import PieceLimit
from dflash_trainer.target import Target

DEPTH = 2


@dataclass(frozen=True, slots=True)
class Span:
    """Work on a CUDA stream, between two events that keep the time."""

    begin: torch.cuda.Event
    end: torch.cuda.Event

    def seconds(self) -> float:
        """How long it took, once it is done."""
        milliseconds: float = self.begin.elapsed_time(self.end)
        return milliseconds / 1000


def mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event for a Span, here and now in a stream's work."""
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


@dataclass(frozen=True, slots=True)
class Tapped:
    """A batch on the device and the target's states of it, which are there once the span's end is; None on CPU."""

    batch: Batch
    context: Tensor  # [B, T, n·H]
    final: Tensor | None  # [B, T, H] what the target's head turns into its logits, where that is wanted
    span: Span | None

    def wait(self) -> None:
        """Makes the current CUDA stream wait for the states; nothing on CPU."""
        if self.span is None:
            return
        stream = torch.cuda.current_stream()
        stream.wait_event(self.span.end)
        for tensor in (self.context, self.final, *(getattr(self.batch, n) for n in Batch.__slots__)):
            if isinstance(tensor, Tensor):
                tensor.record_stream(stream)


@dataclass(slots=True)
class Pipeline:
    """The channels of a running pipeline, and how long each stage worked and waited."""

    batches: Channel[Batch]
    tapped: Channel[Tapped]
    on_gpu: dict[str, float] = field(default_factory=dict)  # seconds of a stage's work there; none on a CPU
    _before: dict[tuple[str, str], float] = field(default_factory=dict)
    _since: float = field(default_factory=time.monotonic)

    def worked_on_gpu(self, seconds: Mapping[str, float]) -> None:
        """So long a step took there, by stage."""
        for stage, more in seconds.items():
            self.on_gpu[stage] = self.on_gpu.get(stage, 0.0) + more

    def stage_seconds(self) -> dict[str, dict[str, float]]:
        """Of each stage since the last call: seconds waiting for input, waiting for room, and the rest, busy.

        A thread hands its work to a GPU and goes on; there "busy" is the time that the work takes on its stream,
        and what is left is the target's waiting for room and the drafter's for input. Two stages on one GPU may
        be busy for more than all of the time together.
        """
        now = time.monotonic()
        total, self._since = now - self._since, now
        waited = {
            ("loader", "output"): self.batches.waited_for_room,
            ("target", "input"): self.batches.waited_for_input,
            ("target", "output"): self.tapped.waited_for_room,
            ("drafter", "input"): self.tapped.waited_for_input,
        } | {(stage, "busy"): seconds for stage, seconds in self.on_gpu.items()}
        spent = {key: seconds - self._before.get(key, 0.0) for key, seconds in waited.items()}
        self._before = waited
        found = {}
        for stage, rest in (("loader", "input"), ("target", "output"), ("drafter", "input")):
            part: dict[str, float] = {kind: spent.get((stage, kind), 0.0) for kind in ("busy", "input", "output")}
            left = rest if stage in self.on_gpu else "busy"
            part[left] = max(0.0, total - sum(seconds for kind, seconds in part.items() if kind != left))
            found[stage] = {kind: round(seconds, 3) for kind, seconds in part.items()}
        return found


def tap_in_pieces(target: Target, batch: Batch, limit: PieceLimit) -> tuple[Tensor, Tensor | None]:
    """The target's states [B, T, n·H] of a batch and its final ones, as many rows at a time as memory allows."""
    rows, length = batch.input_ids.shape

    def work(begin: int, end: int) -> tuple[Tensor, Tensor | None]:
        return target.states_and_final(batch.input_ids[begin:end])

    parts = limit.in_pieces(rows, length, work, lambda: None, batch.step + 1)
    if len(parts) == 1:
        return parts[0]
    finals = [final for _, final in parts if final is not None]
    return torch.cat([states for states, _ in parts]), torch.cat(finals) if finals else None


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
                begin = mark(stream) if stream else None
                states = tap_in_pieces(target, here, limit)
                line.tapped.put(Tapped(here, *states, Span(begin, mark(stream)) if stream and begin else None))

    threads = [run_stage("loader", load, line.batches), run_stage("target", tap, line.tapped)]
    try:
        yield line
    finally:
        line.batches.close()
        line.tapped.close()
        for thread in threads:
            thread.join()
