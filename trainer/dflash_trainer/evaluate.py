"""`dflash-train eval`: a drafter's acceptance length, by real speculative decoding.

The only judge of a drafter: training and inference may disagree by one position, with a fine loss and an
acceptance length of 1.
"""

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from dflash_trainer.chats import load_tokenizer, read_prompts, template_arguments
from dflash_trainer.completions import generate, stop_ids
from dflash_trainer.decode import Generation, Reader, Sampling, speculative_generate
from dflash_trainer.drafter import Drafter, load_drafter
from dflash_trainer.drafter_config import find_drafter
from dflash_trainer.errors import CannotStart
from dflash_trainer.host import choose_device
from dflash_trainer.target import load_causal_lm

RESAMPLED = 2000  # sets of prompts


@dataclass(frozen=True, slots=True)
class Scores:
    """Of one drafter over some prompts."""

    prompts: int
    acceptance_length: float  # tokens produced per step of the target, mean over all steps
    interval: tuple[float, float]  # that holds this mean with 95 % confidence, by resampling the prompts
    accepted_by_position: list[float]  # share of the steps offering position k that accepted it, k = 1, 2, …
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Difference:
    """Where the text of speculative decoding first differs from what the target alone writes."""

    prompt: int
    position: int  # among the new tokens
    alone: int
    speculative: int
    gap: float  # between the two tokens' logits
    rounding: float  # by how much logits differ there when they are computed in two ways

    def line(self, tokenizer: Any) -> str:
        """For people."""
        cause = "a tie within rounding" if self.gap <= 2 * self.rounding else "not a tie: the verification is wrong"
        return (
            f"prompt {self.prompt + 1}, new token {self.position + 1}: the target alone writes "
            f"{tokenizer.decode([self.alone])!r}, with the drafter {tokenizer.decode([self.speculative])!r}; their "
            f"logits differ by {self.gap:.2g}, two ways to compute them by {self.rounding:.2g}: {cause}"
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `dflash-train eval`."""
    add = parser.add_argument
    add("drafter", type=Path, metavar="DRAFTER", help="its directory, or that of a checkpoint or of a run's output")
    add("--target-model", type=Path, required=True, metavar="DIR", help="Hugging Face directory of the target")
    add("--prompts", type=Path, required=True, metavar="FILE", help="JSONL as for prepare, not trained on")
    add("--max-new-tokens", type=int, default=128, metavar="N", help="for each prompt (%(default)s)")
    add("--limit", type=int, metavar="N", help="only the first N prompts")
    add("--temperature", type=float, default=0.0, metavar="X", help="of the sampling; 0 is greedy (%(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="of the sampling (%(default)s)")
    add(
        "--chat-template-kwargs",
        type=template_arguments,
        default={},
        metavar="JSON",
        help="as the dataset was prepared with",
    )
    add("--untrained", action="store_true", help="also measure an untrained drafter of the same shape")
    add("--json", action="store_true", help="one JSON object instead of the table")


def run(args: argparse.Namespace) -> int:
    """Prints the measurements; returns 1 if the text is not the target's own. Raises CannotStart."""
    if args.max_new_tokens < 2:
        raise CannotStart(f"--max-new-tokens {args.max_new_tokens}: must be at least 2, or nothing is drafted")
    if not args.temperature >= 0:
        raise CannotStart(f"--temperature {args.temperature}: must be 0 or more")
    device = choose_device()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    drafters = {"drafter": load_drafter(find_drafter(args.drafter), device, dtype).eval()}
    if args.untrained:
        fresh = Drafter(drafters["drafter"].config)
        fresh.reset_parameters(seed=0)
        drafters["untrained"] = fresh.to(device, dtype).eval()
    tokenizer = load_tokenizer(args.target_model)
    prompts = read_prompts(args.prompts, tokenizer, args.limit, args.chat_template_kwargs)
    target = load_causal_lm(args.target_model, device, dtype)
    check_fit(drafters["drafter"], target, args)
    stops = stop_ids(target)
    torch.manual_seed(args.seed)  # for what the target writes alone
    sampling = Sampling(args.temperature, torch.Generator(device).manual_seed(args.seed))
    runs: dict[str, list[Generation]] = {name: [] for name in drafters}
    alone: list[list[int]] = []
    seconds: dict[str, list[float]] = defaultdict(list)
    for prompt in tqdm(prompts, unit="prompt", disable=not sys.stderr.isatty()):
        began = time.perf_counter()
        alone += generate(target, [prompt.ids], args.max_new_tokens, args.temperature)
        seconds["alone"].append(time.perf_counter() - began)
        for name, drafter in drafters.items():
            began = time.perf_counter()
            runs[name].append(
                speculative_generate(drafter, target, prompt.ids, args.max_new_tokens, stops, sampling)
            )
            seconds[name].append(time.perf_counter() - began)
    result = Result(
        scores={name: score(generations, sum(seconds[name])) for name, generations in runs.items()},
        kinds=by_kind([prompt.kind for prompt in prompts], runs["drafter"], seconds["drafter"]),
        alone_tokens_per_s=sum(map(len, alone)) / sum(seconds["alone"]),
        differences=None
        if args.temperature
        else find_differences(target, [prompt.ids for prompt in prompts], alone, runs["drafter"]),
    )
    print(json.dumps(result.as_json(), indent=2) if args.json else result.table(tokenizer))
    return 1 if result.differences else 0


def by_kind(kinds: Sequence[str], generations: Sequence[Generation], seconds: Sequence[float]) -> dict[str, Scores]:
    """The scores of each kind of prompt, if there are several."""
    found = sorted(set(kinds))
    if len(found) < 2:
        return {}
    return {
        kind: score(
            [g for g, own in zip(generations, kinds, strict=True) if own == kind],
            sum(s for s, own in zip(seconds, kinds, strict=True) if own == kind),
        )
        for kind in found
    }


def check_fit(drafter: Drafter, target: Any, args: argparse.Namespace) -> None:
    """Raises CannotStart if the drafter is of another target."""
    text = target.config.get_text_config()
    for name, theirs in (("hidden_size", text.hidden_size), ("num_target_layers", text.num_hidden_layers)):
        ours = getattr(drafter.config, name)
        if ours != theirs:
            raise CannotStart(
                f"drafter {args.drafter} is of a target with {name} {ours}, but {args.target_model} has {theirs}; "
                f"give the target that it was trained with"
            )


def _agreement(drafted: Sequence[int], chosen: Sequence[int]) -> int:
    """How many of the first elements are the same."""
    pairs = zip(drafted, chosen, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(drafted), len(chosen)))


