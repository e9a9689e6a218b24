"""Our drafter in the published dflash package: the same hidden states, the same acceptance lengths."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_trainer.chats import load_tokenizer, read_prompts
from dflash_trainer.completions import generate, stop_ids, until_stop
from dflash_trainer.decode import speculative_generate
from dflash_trainer.drafter import Drafter, load_drafter, save_drafter
from dflash_trainer.target import load_causal_lm
from drafting import (
    CPU,
    END_TOKEN,
    PROMPTS,
    drafter_config,
    one_thread,  # noqa: F401
    trained_drafter,
    wandering_target,
)

pytestmark = pytest.mark.usefixtures("one_thread")
published = pytest.importorskip("dflash.model")

NEW_TOKENS = 48
ROOT = Path(__file__).parents[2]
DEMO = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dflash/demo"


@dataclass
class Pair:
    """A target, and one checkpoint of a drafter for it, read by us and by the published package."""

    target: Any
    ours: Drafter
    theirs: Any

    @property
    def comparable(self) -> bool:
        """Whether the package writes this target's text: transformers 5.15 takes no recurrent state back."""
        return "linear_attention" not in (getattr(self.target.config, "layer_types", None) or ())

    def published_run(self, prompt: Sequence[int], new_tokens: int, stops: set[int]) -> tuple[list[int], list[int]]:
        """New tokens and acceptance lengths of the package's own generation."""
        ids = torch.tensor([prompt])
        out = published.dflash_generate(self.theirs, self.target, ids, new_tokens, sorted(stops), return_stats=True)
        return out.output_ids[0, len(prompt) :].tolist(), out.acceptance_lengths


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)  # the package calls it for its timing


def make_pair(target_dir: Path, drafter: Drafter, directory: Path) -> Pair:
    save_drafter(drafter.state_dict(), drafter.config, directory, torch.float32)
    kind = published.DFlash2DraftModel if drafter.config.conv_kernel_size else published.DFlashDraftModel
    theirs, info = kind.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    return Pair(load_causal_lm(target_dir, CPU, torch.float32), load_drafter(directory).eval(), theirs.eval())


@pytest.fixture(scope="module", params=["llama", "qwen3", "qwen3_5_text"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    root = tmp_path_factory.mktemp(request.param)
    target_dir = wandering_target(root / "target", request.param)
    drafter = trained_drafter(target_dir, drafter_config(), PROMPTS, steps=60)
    return make_pair(target_dir, drafter, root / "drafter")


SECOND = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5}
VARIANTS: dict[str, dict[str, Any]] = {
    "sliding": {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 9},
    "sliding, not causal": {
        "layer_types": ("sliding_attention", "full_attention"),
        "sliding_window": 4,
        "is_causal": False,
    },
    "causal": {"is_causal": True},
    "scaled and capped": {
        "input_embedding_scale": 5.5,
        "output_multiplier": 0.5,
        "final_logit_softcapping": 3.0,
    },
    "second": SECOND,
    "second, sliding, capped": SECOND
    | {
        "layer_types": ("full_attention", "sliding_attention"),
        "sliding_window": 7,
        "final_logit_softcapping": 4.0,
    },
}


@pytest.fixture(scope="module")
def plain_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wandering_target(tmp_path_factory.mktemp("variants") / "target", "qwen3")


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest, plain_target: Path, tmp_path: Path) -> Pair:
    """A drafter of every kind that the package knows, with weights of all its parts that do something."""
    drafter = Drafter(replace(drafter_config(), **VARIANTS[request.param]))
    drafter.reset_parameters(3)
    for name, parameter in drafter.named_parameters():
        if parameter.dim() > 1:
            parameter.data += torch.randn_like(parameter) * (0.5 if "codebook" in name else 0.1)
    return make_pair(plain_target, drafter, tmp_path / "drafter")


