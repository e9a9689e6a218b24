"""One optimizer step of the drafter, and the state that a checkpoint needs to repeat the next one."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from dflash_agent import outputs
from dflash_agent.runfile import RunFile
from torch import Tensor

from dflash_trainer.drafter import Drafter, load_drafter, save_drafter
from dflash_trainer.drafter_config import DrafterConfig
from dflash_trainer.errors import CannotStart, is_compiling
from dflash_trainer.journal import log
from dflash_trainer.loader import Batch
from dflash_trainer.loss import Objective, dpace_weights, position_losses
from dflash_trainer.mask import dense_mask, flex_mask
from dflash_trainer.memory import PieceLimit
from dflash_trainer.optim import learning_rate, make_optimizer
from dflash_trainer.pipeline import Span, Tapped, mark
from dflash_trainer.target import Target

STATE_FILE = "state.pt"
NOT_FINITE_LIMIT = 8
HARD_LABELS = Objective()


@dataclass(frozen=True, slots=True)
class StepResult:
    """Loss (weighted mean, nats), share of trained positions predicted right, gradient norm, learning rate.

    By position in a block, from the anchor's on: `right` of `counts` trained ones were predicted right. `on_gpu`
    has the seconds that the target's forward and the drafter's step took there; nothing on CPU.
    """

    loss: float
    accuracy: float
    grad_norm: float
    lr: float
    right: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()
    on_gpu: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Submitted:
    """A step that a GPU may still be at."""

    step: int
    epoch: int
    row_ids: tuple[int, ...]
    tokens: int  # without padding
    lr: float
    counts: tuple[int, ...]  # see Batch
    # On the host, there once the spans have ended: loss, gradient's norm, and how many are right by position.
    numbers: Tensor  # [2 + S] float32
    spans: Mapping[str, Span]


class Trainer:
    """The drafter, its optimizer and how they take a step. Masters are float32; on CUDA it computes in bf16."""

    def __init__(
        self,
        run: RunFile,
        config: DrafterConfig,
        target: Target,
        device: torch.device,
        total_steps: int,
        state: dict[str, Any] | None,
        limit: PieceLimit,
    ) -> None:
        self.settings = run.train
        self.target = target
        self.device = device
        self.dense = run.train.attention == "dense"
        self.objective = Objective(run.train.distill, run.train.position_weights == "dpace")
        self.total_steps = total_steps
        self.limit = limit
        self.skipped = 0  # steps of this attempt whose loss or gradient was not finite
        self.in_a_row = 0
        begun = not state and run.drafter.init_from
        self.drafter = load_drafter(Path(begun)) if begun else Drafter(config)
        if state:
            self.drafter.load_state_dict(state["drafter"])
        elif not begun:
            self.drafter.reset_parameters(run.train.seed)
            self.drafter.calm_output(target.head)
        self.drafter.to(device)
        self.optimizer = make_optimizer(self.drafter.parameters(), run.train.lr, run.train.weight_decay)
        if state:
            self.optimizer.load_state_dict(state["optimizer"])

    def step(self, step: int, tapped: Tapped) -> Submitted:
        """Has a batch trained on; `step` is 1-based. Does not wait for a GPU: settle() does.

        If loss or gradient is not finite the step changes nothing, which is decided where they are. Raises
        CannotStart if the drafter's layers cannot be compiled.
        """
        tapped.wait()
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        begin = mark(stream) if stream else None
        lr = learning_rate(step - 1, self.total_steps, self.settings.lr, self.settings.warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.zero_grad()
        loss, right = self._gradient(step, tapped)
        norm = torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), self.settings.clip)
        # What GradScaler tells an optimizer of its own kind: those that are fused do nothing then.
        self.optimizer.found_inf = (~(loss.isfinite() & norm.isfinite())).float()  # type: ignore[attr-defined]
        self.optimizer.step()
        numbers = torch.cat((torch.stack((loss, norm)), right))
        spans = {} if tapped.span is None else {"target": tapped.span}
        if stream and begin:
            numbers = torch.empty_like(numbers, device="cpu", pin_memory=True).copy_(numbers, non_blocking=True)
            spans["drafter"] = Span(begin, mark(stream))
        batch = tapped.batch
        return Submitted(step, batch.epoch, batch.row_ids, batch.tokens, lr, batch.counts, numbers, spans)

    def settle(self, submitted: Submitted) -> StepResult:
        """What a step came to, once the GPU is done with it; steps are settled in order.

        Raises CannotStart when NOT_FINITE_LIMIT in a row were not finite: another attempt would meet them too.
        """
        for span in submitted.spans.values():
            span.end.synchronize()
        loss, norm, *right = submitted.numbers.tolist()
        accuracy = sum(right) / sum(submitted.counts)
        on_gpu = {stage: span.seconds() for stage, span in submitted.spans.items()}
        result = StepResult(loss, accuracy, norm, submitted.lr, tuple(right), submitted.counts, on_gpu)
        if math.isfinite(loss) and math.isfinite(norm):
            self.in_a_row = 0
        else:
            self._skip(submitted, result)
        return result

    def _gradient(self, step: int, tapped: Tapped) -> tuple[Tensor, Tensor]:
        """Adds up the gradient of a batch's loss, in pieces if need be; the loss, and how many are right [S]."""
        batch, final = tapped.batch, tapped.final
        rows, length = batch.input_ids.shape
        size = len(batch.counts)

        def work(begin: int, end: int) -> tuple[Tensor, Tensor]:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
                piece = batch if end - begin == rows else batch.rows(begin, end)
                taught = None if final is None else final[begin:end]
                context = tapped.context[begin:end]
                loss, correct = block_loss(
                    self.drafter, self.target, piece, context, taught, self.objective, self.dense
                )
            loss.backward()  # type: ignore[no-untyped-call]
            right = torch.zeros(size, device=correct.device)
            return loss.detach(), right.index_add_(0, piece.trained % size, correct.float())

        try:
            parts = self.limit.in_pieces(rows, length, work, self.optimizer.zero_grad, step)
        except RuntimeError as error:
            if not is_compiling(error):
                raise
            reason = " ".join(str(error).split())[:300]
            raise CannotStart(
                f'the drafter\'s layers cannot be compiled: {reason}; set attention = "dense" in [train]'
            ) from error
        return sum_of([loss for loss, _ in parts]), sum_of([right for _, right in parts])

    def _skip(self, skipped: Submitted, result: StepResult) -> None:
        self.skipped += 1
        self.in_a_row += 1
        what = f"loss {result.loss:.4g}, gradient's norm {result.grad_norm:.4g}"
        log(
            f"step {skipped.step} of epoch {skipped.epoch}: {what}; step skipped",
            event="step-skipped",
            priority=4,
            step=skipped.step,
        )
        if self.in_a_row == NOT_FINITE_LIMIT:
            raise CannotStart(
                f"loss or gradient was not finite in {NOT_FINITE_LIMIT} steps in a row, up to step {skipped.step} "
                f"of epoch {skipped.epoch} ({what}); the checkpoints are from before; try a lower lr, or look at "
                f"these rows of the data: {', '.join(map(str, skipped.row_ids))}"
            )

    def snapshot(self, step: int) -> Callable[[Path], None]:
        """Copies the state now and returns what writes it, so that training can go on meanwhile."""
        drafter = {name: _copy(tensor) for name, tensor in self.drafter.state_dict().items()}
        state = {"step": step, "drafter": drafter, "optimizer": _copy(self.optimizer.state_dict())}
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        config = self.drafter.config
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32

        def write(directory: Path) -> None:
            _write_state(state, directory / STATE_FILE)
            save_drafter(drafter, config, directory / outputs.DRAFTER_LINK, dtype)

        return write