def score(generations: Sequence[Generation], seconds: float) -> Scores:
    """The scores of one drafter's generations, which took so many seconds."""
    steps = [pair for g in generations for pair in zip(g.offered, g.accepted, strict=True)]
    by_position = [
        sum(accepted >= k for offered, accepted in steps if offered >= k)
        / sum(offered >= k for offered, _ in steps)
        for k in range(1, max((offered for offered, _ in steps), default=0) + 1)
    ]
    totals = np.array([[sum(g.acceptance_lengths), len(g.acceptance_lengths)] for g in generations])
    drawn = np.random.default_rng(0).integers(len(totals), size=(RESAMPLED, len(totals)))
    produced, taken = np.moveaxis(totals[drawn].sum(1), -1, 0)
    low, high = np.percentile(produced / np.maximum(1, taken), [2.5, 97.5]).tolist()
    tokens = sum(len(generation.output_ids) for generation in generations)
    mean = float(totals[:, 0].sum() / max(1, totals[:, 1].sum()))
    return Scores(len(generations), mean, (low, high), by_position, tokens / seconds)


def find_differences(
    target: Any, prompts: Sequence[Sequence[int]], alone: Sequence[list[int]], generations: Sequence[Generation]
) -> list[Difference]:
    """Where the drafted text is not what the target writes alone: the first differing token of each prompt."""
    return [
        explain_difference(target, i, prompt, plain, generation.output_ids)
        for i, (prompt, plain, generation) in enumerate(zip(prompts, alone, generations, strict=True))
        if plain != generation.output_ids
    ]


@torch.inference_mode()
def explain_difference(
    target: Any, index: int, prompt: Sequence[int], alone: Sequence[int], speculative: Sequence[int]
) -> Difference:
    """Compares the logits of the two tokens, computed in one go and after a cache."""
    position = _agreement(alone, speculative)
    prefix = [*prompt, *alone[:position]]
    logits = Reader(target, (0,)).read(prefix, logits_to_keep=1)[0][-1].float()
    reader = Reader(target, (0,))
    reader.read(prefix[:-1])
    other = reader.read(prefix[-1:])[0][-1].float()
    plain, drafted = alone[position], speculative[position]
    gap = float((logits[plain] - logits[drafted]).abs())
    return Difference(index, position, plain, drafted, gap, float((logits - other).abs().max()))


@dataclass(frozen=True, slots=True)
class Result:
    """What an evaluation came to; without `differences` at a temperature: a sample is not to be compared."""

    scores: dict[str, Scores]
    kinds: dict[str, Scores]  # of the drafter
    alone_tokens_per_s: float
    differences: list[Difference] | None

    @property
    def prompts(self) -> int:
        """How many there were."""
        return self.scores["drafter"].prompts

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        text = {} if self.differences is None else {"identical": self.prompts - len(self.differences)}
        return {
            "prompts": self.prompts,
            **{name: asdict(measured) for name, measured in self.scores.items()},
            "kinds": {kind: asdict(measured) for kind, measured in self.kinds.items()},
            "target_alone_tokens_per_s": self.alone_tokens_per_s,
            **text,
            "differences": [asdict(difference) for difference in self.differences or []],
        }

    def table(self, tokenizer: Any) -> str:
        """For people."""
        columns = list(self.scores.values())
        lines = [
            _row("", self.scores),
            _row("acceptance length, tokens a step", (f"{s.acceptance_length:.2f}" for s in columns)),
            _row("  95 % interval, over prompts", ("{:.2f}–{:.2f}".format(*s.interval) for s in columns)),
        ]
        lines += [
            _row(f"  of {kind or 'no kind'} ({measured.prompts})", [f"{measured.acceptance_length:.2f}"])
            for kind, measured in self.kinds.items()
        ]
        for k in range(max(len(s.accepted_by_position) for s in columns)):
            shares = (f"{100 * s.accepted_by_position[k]:.0f} %" for s in columns)
            lines.append(_row(f"accepted at block position {k + 1}", shares))
        lines += [
            _row("tokens/s", (f"{s.tokens_per_s:.1f}" for s in columns)),
            _row("tokens/s of the target alone", [f"{self.alone_tokens_per_s:.1f}"]),
            _row("times as fast", (f"{s.tokens_per_s / self.alone_tokens_per_s:.2f}" for s in columns)),
        ]
        if self.differences is None:
            lines.append("the text is a sample of the target's own distribution, by rejection sampling")
        else:
            same = self.prompts - len(self.differences)
            lines.append(f"text identical to the target's own: {same} of {self.prompts}")
            lines += [difference.line(tokenizer) for difference in self.differences]
        return "\n".join(lines)


def _row(label: str, cells: Iterable[str]) -> str:
    return f"{label:<36}" + "".join(f"{cell:>12}" for cell in cells)