@torch.no_grad()
def check_a_block_in_the_middle(pair: Pair) -> None:
    size, anchor = pair.ours.config.block_size, 11
    context, block = tapped(pair, torch.randint(3, 60, (1, 30))), noise(pair, [17])
    ours = pair.ours(block, torch.arange(anchor, anchor + size)[None], context[:, :anchor])
    theirs = pair.theirs(
        target_hidden=context[:, :anchor],
        noise_embedding=block,
        position_ids=torch.arange(anchor + size)[None],
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    head = pair.target.get_output_embeddings()
    torch.testing.assert_close(
        pair.ours.logits(ours, head.weight), pair.theirs.compute_logits(theirs, head), rtol=1e-5, atol=1e-5
    )


@torch.no_grad()
def check_blocks_together(pair: Pair) -> None:
    size = pair.ours.config.block_size
    ids = torch.randint(3, 60, (2, 30))
    anchors = torch.tensor([[4, 7, 20], [29, 5, 6]])  # overlapping blocks, unsorted, and one beyond the end
    context = tapped(pair, ids)
    blocks = torch.cat([noise(pair, ids[row, anchors[row]].tolist()) for row in range(2)])
    positions = (anchors[:, :, None] + torch.arange(size)).flatten(1)
    ours = pair.ours(blocks, positions, context, pair.ours.masks(anchors, 30))
    for row in range(2):
        for i, anchor in enumerate(anchors[row].tolist()):
            own = slice(i * size, (i + 1) * size)
            theirs = pair.theirs(
                target_hidden=context[row : row + 1, :anchor],
                noise_embedding=blocks[row : row + 1, own],
                position_ids=torch.arange(anchor + size)[None],
            )
            torch.testing.assert_close(ours[row, own], theirs[0], rtol=1e-5, atol=1e-5)


def test_a_block_in_the_middle_of_a_sequence_has_the_same_hidden_states(pair: Pair) -> None:
    check_a_block_in_the_middle(pair)


def test_so_it_has_whatever_the_drafters_layers_see_and_hold(variant: Pair) -> None:
    check_a_block_in_the_middle(variant)


def test_blocks_trained_together_have_the_hidden_states_of_each_block_served_alone(pair: Pair) -> None:
    check_blocks_together(pair)


def test_so_they_have_whatever_the_drafters_layers_see_and_hold(variant: Pair) -> None:
    check_blocks_together(variant)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_trained_drafter_of_every_kind_has_the_acceptance_lengths_of_the_package(
    name: str, plain_target: Path, tmp_path: Path
) -> None:
    config = replace(drafter_config(), **VARIANTS[name])
    pair = make_pair(plain_target, trained_drafter(plain_target, config, PROMPTS, steps=40), tmp_path / "drafter")
    seen = set()
    for prompt in PROMPTS:
        ours = speculative_generate(pair.ours, pair.target, prompt, 30, {END_TOKEN})
        assert (ours.output_ids, ours.acceptance_lengths) == pair.published_run(prompt, 30, {END_TOKEN})
        seen.update(ours.acceptance_lengths)
    assert len(seen) > 2, "the drafter is always right or always wrong: this proves nothing"


@torch.no_grad()
def test_the_selector_walks_the_same_path(plain_target: Path, tmp_path: Path) -> None:
    drafter = Drafter(replace(drafter_config(), **SECOND))
    drafter.reset_parameters(3)
    selector = drafter.candidate_selector
    assert selector is not None
    for parameter in selector.parameters():
        parameter.data.normal_()
    pair = make_pair(plain_target, drafter, tmp_path / "drafter")
    head = pair.target.get_output_embeddings()
    changed = 0
    for anchor in range(20):
        hidden = torch.randn(1, 5, 32)
        theirs, _, _ = pair.theirs.propose(hidden, torch.tensor([anchor]), head, 0.0)
        ours = pair.ours.draft(hidden[0], anchor, head.weight, lambda logits: logits.argmax(-1))
        assert ours.tolist() == theirs[0].tolist()
        changed += ours.tolist() != pair.ours.logits(hidden[0], head.weight).argmax(-1).tolist()
    assert changed > 5, "the selector never chose another token: this proves nothing"


def test_the_acceptance_lengths_are_those_of_the_package(pair: Pair) -> None:
    seen = set()
    for prompt in PROMPTS:
        ours = speculative_generate(pair.ours, pair.target, prompt, NEW_TOKENS, {END_TOKEN})
        assert ours.output_ids == generate(pair.target, [prompt], NEW_TOKENS, 0.0)[0]
        assert ours.acceptance_lengths == without_caches(pair, prompt, NEW_TOKENS, {END_TOKEN})
        if pair.comparable:
            assert (ours.output_ids, ours.acceptance_lengths) == pair.published_run(prompt, NEW_TOKENS, {END_TOKEN})
        seen.update(ours.acceptance_lengths)
    assert len(seen) > 3, "the drafter is always right or always wrong: this proves nothing"


@pytest.mark.parametrize("new_tokens", [1, 2, 3, 6, 7, 20])
def test_at_the_end_and_at_a_stop_token_too(pair: Pair, new_tokens: int) -> None:
    for prompt in PROMPTS[:3]:
        whole = generate(pair.target, [prompt], 20, 0.0)[0]
        for stop in (END_TOKEN, whole[0], whole[6], whole[-1]):
            stops = {END_TOKEN, stop}
            ours = speculative_generate(pair.ours, pair.target, prompt, new_tokens, stops)
            assert ours.output_ids == until_stop(whole[:new_tokens], stops)
            assert ours.acceptance_lengths == without_caches(pair, prompt, new_tokens, stops)
            if pair.comparable:
                assert (ours.output_ids, ours.acceptance_lengths) == pair.published_run(prompt, new_tokens, stops)


@pytest.mark.skipif(not (DEMO / "output/drafter").exists(), reason="packaging/demo has left no drafter here")
def test_so_it_is_with_the_demos_drafter_and_target(tmp_path: Path) -> None:
    target_dir = DEMO / "SmolLM2-135M-Instruct"
    pair = make_pair(target_dir, load_drafter(DEMO / "output/drafter"), tmp_path / "drafter")
    stops = stop_ids(pair.target)
    for prompt in read_prompts(ROOT / "packaging/demo-data/heldout.jsonl", load_tokenizer(target_dir), 2):
        ours = speculative_generate(pair.ours, pair.target, prompt.ids, 24, stops)
        assert ours.output_ids == generate(pair.target, [prompt.ids], 24, 0.0)[0]
        assert (ours.output_ids, ours.acceptance_lengths) == pair.published_run(prompt.ids, 24, stops)


def tapped(pair: Pair, ids: torch.Tensor) -> torch.Tensor:
    """The target's states that the drafter sees, by the package's own function."""
    states = pair.target(ids, output_hidden_states=True).hidden_states
    context: torch.Tensor = published.extract_context_feature(states, pair.theirs.target_layer_ids)
    return context


def noise(pair: Pair, anchors: Sequence[int]) -> torch.Tensor:
    """Embeddings [1, N·S, H] of the blocks that begin with these tokens."""
    masks = [pair.ours.config.mask_token_id] * (pair.ours.config.block_size - 1)
    ids = torch.tensor([[token for anchor in anchors for token in (anchor, *masks)]])
    return pair.ours.embed(ids, pair.target.get_input_embeddings().weight)


@torch.no_grad()
def without_caches(pair: Pair, prompt: Sequence[int], new_tokens: int, stops: set[int]) -> list[int]:
    """Acceptance lengths of the package's drafter, everything computed anew at each step."""
    end = len(prompt) + new_tokens
    tokens = [*prompt, int(pair.target(torch.tensor([prompt])).logits[0, -1].argmax())]
    lengths = []
    while len(tokens) < end and tokens[-1] not in stops:
        known = len(tokens) - 1
        size = min(pair.ours.config.block_size, end - known)
        hidden = pair.theirs(
            target_hidden=tapped(pair, torch.tensor([tokens[:known]])),
            noise_embedding=noise(pair, tokens[known:])[:, :size],
            position_ids=torch.arange(known + size)[None],
        )
        drafted = pair.target.lm_head(hidden[0, 1:]).argmax(-1).tolist()
        choices = pair.target(torch.tensor([tokens + drafted])).logits[0, known:].argmax(-1).tolist()
        right = 0
        while right < len(drafted) and drafted[right] == choices[right]:
            right += 1
        new = until_stop(choices[: right + 1], stops)[: end - len(tokens)]
        lengths.append(len(new))
        tokens += new
    return lengths
