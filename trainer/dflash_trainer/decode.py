"""Speculative decoding of one prompt: the drafter proposes a block, the target verifies it.

Greedy, the text is the target's own, but for rounding. At a temperature it is a sample of the target's own
distribution, by rejection sampling (Leviathan et al., arXiv 2211.17192, algorithm 1).
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash_trainer.completions import until_stop
from dflash_trainer.drafter import Drafter, Remembered


@dataclass(frozen=True, slots=True)
class Generation:
    """What speculative decoding wrote, and how well the drafter did at each step of the target.

    A step verifies one block. It offered `offered[i]` drafted tokens of which the first `accepted[i]` were taken,
    and produced `acceptance_lengths[i]` tokens: those and the target's next one, less what lies behind a stop token
    or the end. The token that the prompt's own forward gives counts in no step.
    """

    output_ids: list[int]  # the new tokens, with the stop token
    acceptance_lengths: list[int]
    offered: list[int]
    accepted: list[int]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen: the likeliest at temperature 0, else by a generator on the model's device."""

    temperature: float = 0.0
    generator: torch.Generator | None = None

    def probabilities(self, logits: Tensor) -> Tensor:
        """float32, of logits [..., V]; all on the likeliest at temperature 0."""
        if self.temperature:
            return torch.softmax(logits.float() / self.temperature, -1)
        return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)

    def draw(self, probabilities: Tensor) -> Tensor:
        """Tokens [...] by probabilities [..., V]."""
        if not self.temperature:
            return probabilities.argmax(-1)
        flat = probabilities.reshape(-1, probabilities.shape[-1])
        return torch.multinomial(flat, 1, generator=self.generator).view(probabilities.shape[:-1])

    def accepts(self, ratio: float) -> bool:
        """With this probability, or for sure from 1 on."""
        if ratio >= 1 or not self.temperature:
            return ratio >= 1
        generator = self.generator
        return torch.rand((), generator=generator, device=generator.device if generator else None).item() < ratio


GREEDY = Sampling()


def verify(drafted: Sequence[int], proposed: Tensor, wanted: Tensor, sampling: Sampling) -> list[int]:
    """The tokens that a step of the target gives: the drafted ones that hold, then one of its own.

    proposed [Q, V] are the probabilities that the Q drafted tokens were drawn by, wanted [Q + 1, V] the target's at
    the same places and the one behind them. A token x holds with probability min(1, wanted(x) / proposed(x)); the
    first that does not is drawn anew from what the target wants beyond the proposal.
    """
    tokens: list[int] = []
    for place, token in enumerate(drafted):
        p, q = wanted[place, token].item(), proposed[place, token].item()
        if not sampling.accepts(p / q):
            rest = (wanted[place] - proposed[place]).clamp_min(0)
            total = rest.sum()
            # By rounding nothing may be left of two equal distributions.
            return [*tokens, int(sampling.draw(rest / total if total > 0 else wanted[place]))]
        tokens.append(token)
    return [*tokens, int(sampling.draw(wanted[len(drafted)]))]


@torch.inference_mode()
def speculative_generate(
    drafter: Drafter,
    target: Any,
    input_ids: Sequence[int],
    max_new_tokens: int,
    stop_ids: set[int],
    sampling: Sampling = GREEDY,
) -> Generation:
    """Up to max_new_tokens tokens of the target's text, ending with the first stop token, drafted in blocks.

    A step knows the tokens up to `start` and the target's states strictly below it. The drafter fills the block
    [known token, mask, …] at positions start, start + 1, …; the target reads the block at once, and its own
    choices decide how many of the drafted tokens hold. Blocks shrink where fewer tokens are left to write.
    """
    embedding, head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    own_type = drafter.own_type(embedding.device)
    end = len(input_ids) + max_new_tokens
    reader = Reader(target, drafter.config.target_layer_ids)
    logits, states = reader.read(input_ids, logits_to_keep=1)
    tokens = [*input_ids, int(sampling.draw(sampling.probabilities(logits[-1])))]
    context: list[Remembered] = []
    lengths: list[int] = []
    offered: list[int] = []
    accepted: list[int] = []
    while len(tokens) < end and tokens[-1] not in stop_ids:
        start = len(tokens) - 1
        context = _longer(context, drafter.remember(states[None].to(own_type), start - len(states)))
        positions = torch.arange(start, min(start + drafter.config.block_size, end), device=embedding.device)
        block = torch.full_like(positions, drafter.config.mask_token_id)
        block[0] = tokens[-1]
        hidden = drafter(drafter.embed(block[None], embedding).to(own_type), positions[None], context)
        proposed: list[Tensor] = []  # by which the tokens are drawn, one position after another or all at once

        def choose(logits: Tensor, proposed: list[Tensor] = proposed) -> Tensor:
            probabilities = sampling.probabilities(logits)
            proposed.append(probabilities.view(-1, probabilities.shape[-1]))
            return sampling.draw(probabilities)

        drafted: list[int] = []
        if len(positions) > 1:
            drafted = drafter.draft(hidden[0, 1:], tokens[-1], head, choose).tolist()
        logits, states = reader.read([tokens[-1], *drafted])
        wanted = sampling.probabilities(logits)
        given = verify(drafted, torch.cat(proposed) if drafted else wanted[:0], wanted, sampling)
        new = until_stop(given, stop_ids)[: end - len(tokens)]
        reader.keep(len(new))
        states = states[: len(new)]
        tokens += new
        lengths.append(len(new))
        offered.append(len(drafted))
        accepted.append(len(given) - 1)
    return Generation(tokens[len(input_ids) :], lengths, offered, accepted)


def _longer(context: list[Remembered], more: list[Remembered]) -> list[Remembered]:
    if not context:
        return more
    return [
        (torch.cat((k, new_k), dim=2), torch.cat((v, new_v), dim=2))
        for (k, v), (new_k, new_v) in zip(context, more, strict=True)
    ]


class Reader:
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
        self._kept = True

    def read(self, tokens: Sequence[int], logits_to_keep: int = 0) -> tuple[Tensor, Tensor]:
        """Logits [S, V] (the last `logits_to_keep`, 0: all) and tapped states [S, n·H] of the next S tokens."""
        if not self._kept:
            self.keep(len(self._block))
        if self._recurrent:
            self._before = copy.deepcopy(self._cache)
        self._block, self._kept = tokens, False
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
        self._kept = True
        if not self._recurrent:
            self._cache.crop(count - len(self._block))  # by nothing too: sliding windows forget then
        elif count < len(self._block):
            self._cache = self._before
            self.read(self._block[:count])
