"""One optimizer step: memory that does not suffice, and losses that are not finite."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import MASK_TOKEN, load_store
from dflash_agent.runfile import RunFile, from_flags
from dflash_trainer import step as step_module
from dflash_trainer.drafter import DrafterConfig
from dflash_trainer.errors import CannotStart, is_of_the_gpu, is_out_of_memory
from dflash_trainer.inputs import drafter_config
from dflash_trainer.loader import Cutter
from dflash_trainer.loss import position_weights
from dflash_trainer.memory import PieceLimit
from dflash_trainer.pipeline import Tapped, tap_in_pieces
from dflash_trainer.plan import make_plan
from dflash_trainer.step import NOT_FINITE_LIMIT, StepResult, Trainer
from dflash_trainer.target import Target, load_target, read_config

CPU = torch.device("cpu")
NOWHERE = Path("/nowhere")
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB."


@pytest.fixture(scope="module")
def run(target_dir: Path, dataset_dir: Path) -> RunFile:
    made = from_flags("run1", {"target.model": str(target_dir), "data.dir": str(dataset_dir)})
    return replace(made, drafter=replace(made.drafter, layers=2, block_size=4))


@pytest.fixture(scope="module")
def config(run: RunFile) -> DrafterConfig:
    return drafter_config(run, read_config(Path(run.target.model)), MASK_TOKEN)


@pytest.fixture(scope="module")
def target(run: RunFile, config: DrafterConfig) -> Target:
    return load_target(Path(run.target.model), config.target_layer_ids, CPU, torch.float32)


@pytest.fixture(scope="module")
def cutter(run: RunFile) -> Cutter:
    store = load_store(Path(run.data.dir), 256, 96)
    plan = make_plan(np.diff(store.survey.offsets), 256, 0, 4)
    return Cutter(store, plan, 0, 8, MASK_TOKEN, position_weights(4, 0.0).numpy())


def trainer(run: RunFile, config: DrafterConfig, target: Target, limit: PieceLimit) -> Trainer:
    return Trainer(run, config, target, CPU, 100, None, limit)


def tapped(cutter: Cutter, target: Target, limit: PieceLimit, step: int = 0) -> Tapped:
    batch = cutter.cut(step)
    return Tapped(batch, tap_in_pieces(target, batch, limit), None)


def stepped(mine: Trainer, step: int, batch: Tapped) -> StepResult:
    return mine.settle(mine.step(step, batch))


@pytest.fixture
def small_gpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A drafter whose loss fits for two rows at most; the rows of each try."""
    tries: list[int] = []
    real = step_module.block_loss

    def loss(drafter: Any, target: Any, batch: Any, context: Any, dense: bool) -> Any:
        tries.append(len(context))
        if len(context) > 2:
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)
        return real(drafter, target, batch, context, dense)

    monkeypatch.setattr(step_module, "block_loss", loss)
    return tries


