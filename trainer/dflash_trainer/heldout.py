"""The acceptance length on held-out prompts while a run trains: a falling loss alone proves no drafter."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from dflash_agent.runfile import RunFile, seconds

from dflash_trainer.chats import Prompt, load_tokenizer, read_prompts
from dflash_trainer.completions import stop_ids
from dflash_trainer.dataset import read_card
from dflash_trainer.decode import Generation, speculative_generate
from dflash_trainer.drafter import Drafter
from dflash_trainer.errors import is_out_of_memory
from dflash_trainer.evaluate import score
from dflash_trainer.journal import WARNING, log


@dataclass(frozen=True, slots=True)
class HeldOut:
    """What a run's evaluations decode, and how long each may take."""

    prompts: tuple[Prompt, ...]
    max_new_tokens: int
    interval: int  # steps
    budget: float  # seconds, after which no other prompt is begun

    def due(self, step: int, total_steps: int) -> bool:
        """Whether to evaluate after a step."""
        return bool(self.prompts) and (step % self.interval == 0 or step == total_steps)


def read_heldout(run: RunFile) -> HeldOut:
    """The run's held-out prompts, rendered as its data was; none if it names no file. Raises CannotStart."""
    chosen = run.eval
    prompts: list[Prompt] = []
    if chosen.prompts:
        arguments = json.loads(read_card(Path(run.data.dir)).get("settings", {}).get("chat_template_kwargs", "{}"))
        tokenizer = load_tokenizer(Path(run.target.model))
        prompts = read_prompts(Path(chosen.prompts), tokenizer, chosen.limit, arguments)
    return HeldOut(tuple(prompts), chosen.max_new_tokens, chosen.interval, seconds(chosen.budget))


def measure(
    held: HeldOut, step: int, drafter: Drafter, model: Any, go_on: Callable[[], bool]
) -> dict[str, Any] | None:
    """A row for metrics.jsonl; None if nothing could be measured, which is logged and ends no training.

    Greedy, with the drafter computing in the type that it trains in. `go_on` is asked between two prompts.
    """
    device: torch.device = model.device
    began = time.monotonic()
    found: list[Generation] = []
    try:
        stops = stop_ids(model)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            for prompt in held.prompts:
                found.append(speculative_generate(drafter, model, prompt.ids, held.max_new_tokens, stops))
                if time.monotonic() - began > held.budget or not go_on():
                    break
    except Exception as error:  # noqa: BLE001 - days of training are not lost for want of a figure
        if is_out_of_memory(error):
            torch.cuda.empty_cache()
        reason = " ".join(str(error).split())[:300]
        log(
            f"evaluation after step {step} left out: {type(error).__name__}: {reason}; training goes on",
            event="evaluation-failed",
            priority=WARNING,
            step=step,
        )
        return None
    spent = time.monotonic() - began
    scores = score(found, spent)
    row: dict[str, Any] = {
        "step": step,
        "acceptance_length": scores.acceptance_length,
        "acceptance_interval": [round(bound, 4) for bound in scores.interval],
        "accepted_by_position": [round(share, 4) for share in scores.accepted_by_position],
        "eval_prompts": len(found),
        "eval_tokens": sum(len(generation.output_ids) for generation in found),
        "eval_s": round(spent, 3),
    }
    low, high = scores.interval
    log(
        f"step {step}: acceptance length {scores.acceptance_length:.2f} ({low:.2f}–{high:.2f}) on {len(found)} of "
        f"{len(held.prompts)} held-out prompts, in {spent:.1f} s",
        event="evaluated",
        **row,
    )
    return row
