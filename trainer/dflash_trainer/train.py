"""The training of one run, from its inputs to its last checkpoint."""

import os
import signal
import threading
import time
from collections import deque
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from dflash_agent import outputs
from dflash_agent.runfile import RunFile, seconds
from dflash_agent.words import span
from numpy.typing import NDArray

from dflash_trainer import autotune, checkpoint, heldout, notify
from dflash_trainer.errors import CannotStart, TryAgain
from dflash_trainer.float8 import check_float8, to_float8
from dflash_trainer.heldout import read_heldout
from dflash_trainer.host import cache_directory, choose_device, process_age
from dflash_trainer.inputs import claim_output, plan_line, read_data, resolve
from dflash_trainer.journal import ERROR, INFO, WARNING, log
from dflash_trainer.loader import Cutter
from dflash_trainer.loss import position_weights
from dflash_trainer.memory import PieceLimit
from dflash_trainer.metrics import Metrics, Progress, Reading, shares, status_line
from dflash_trainer.pipeline import pipeline
from dflash_trainer.step import STATE_FILE, StepResult, Submitted, Trainer
from dflash_trainer.target import check_kernels, compile_layers, kernels, load_target

EXTENSION = 120.0  # seconds


def train(run: RunFile, fresh: bool = False) -> None:
    """Trains until the last step or SIGTERM. Raises CannotStart, TryAgain, or what a stage raised."""
    stop = StopRequest()
    phases = Phases()
    device = choose_device()
    torch.use_deterministic_algorithms(device.type == "cpu")
    with Reading(run.data.dir) as reading:
        store = read_data(run, cache_directory(), reading.read_so_far)
    log(store.survey.summary(), event="data", priority=WARNING if store.survey.skipped else INFO)
    inputs = resolve(run, store.survey)
    log(plan_line(inputs.plan, store.survey), event="plan", steps=inputs.plan.total_steps)
    if inputs.doubt:
        log(inputs.doubt, event="data-doubted", priority=WARNING)
    held = read_heldout(run)
    phases.ended("data")
    output = claim_output(run, inputs.identity, fresh)
    state = resume(output)
    first, total = state["step"] if state else 0, inputs.plan.total_steps
    if first >= total:
        outputs.mark_complete(run, total)
        notify.ready()
        log(
            f"nothing left to train: step {first}/{total} is done, drafter in {output / outputs.DRAFTER_LINK}",
            event="complete",
            step=first,
        )
        return

    notify.status(f"loading target {run.target.model}")
    log(f"loading target {run.target.model} to {device}", event="loading")
    if device.type == "cuda":
        autotune.make_thread_safe()
    if run.target.dtype == "float8":
        check_float8(device)
    target = load_target(
        Path(run.target.model),
        inputs.drafter.target_layer_ids,
        device,
        target_dtype(run, device),
        generates=bool(held.prompts),
        final=run.train.distill > 0,
    )
    if run.target.dtype == "float8":
        count = to_float8(target.decoder.layers)
        log(f"{count} matrix products of the target run on float8", event="float8")
    found = kernels(target.decoder)
    depth, layers = max(inputs.drafter.target_layer_ids) + 1, inputs.drafter.num_target_layers
    by = ", ".join(f"{work} by {package}" for work, package in found.items())
    part = f"all {layers} layers" if target.whole else f"{depth} of {layers} layers, as far as they are tapped"
    part += ", the rest for evaluations" if held.prompts and not target.whole else ""
    log(f"target loaded, {part}; {by}", event="loaded")
    check_kernels(found, device, run.target.slow_kernels == "allow")
    if device.type == "cuda" and run.target.compile == "auto":
        compile_layers(target.decoder)
    phases.ended("target")
    limit = PieceLimit(output)
    trainer = Trainer(run, inputs.drafter, target, device, total, state, limit)
    phases.ended("drafter")
    cutter = Cutter(
        store=store,
        plan=inputs.plan,
        seed=run.train.seed,
        max_anchors=run.train.max_anchors,
        mask_token_id=inputs.drafter.mask_token_id,
        position_weights=static_weights(run, inputs.drafter.block_size),
        by_block=run.train.position_weights == "dpace",
    )
    watchdog = notify.Watchdog()
    saver = checkpoint.Saver(output, run.output.keep_last, run.output.keep_every, lambda: sign_of_life(watchdog))
    stop.loading = False
    notify.status(f"step {first}/{total} · first step under way")
    metrics = Metrics(output, first)
    with (
        Progress(first, total) as progress,
        pipeline(cutter, target, device, first, total, limit) as line,
    ):
        meter = Meter()
        accepted: float | None = None

        def settle(submitted: Submitted) -> None:
            """Tells of a step, once it is done."""
            step, result = submitted.step, trainer.settle(submitted)
            watchdog.step_done()
            meter.add(submitted.tokens, result)
            line.worked_on_gpu(result.on_gpu)
            if step % run.output.log_interval == 0 or step in (first + 1, total):
                row = meter.take(step, total, submitted.epoch)
                text = status_line(step, total, row["loss"], row["tokens_per_s"], row["eta_s"], accepted)
                notify.status(text)
                stages = line.stage_seconds()
                log(f"{text} · busy: {shares(stages)}", event="step", **row)
                counts = {"skipped_steps": trainer.skipped, "split_batches": limit.splits}
                metrics.row(row | counts | {"save_wait_s": round(saver.waited, 3), "stages": stages})
            if step == first + 1:
                notify.ready()
                phases.ended("first step")
                log(
                    f"training: the first step, {step} of {total}, is done; {phases}",
                    event="training",
                    step=step,
                    **phases.fields(),
                )
            progress.advance_to(step, result.loss)

        def evaluate(step: int) -> None:
            """Measures the drafter as it is after a step; its time counts as nobody's."""
            nonlocal accepted

            def go_on() -> bool:
                sign_of_life(watchdog)
                return not stop.requested

            began = time.monotonic()
            row = heldout.measure(held, step, trainer.drafter, target.model, go_on)
            if row is not None:
                accepted = row["acceptance_length"]
                metrics.row(row)
            meter.since += time.monotonic() - began
            line.stage_seconds()

        ahead: deque[Submitted] = deque()  # at most one, so that a GPU has work while this thread looks at the last
        for step, tapped in enumerate(line.tapped, start=first + 1):
            ahead.append(trainer.step(step, tapped))
            last = step == total or stop.requested
            evaluates = held.due(step, total)
            while len(ahead) > (0 if last or evaluates or step == first + 1 else 1):
                settle(ahead.popleft())
            if evaluates and not stop.requested:
                evaluate(step)
            if last:
                break
            if saver.due(step % run.output.save_interval == 0):
                saver.submit(step, partial(trainer.snapshot, step))
            report_failed_save(saver, seconds(run.output.save_patience))
    save_last(saver, trainer, step)
    reason = "complete" if step == total else "stopped"
    if step == total:
        outputs.mark_complete(run, total)
    log(
        f"{reason} at step {step}/{total}, drafter in {output / outputs.DRAFTER_LINK}",
        event=reason,
        step=step,
    )