def test_a_batch_that_does_not_fit_is_done_in_pieces_with_the_same_result(
    run: RunFile, config: DrafterConfig, target: Target, cutter: Cutter
) -> None:
    plain = trainer(run, config, target, PieceLimit(NOWHERE))
    batch = tapped(cutter, target, PieceLimit(NOWHERE))
    rows = len(batch.context)
    assert rows > 4
    wanted = stepped(plain, 1, batch)
    gradients = [p.grad.clone() for p in plain.drafter.parameters() if p.grad is not None]
    limit = PieceLimit(NOWHERE)
    limit.tokens = 2 * batch.context.shape[1]
    split = trainer(run, config, target, limit)
    found = stepped(split, 1, batch)
    assert found.loss == pytest.approx(wanted.loss, rel=1e-5)
    assert found.accuracy == pytest.approx(wanted.accuracy, rel=1e-5)
    for gradient, parameter in zip(gradients, split.drafter.parameters(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


def test_running_out_of_memory_is_counted_and_later_batches_are_in_pieces_from_the_start(
    run: RunFile, config: DrafterConfig, target: Target, cutter: Cutter, small_gpu: list[int], tmp_path: Path
) -> None:
    limit = PieceLimit(tmp_path)
    mine = trainer(run, config, target, limit)
    stepped(mine, 1, tapped(cutter, target, PieceLimit(NOWHERE)))
    assert limit.splits >= 1
    assert small_gpu[0] > 2
    del small_gpu[:]
    before = limit.splits
    for step in (1, 2, 3):
        stepped(mine, step + 1, tapped(cutter, target, PieceLimit(NOWHERE), step))
    assert limit.splits <= before + 1  # shorter sequences let more rows into a piece
    assert json.loads((tmp_path / "pieces.json").read_text()) == {"tokens": limit.tokens}
    assert PieceLimit(tmp_path).tokens == limit.tokens  # the next attempt begins with it


def test_a_sequence_that_does_not_fit_alone_is_out_of_memory(
    run: RunFile, config: DrafterConfig, target: Target, cutter: Cutter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise torch.OutOfMemoryError(OUT_OF_MEMORY)

    monkeypatch.setattr(step_module, "block_loss", never)
    with pytest.raises(torch.OutOfMemoryError):
        stepped(trainer(run, config, target, PieceLimit(NOWHERE)), 1, tapped(cutter, target, PieceLimit(NOWHERE)))


def test_the_drafter_computes_in_its_own_type_whatever_the_targets(
    run: RunFile, config: DrafterConfig, target: Target, cutter: Cutter
) -> None:
    directory = Path(run.target.model)
    half = load_target(directory, config.target_layer_ids, CPU, torch.bfloat16)
    whole = PieceLimit(NOWHERE)
    wanted, found = (
        stepped(trainer(run, config, one, whole), 1, tapped(cutter, one, whole)) for one in (target, half)
    )
    assert found.loss == pytest.approx(wanted.loss, rel=0.02)
    assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=0.1)
    assert found.loss != wanted.loss


def test_layers_that_cannot_be_compiled_are_a_reason_not_to_start_and_a_lack_of_memory_meanwhile_is_none(
    run: RunFile, config: DrafterConfig, target: Target, cutter: Cutter, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = torch._dynamo.exc.TorchDynamoException
    message = "no triton configs\nout of resource: shared memory"

    def never(*_: object) -> None:
        raise failed(message)

    monkeypatch.setattr(step_module, "block_loss", never)
    mine, batch = trainer(run, config, target, PieceLimit(NOWHERE)), tapped(cutter, target, PieceLimit(NOWHERE))
    with pytest.raises(CannotStart, match=r'shared memory; set attention = "dense" in \[train\]$') as caught:
        mine.step(1, batch)
    assert "\n" not in str(caught.value)
    message = f"backend='inductor' raised:\nOutOfMemoryError: {OUT_OF_MEMORY}"
    with pytest.raises(failed) as memory:
        mine.step(1, batch)
    assert is_out_of_memory(memory.value)


def test_the_target_too_works_in_pieces(target: Target, cutter: Cutter, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = cutter.cut(0)
    whole = target.states(batch.input_ids)
    real = type(target).states

    def states(self: Target, ids: torch.Tensor) -> torch.Tensor:
        if len(ids) > 2:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)")
        return real(self, ids)

    monkeypatch.setattr(type(target), "states", states)
    limit = PieceLimit(NOWHERE)
    torch.testing.assert_close(tap_in_pieces(target, batch, limit), whole)
    assert limit.splits >= 1


def test_steps_that_are_not_finite_change_nothing_and_a_run_of_them_names_the_rows(
    run: RunFile, config: DrafterConfig, target: Target, cutter: Cutter
) -> None:
    mine = trainer(run, config, target, PieceLimit(NOWHERE))
    batch = tapped(cutter, target, PieceLimit(NOWHERE))
    stepped(mine, 1, batch)
    before = copy.deepcopy((mine.drafter.state_dict(), mine.optimizer.state_dict()["state"]))
    bad = replace(batch, context=batch.context * float("nan"))
    for step in range(1, NOT_FINITE_LIMIT):
        stepped(mine, step, bad)
    assert mine.skipped == NOT_FINITE_LIMIT - 1
    now = mine.drafter.state_dict(), mine.optimizer.state_dict()["state"]
    torch.testing.assert_close(now, before, rtol=0, atol=0)
    with pytest.raises(CannotStart, match=f"rows of the data: {batch.batch.row_ids[0]}, "):
        stepped(mine, NOT_FINITE_LIMIT, bad)


def test_one_good_step_begins_the_count_anew(
    run: RunFile, config: DrafterConfig, target: Target, cutter: Cutter
) -> None:
    mine = trainer(run, config, target, PieceLimit(NOWHERE))
    batch = tapped(cutter, target, PieceLimit(NOWHERE))
    bad = replace(batch, context=batch.context * float("inf"))
    for step in range(3 * NOT_FINITE_LIMIT):
        stepped(mine, step + 1, batch if step % 5 == 4 else bad)
    assert mine.skipped == 3 * NOT_FINITE_LIMIT - 4


@pytest.mark.parametrize(
    ("error", "memory", "gpu"),
    [
        (torch.OutOfMemoryError(OUT_OF_MEMORY), True, False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True, True),
        (RuntimeError("CUDA error: unspecified launch failure"), False, True),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), False, True),
        (RuntimeError("shape mismatch"), False, False),
        (ValueError("CUDA error"), False, False),
    ],
)
def test_errors_of_memory_and_of_the_gpu_are_told_from_faults(error: Exception, memory: bool, gpu: bool) -> None:
    assert (is_out_of_memory(error), is_of_the_gpu(error)) == (memory, gpu)
