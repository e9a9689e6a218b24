"""`dflash-train eval`: a drafter's acceptance length, by real speculative decoding with greedy verification.

The only judge of a drafter: training and inference may disagree by one position, with a fine loss and an
acceptance length of 1.
"""

import argparse
import copy
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from dflash_trainer.drafter import Drafter, load_drafter
from dflash_trainer.errors import CannotStart
from dflash_trainer.host import choose_device
from dflash_trainer.prepare import generate, load_tokenizer, read_prompts, stop_ids, until_stop
from dflash_trainer.target import load_causal_lm


@dataclass(frozen=True, slots=True)
class Generation:
    """What speculative decoding wrote, and how well the drafter did at each step of the target.

    A step verifies one block. It offered `offered[i]` drafted tokens of which the first `accepted[i]` were the
    target's own choice, and produced `acceptance_lengths[i]` tokens: those and the target's next one, less what
    lies behind a stop token or the end. The token that the prompt's own forward gives counts in no step.
    """

    output_ids: list[int]  # the new tokens, with the stop token
    acceptance_lengths: list[int]
    offered: list[int]
    accepted: list[int]


@dataclass(frozen=True, slots=True)
class Scores:
    """Of one drafter over all prompts."""

    acceptance_length: float  # tokens produced per step of the target, mean over all steps
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
    add("drafter", type=Path, metavar="DRAFTER", help="its directory, such as OUTPUT/drafter of a run")
    add("--target-model", type=Path, required=True, metavar="DIR", help="Hugging Face directory of the target")
    add("--prompts", type=Path, required=True, metavar="FILE", help="JSONL as for prepare, not trained on")
    add("--max-new-tokens", type=int, default=128, metavar="N", help="for each prompt (%(default)s)")
    add("--limit", type=int, metavar="N", help="only the first N prompts")
    add("--untrained", action="store_true", help="also measure an untrained drafter of the same shape")
    add("--json", action="store_true", help="one JSON object instead of the table")


def run(args: argparse.Namespace) -> int:
    """Prints the measurements; returns 1 if the text is not the target's own. Raises CannotStart."""
    if args.max_new_tokens < 2:
        raise CannotStart(f"--max-new-tokens {args.max_new_tokens}: must be at least 2, or nothing is drafted")
    device = choose_device()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    drafters = {"drafter": load_drafter(args.drafter, device, dtype).eval()}
    if args.untrained:
        fresh = Drafter(drafters["drafter"].config)
        fresh.reset_parameters(seed=0)
        drafters["untrained"] = fresh.to(device, dtype).eval()
    tokenizer = load_tokenizer(args.target_model)
    prompts = [list(prompt.ids) for prompt in read_prompts(args.prompts, tokenizer, args.limit)]
    target = load_causal_lm(args.target_model, device, dtype)
    check_fit(drafters["drafter"], target, args)
    stops = stop_ids(target)
    runs: dict[str, list[Generation]] = {name: [] for name in drafters}
    alone: list[list[int]] = []
    seconds: dict[str, float] = defaultdict(float)
    for ids in tqdm(prompts, unit="prompt", disable=not sys.stderr.isatty()):
        began = time.perf_counter()
        alone += generate(target, [ids], args.max_new_tokens, temperature=0.0)
        seconds["alone"] += time.perf_counter() - began
        for name, drafter in drafters.items():
            began = time.perf_counter()
            runs[name].append(speculative_generate(drafter, target, ids, args.max_new_tokens, stops))
            seconds[name] += time.perf_counter() - began
    tokens = sum(map(len, alone))
    differences = find_differences(target, prompts, alone, runs["drafter"])
    scores = {name: score(generations, seconds[name]) for name, generations in runs.items()}
    report(args, len(prompts), scores, tokens / seconds["alone"], differences, tokenizer)
    return 1 if differences else 0


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


@torch.inference_mode()
def speculative_generate(
    drafter: Drafter, target: Any, input_ids: Sequence[int], max_new_tokens: int, stop_ids: set[int]
) -> Generation:
    """Up to max_new_tokens tokens, ending with the first stop token: the target's greedy text, drafted in blocks.

    A step knows the tokens up to `start` and the target's states strictly below it. The drafter fills the block
    [known token, mask, …] at positions start, start + 1, …; the target reads the block at once, and its own
    choices decide how many of the drafted tokens hold. Blocks shrink where fewer tokens are left to write.
    """
    block_size = drafter.config.block_size
    embedding, head = target.get_input_embeddings().weight, target.get_output_embeddings()
    end = len(input_ids) + max_new_tokens
    reader = _Reader(target, drafter.config.target_layer_ids)
    logits, context = reader.read(input_ids, logits_to_keep=1)
    tokens = [*input_ids, int(logits[-1].argmax())]
    lengths: list[int] = []
    offered: list[int] = []
    accepted: list[int] = []
    while len(tokens) < end and tokens[-1] not in stop_ids:
        start = len(tokens) - 1
        positions = torch.arange(start, min(start + block_size, end), device=target.device)
        block = torch.full_like(positions, drafter.config.mask_token_id)
        block[0] = tokens[-1]
        hidden = drafter(F.embedding(block, embedding)[None], positions[None], context[None])
        drafted: list[int] = head(hidden[0, 1:]).argmax(-1).tolist()
        logits, states = reader.read([tokens[-1], *drafted])
        chosen: list[int] = logits.argmax(-1).tolist()
        right = _agreement(drafted, chosen)
        new = until_stop(chosen[: right + 1], stop_ids)[: end - len(tokens)]
        reader.keep(len(new))
        context = torch.cat((context, states[: len(new)]))
        tokens += new
        lengths.append(len(new))
        offered.append(len(drafted))
        accepted.append(right)
    return Generation(tokens[len(input_ids) :], lengths, offered, accepted)


