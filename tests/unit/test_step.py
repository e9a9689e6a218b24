"""One optimizer step: memory that does not suffice, and losses that are not finite."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import MASK_TOKEN, load_store, make_target
from dflash_agent.runfile import RunFile, from_flags
from dflash_trainer import step as step_module
from dflash_trainer.drafter import Drafter
from dflash_trainer.drafter_config import DrafterConfig
from dflash_trainer.errors import CannotStart, is_of_the_gpu, is_out_of_memory
from dflash_trainer.inputs import drafter_config
from dflash_trainer.loader import Batch, Cutter
from dflash_trainer.loss import Objective, position_weights
from dflash_trainer.memory import PieceLimit
from dflash_trainer.pipeline import Tapped, tap_in_pieces
from dflash_trainer.plan import make_plan
from dflash_trainer.step import (
    HARD_LABELS,
    NOT_FINITE_LIMIT,
    StepResult,
    Trainer,
    block_loss,
    selector_losses,
)
from dflash_trainer.target import Target, load_target, read_config
from safetensors.torch import load_file, save_file

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
    return Tapped(batch, *tap_in_pieces(target, batch, limit), None)


def stepped(mine: Trainer, step: int, batch: Tapped) -> StepResult:
    return mine.settle(mine.step(step, batch))


@pytest.fixture
def small_gpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A drafter whose loss fits for two rows at most; the rows of each try."""
    tries: list[int] = []
    real = step_module.block_loss

    def loss(drafter: Any, target: Any, batch: Any, context: Any, *rest: Any) -> Any:
        tries.append(len(context))
        if len(context) > 2:
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)
        return real(drafter, target, batch, context, *rest)

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
    real = type(target).states_and_final

    def states(self: Target, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        if len(ids) > 2:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)")
        return real(self, ids)

    monkeypatch.setattr(type(target), "states_and_final", states)
    limit = PieceLimit(NOWHERE)
    torch.testing.assert_close(tap_in_pieces(target, batch, limit)[0], whole)
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


def one_loss(
    cutter: Cutter, drafter: Drafter, target: Target, objective: Objective
) -> tuple[torch.Tensor, torch.Tensor, Batch]:
    """Loss and what is right of a batch; and the batch."""
    batch = cutter.cut(1)
    states, final = target.states_and_final(batch.input_ids)
    return *block_loss(drafter, target, batch, states, final, objective), batch


def made_drafter(config: DrafterConfig) -> Drafter:
    drafter = Drafter(config)
    drafter.reset_parameters(1)
    return drafter


def by_hand(
    drafter: Drafter, target: Target, batch: Batch
) -> list[tuple[int, int, int, torch.Tensor, torch.Tensor]]:
    """Of each trained position: row, block, place in it; log-probabilities by the drafter and by the target."""
    size, found = drafter.config.block_size, []
    with torch.no_grad():
        for index in batch.trained.tolist():
            row, block, k = np.unravel_index(index, (*batch.anchors.shape, size))
            anchor = int(batch.anchors[row, block])
            ids = batch.input_ids[row : row + 1]
            own = batch.block_ids[row : row + 1, block * size : (block + 1) * size]
            hidden = drafter(
                drafter.embed(own, target.embedding),
                torch.arange(anchor, anchor + size)[None],
                target.states(ids)[:, :anchor],
            )
            logits = drafter.logits(hidden[0, k], target.head)
            taught = target.model(ids).logits[0, anchor + k - 1]  # what the target itself expects there
            found.append((int(row), int(block), int(k), logits.log_softmax(-1), taught.log_softmax(-1)))
    return found


@pytest.mark.parametrize("model_type", ["llama", "qwen3_5_text", "gemma2"])
@pytest.mark.parametrize("distill", [0.4, 1.0])
def test_distillation_is_towards_what_the_target_itself_expects_at_that_position(
    model_type: str, distill: float, run: RunFile, cutter: Cutter, tmp_path: Path
) -> None:
    directory = make_target(tmp_path / "target", model_type)
    for path in directory.glob("*.safetensors"):  # norms that are not one: their order and kind matter
        weights = load_file(path)
        shaken = {n: w + 0.3 * torch.rand_like(w) if "norm" in n else w for n, w in weights.items()}
        save_file(shaken, path, metadata={"format": "pt"})
    config = drafter_config(run, read_config(directory), MASK_TOKEN)
    target = load_target(directory, config.target_layer_ids, CPU, torch.float32, final=True)
    drafter = made_drafter(config)
    loss, _, batch = one_loss(cutter, drafter, target, Objective(distill))
    total = 0.0
    for (*_, ours, theirs), label, weight in zip(
        by_hand(drafter, target, batch), batch.labels, batch.weights, strict=True
    ):
        divergence = (theirs.exp() * (theirs - ours)).sum()
        total += float(weight * ((1 - distill) * -ours[label] + distill * divergence))
    assert loss.item() == pytest.approx(total / batch.total_weight, rel=1e-4)


def test_dpace_weighs_by_confidence_and_divides_by_the_number_of_blocks(
    config: DrafterConfig, target: Target, cutter: Cutter
) -> None:
    drafter = made_drafter(config)
    even = replace(cutter, position_weights=np.array([0, 1, 1, 1], np.float32), by_block=True)
    loss, _, batch = one_loss(even, drafter, target, Objective(dpace=True))
    blocks: dict[tuple[int, int], list[float]] = {}
    for (row, block, _, ours, _), label in zip(by_hand(drafter, target, batch), batch.labels, strict=True):
        blocks.setdefault((row, block), []).append(-float(ours[label]))
    total = 0.0
    for nats in blocks.values():
        reached = np.cumprod([0.5 * np.exp(-x) + 0.5 for x in nats])
        total += float(np.dot(reached[::-1].cumsum()[::-1], nats))
    assert len(blocks) == batch.total_weight
    assert loss.item() == pytest.approx(total / len(blocks), rel=1e-4)