def block_loss(
    drafter: Drafter,
    target: Target,
    batch: Batch,
    context: Tensor,
    final: Tensor | None = None,
    objective: Objective = HARD_LABELS,
    dense: bool = False,
) -> tuple[Tensor, Tensor]:
    """The loss of a batch's blocks, and which trained positions are predicted right (bool [M]).

    context [B, T, n·H]; final [B, T, H], the target's states after its final norm, to distill. Only trained
    positions go through the head. The loss is a differentiable scalar: the mean over the step's weights or blocks,
    or a part of it if the batch is only a piece of the step's. `dense`: without FlexAttention, as without a GPU.
    """
    masks = drafter.masks(
        batch.anchors, context.shape[1], flex_mask if context.is_cuda and not dense else dense_mask
    )
    own_type = drafter.own_type(context.device)  # not the target's
    noise = drafter.embed(batch.block_ids, target.embedding).to(own_type)
    hidden = drafter(noise, batch.positions, context.to(own_type), masks)
    hidden = hidden.flatten(0, 1).index_select(0, batch.trained)
    # Where in the rows, flattened, the token before each trained position is: its state predicts that position's.
    rows = batch.trained.div(batch.block_ids.shape[1], rounding_mode="floor")
    before = rows * batch.input_ids.shape[1] + batch.positions.flatten()[batch.trained] - 1
    selector = drafter.candidate_selector
    with torch.autocast(context.device.type, enabled=False):
        losses, nats, correct, *kept = position_losses(
            hidden.to(target.head.dtype),
            target.head,
            batch.labels,
            drafter.config.logit_shape,
            objective.distill,
            None if final is None else final.flatten(0, 1).index_select(0, before),
            target.logit_shape,
            selector.top_k if selector else 0,
        )
    if selector:
        losses = losses + selector_losses(drafter, target, hidden, batch.input_ids.flatten()[before], batch, *kept)
    weights = batch.weights
    if objective.dpace:
        size = drafter.config.block_size
        weights = weights * dpace_weights(nats, batch.trained, batch.block_ids.numel() // size, size)
    return (losses * weights).sum() / batch.total_weight, correct


def selector_losses(
    drafter: Drafter, target: Target, hidden: Tensor, before: Tensor, batch: Batch, products: Tensor, tokens: Tensor
) -> Tensor:
    """Cross-entropy [M] of the selector's choice among each position's candidates, after the true token before it.

    hidden [M, H], before [M], products and tokens [M, K]. Where the right token is not among the likeliest it takes
    the last one's place. What the head says is taken as it is: the drafter learns it by the other loss.
    """
    assert drafter.candidate_selector is not None
    labels = batch.labels[:, None]
    missing = (tokens != labels).all(-1, keepdim=True)
    last = torch.arange(tokens.shape[1], device=tokens.device) == tokens.shape[1] - 1
    there = (hidden.detach().to(target.head.dtype) * target.head[batch.labels]).sum(-1, keepdim=True)
    products = torch.where(missing & last, there, products)
    tokens = torch.where(missing & last, labels, tokens)
    unary = drafter.config.logit_shape(products.float())
    scores = drafter.candidate_selector(hidden, before, tokens, unary)
    return F.cross_entropy(scores.float(), (tokens == labels).int().argmax(-1), reduction="none")


def sum_of(parts: list[Tensor]) -> Tensor:
    """Of tensors of one shape; of one it is that one, bit for bit."""
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


def _write_state(state: dict[str, Any], path: Path) -> None:
    """torch.save, but a full disk is the OSError that it is."""
    try:
        with path.open("wb") as file:
            torch.save(state, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from error
        raise


def _copy(value: Any) -> Any:
    """A deep copy on the host of the tensors in a state dictionary; one from a GPU is there once its stream is.

    Page-locked memory takes copies at the speed of the bus; torch keeps it for the next snapshot.
    """
    if isinstance(value, Tensor):
        held = value.detach()
        if not held.is_cuda:
            return held.clone()
        return torch.empty_like(held, device="cpu", pin_memory=True).copy_(held, non_blocking=True)
    if isinstance(value, dict):
        return {key: _copy(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_copy(inner) for inner in value]
    return value