class _Reader:
    """The target with its cache: reads one block after another, and can forget the end of the last one."""

    def __init__(self, target: Any, layer_ids: Sequence[int]) -> None:
        from transformers import DynamicCache

        self._target = target
        self._layer_ids = layer_ids
        self._cache = DynamicCache(config=target.config.get_text_config())
        # A recurrent state (linear attention) has no past to be cut back to: it is kept and read forward again.
        self._recurrent = any(hasattr(layer, "recurrent_states") for layer in self._cache.layers)
        if not self._recurrent:
            # Lets sliding windows be cut back.
            self._cache.activate_past_recording()  # type: ignore[no-untyped-call]
        self._before = self._cache
        self._block: Sequence[int] = ()

    def read(self, tokens: Sequence[int], logits_to_keep: int = 0) -> tuple[Tensor, Tensor]:
        """Logits [S, V] (the last `logits_to_keep`, 0: all) and tapped states [S, n·H] of the next S tokens."""
        if self._recurrent:
            self._before = copy.deepcopy(self._cache)
        self._block = tokens
        out = self._target(
            torch.tensor([tokens], device=self._target.device),
            past_key_values=self._cache,
            use_cache=True,
            output_hidden_states=True,
            logits_to_keep=logits_to_keep,
        )
        return out.logits[0], torch.cat([out.hidden_states[i + 1][0] for i in self._layer_ids], dim=-1)

    def keep(self, count: int) -> None:
        """Forgets all but the first `count` tokens of the last block read."""
        if not self._recurrent:
            self._cache.crop(count - len(self._block))
        elif count < len(self._block):
            self._cache = self._before
            self.read(self._block[:count])


def _agreement(drafted: Sequence[int], chosen: Sequence[int]) -> int:
    """How many of the first elements are the same."""
    pairs = zip(drafted, chosen, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(drafted), len(chosen)))


def score(generations: Sequence[Generation], seconds: float) -> Scores:
    """The scores of one drafter's generations, which took so many seconds."""
    lengths = [length for generation in generations for length in generation.acceptance_lengths]
    steps = [pair for g in generations for pair in zip(g.offered, g.accepted, strict=True)]
    by_position = [
        sum(accepted >= k for offered, accepted in steps if offered >= k)
        / sum(offered >= k for offered, _ in steps)
        for k in range(1, max((offered for offered, _ in steps), default=0) + 1)
    ]
    tokens = sum(len(generation.output_ids) for generation in generations)
    return Scores(sum(lengths) / max(1, len(lengths)), by_position, tokens / seconds)


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
    logits = _Reader(target, (0,)).read(prefix, logits_to_keep=1)[0][-1].float()
    reader = _Reader(target, (0,))
    reader.read(prefix[:-1])
    other = reader.read(prefix[-1:])[0][-1].float()
    plain, drafted = alone[position], speculative[position]
    gap = float((logits[plain] - logits[drafted]).abs())
    return Difference(index, position, plain, drafted, gap, float((logits - other).abs().max()))


def report(
    args: argparse.Namespace,
    prompts: int,
    scores: dict[str, Scores],
    alone_tokens_per_s: float,
    differences: Sequence[Difference],
    tokenizer: Any,
) -> None:
    """Prints the measurements as a table, or as JSON."""
    if args.json:
        values = {
            "prompts": prompts,
            **{name: asdict(measured) for name, measured in scores.items()},
            "target_alone_tokens_per_s": alone_tokens_per_s,
            "identical": prompts - len(differences),
            "differences": [asdict(difference) for difference in differences],
        }
        print(json.dumps(values, indent=2))
        return
    columns = list(scores.values())
    print(_row("", scores))
    print(_row("acceptance length, tokens a step", (f"{s.acceptance_length:.2f}" for s in columns)))
    for k in range(max(len(s.accepted_by_position) for s in columns)):
        shares = (f"{100 * s.accepted_by_position[k]:.0f} %" for s in columns)
        print(_row(f"accepted at block position {k + 1}", shares))
    print(_row("tokens/s", (f"{s.tokens_per_s:.1f}" for s in columns)))
    print(_row("tokens/s of the target alone", [f"{alone_tokens_per_s:.1f}"]))
    print(f"text identical to the target's own: {prompts - len(differences)} of {prompts}")
    for difference in differences:
        print(difference.line(tokenizer))


def _row(label: str, cells: Iterable[str]) -> str:
    return f"{label:<36}" + "".join(f"{cell:>12}" for cell in cells)