def static_weights(run: RunFile, block_size: int) -> NDArray[np.float32]:
    """The weights [S] of a block's positions that do not follow from its losses."""
    if run.train.position_weights == "dpace":
        return np.array([0.0] + [1.0] * (block_size - 1), np.float32)
    return position_weights(block_size, run.drafter.loss_decay).numpy()


def target_dtype(run: RunFile, device: torch.device) -> torch.dtype:
    """The type that the target's weights are loaded as; for float8 some are turned into it then."""
    if run.target.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.float32 if run.target.dtype == "float32" else torch.bfloat16


def resume(output: Path) -> dict[str, Any] | None:
    """The state in the newest whole checkpoint of the output; None if there is none. Names what it skips."""
    newest, skipped = checkpoint.recover(output)
    for bad in skipped:
        log(f"skipped checkpoint {bad.path}: {bad.reason}", event="checkpoint-skipped", priority=4)
    if newest is None:
        if skipped:
            raise CannotStart(
                f"output {output} holds no whole checkpoint, {len(skipped)} damaged; mend or remove them, or "
                f"begin anew with --fresh (`dflashctl fresh`), which puts the old files aside"
            )
        return None
    state: dict[str, Any] = torch.load(newest / STATE_FILE, map_location="cpu", weights_only=True)
    log(f"resuming from {newest}", event="resumed", step=state["step"])
    return state