SECOND = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 8, "selector_top_k": 4}


def test_the_second_drafter_begins_as_the_first_and_trains_its_selector_beside(
    run: RunFile, config: DrafterConfig, target: Target, cutter: Cutter
) -> None:
    first, second = made_drafter(config), made_drafter(replace(config, **SECOND))
    second.load_state_dict(first.state_dict(), strict=False)
    plain, right, _ = one_loss(cutter, first, target, HARD_LABELS)
    loss, also_right, _ = one_loss(cutter, second, target, HARD_LABELS)
    assert torch.equal(right, also_right)
    assert loss > plain
    settings = replace(run, train=replace(run.train, lr=3e-3))
    mine = Trainer(settings, second.config, target, CPU, 100, None, PieceLimit(NOWHERE))
    results = [stepped(mine, i + 1, tapped(cutter, target, PieceLimit(NOWHERE), i)) for i in range(12)]
    assert results[-1].loss < 0.8 * results[0].loss
    selector = mine.drafter.candidate_selector
    assert selector is not None
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in selector.parameters())


def test_the_selector_learns_which_of_the_candidates_comes_after_the_true_token_before(
    config: DrafterConfig, target: Target, cutter: Cutter
) -> None:
    drafter = made_drafter(replace(config, **SECOND))
    batch = cutter.cut(0)
    rows = len(batch.labels)
    hidden = torch.randn(rows, 32)
    logits = hidden @ target.head.T
    products, tokens = logits.topk(4)
    before = torch.randint(96, (rows,))
    losses = selector_losses(drafter, target, hidden, before, batch, products, tokens)
    selector = drafter.candidate_selector
    assert selector is not None
    missing = 0
    for i in range(rows):
        label = batch.labels[i]
        candidates = tokens[i].tolist()
        if label not in candidates:
            candidates[-1], missing = int(label), missing + 1
        scores = torch.stack(
            [
                logits[i, c]
                + (
                    selector.predecessor_codebook[before[i]]
                    * selector.hidden_projection(hidden[i])
                    * selector.successor_codebook[c]
                ).sum()
                for c in candidates
            ]
        )
        expected = -scores.log_softmax(-1)[candidates.index(int(label))]
        torch.testing.assert_close(losses[i], expected, rtol=1e-4, atol=1e-5)
    assert 0 < missing < rows


FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_5_text", "qwen3_5_moe_text", "gemma2", "gemma3_text")


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_drafter_for_every_family_sees_what_the_target_embeds_and_learns(
    model_type: str, run: RunFile, cutter: Cutter, tmp_path: Path
) -> None:
    directory = make_target(tmp_path / "target", model_type)
    config = drafter_config(run, read_config(directory), MASK_TOKEN)
    target = load_target(directory, config.target_layer_ids, CPU, torch.float32)
    settings = replace(run, train=replace(run.train, lr=1e-2))
    mine = Trainer(settings, config, target, CPU, 100, None, PieceLimit(NOWHERE))
    ids = torch.arange(3, 90)[None]
    embedded = mine.drafter.embed(ids, target.embedding)
    torch.testing.assert_close(embedded, target.model.get_input_embeddings()(ids))
    results = [stepped(mine, i + 1, tapped(cutter, target, PieceLimit(NOWHERE), 0)) for i in range(20)]
    assert results[-1].loss < 0.8 * results[0].loss


@pytest.mark.parametrize(("layers", "block_size"), [(1, 4), (8, 32), (3, 7)])
def test_shapes_from_one_layer_to_eight_and_blocks_of_4_to_32_learn(
    layers: int, block_size: int, run: RunFile, cutter: Cutter
) -> None:
    shape = replace(run.drafter, layers=layers, block_size=block_size, target_layer_ids=(0, 1, 2), sliding_window=9)
    mine = replace(run, train=replace(run.train, lr=3e-3), drafter=shape)
    config = drafter_config(mine, read_config(Path(run.target.model)), MASK_TOKEN)
    assert config.layer_types.count("sliding_attention") == layers - 1
    target = load_target(Path(run.target.model), config.target_layer_ids, CPU, torch.float32)
    wide = replace(cutter, position_weights=position_weights(block_size, 0.0).numpy())
    trainer = Trainer(mine, config, target, CPU, 100, None, PieceLimit(NOWHERE))
    results = [stepped(trainer, i + 1, tapped(wide, target, PieceLimit(NOWHERE), 0)) for i in range(15)]
    assert results[-1].loss < 0.8 * results[0].loss


def test_masters_are_float32_whatever_the_targets_type(run: RunFile, config: DrafterConfig) -> None:
    half = load_target(Path(run.target.model), config.target_layer_ids, CPU, torch.bfloat16)
    mine = trainer(run, config, half, PieceLimit(NOWHERE))
    assert {parameter.dtype for parameter in mine.drafter.parameters()} == {torch.float32}


def test_a_step_tells_how_many_are_right_at_each_position(
    run: RunFile, config: DrafterConfig, target: Target, cutter: Cutter
) -> None:
    batch = cutter.cut(0)
    mine = trainer(run, config, target, PieceLimit(NOWHERE))
    _, correct = block_loss(mine.drafter, target, batch, target.states(batch.input_ids))
    result = stepped(mine, 1, tapped(cutter, target, PieceLimit(NOWHERE)))
    places = batch.trained % 4
    assert result.counts == tuple(int((places == k).sum()) for k in range(4))
    assert result.right == tuple(float(correct[places == k].sum()) for k in range(4))
    assert result.counts[0] == 0
    assert result.accuracy == pytest.approx(float(correct.float().mean()))


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