def save_last(saver: checkpoint.Saver, trainer: Trainer, step: int) -> None:
    """Saves the state that training ends with, and waits for it. Raises TryAgain if that fails."""
    notify.status(f"saving step {step}")
    saver.submit(step, partial(trainer.snapshot, step))
    saver.finish()
    error = saver.take_error()
    if error is not None:
        raise TryAgain(
            f"checkpoint of step {step} could not be saved: {error}; the ones before are untouched, "
            f"free space or mend the file system, the next attempt goes on from the newest"
        ) from error


def report_failed_save(saver: checkpoint.Saver, patience: float) -> None:
    """One warning for a save that failed in the background; training goes on.

    Raises TryAgain once saves have failed for longer than `patience` seconds.
    """
    error = saver.take_error()
    if error is None:
        return
    if saver.failing_for > patience:
        raise TryAgain(
            f"no checkpoint could be saved for {span(saver.failing_for)}, longer than save_patience: {error}; "
            f"older ones are untouched, free space or mend the file system"
        ) from error
    log(
        f"checkpoint not saved: {error}; older ones are untouched, training goes on and tries again in "
        f"{span(saver.next_try)}",
        event="save-failed",
        priority=ERROR,
    )


def sign_of_life(watchdog: notify.Watchdog) -> None:
    """The loop waits for a save that makes progress: neither the watchdog nor the time for a stop runs out."""
    watchdog.alive()
    notify.extend_timeout(EXTENSION)


class Phases:
    """How long the parts of a start took, one after another, from the start of the process on."""

    def __init__(self) -> None:
        self._parts = {"imports": process_age()}
        self._since = time.monotonic()

    def ended(self, part: str) -> None:
        """A part has just ended."""
        now = time.monotonic()
        self._parts[part], self._since = now - self._since, now

    def fields(self) -> dict[str, Any]:
        """For the journal: seconds by part."""
        return {f"{part.replace(' ', '_')}_s": round(seconds, 3) for part, seconds in self._parts.items()}

    def __str__(self) -> str:
        parts = ", ".join(f"{part} {seconds:.1f} s" for part, seconds in self._parts.items())
        return f"{sum(self._parts.values()):.1f} s since the process began: {parts}"


class StopRequest:
    """SIGTERM or SIGINT asks for a stop: at once while loading, then after the step under way.

    A second one ends the process at once. While loading, the main thread may sit in a library for minutes; a thread
    of its own hears of the signal (signal.set_wakeup_fd).
    """

    def __init__(self) -> None:
        self.requested = False
        self.loading = True
        self._heard, heard = os.pipe()
        os.set_blocking(heard, False)
        signal.set_wakeup_fd(heard, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        threading.Thread(target=self._listen, name="signals", daemon=True).start()

    def _listen(self) -> None:
        while numbers := os.read(self._heard, 16):
            if self.loading and {signal.SIGTERM, signal.SIGINT} & set(numbers):
                notify.stopping()
                log("stopped while loading, before a step of this attempt; nothing is lost", event="stopped")
                os._exit(0)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.requested = True
        signal.signal(number, signal.SIG_DFL)
        notify.stopping()
        notify.status("stopping: the step under way and a checkpoint come first")


class Meter:
    """Means of the steps since the last line of the log."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.since = time.monotonic()
        self.tokens = 0
        self.results: list[StepResult] = []

    def add(self, tokens: int, result: StepResult) -> None:
        """One step of so many tokens, padding not counted."""
        self.tokens += tokens
        self.results.append(result)

    def take(self, step: int, total: int, epoch: int) -> dict[str, Any]:
        """A row for metrics.jsonl, and a new beginning."""
        seconds = time.monotonic() - self.since
        count = len(self.results)
        row = {
            "step": step,
            "total_steps": total,
            "epoch": epoch,
            "loss": sum(r.loss for r in self.results) / count,
            "accuracy": sum(r.accuracy for r in self.results) / count,
            "accuracy_by_position": [
                round(sum(right) / trained, 4) if (trained := sum(counts)) else None
                for right, counts in zip(
                    zip(*(r.right[1:] for r in self.results), strict=True),
                    zip(*(r.counts[1:] for r in self.results), strict=True),
                    strict=True,
                )
            ],
            "lr": self.results[-1].lr,
            "grad_norm": sum(r.grad_norm for r in self.results) / count,
            "tokens_per_s": self.tokens / seconds,
            "eta_s": (total - step) * seconds / count,
        }
        self._clear()
        return row
