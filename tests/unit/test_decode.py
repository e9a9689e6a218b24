"""Speculative decoding: the target's own text or distribution, whatever the drafter."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dflash_trainer import decode
from dflash_trainer.completions import generate
from dflash_trainer.decode import Reader, Sampling, speculative_generate, verify
from dflash_trainer.drafter import Drafter
from dflash_trainer.evaluate import score
from dflash_trainer.loader import Batch
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
FAMILIES = ["llama", "qwen3", "qwen3_5_text", "mistral"]


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wandering_target(tmp_path_factory.mktemp("decode") / "target", "llama")


@pytest.fixture(scope="module")
def drafter(target_dir: Path) -> Drafter:
    return trained_drafter(target_dir, drafter_config(), PROMPTS, steps=40)


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "qwen3_5_text", "mistral"])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_the_text_is_the_targets_own_with_any_drafter(model_type: str, block_size: int, tmp_path: Path) -> None:
    target = load_causal_lm(wandering_target(tmp_path / "t", model_type), CPU, torch.float32)
    drafter = Drafter(drafter_config(block_size=block_size))
    drafter.reset_parameters(0)
    for prompt in PROMPTS[:3]:
        for new_tokens in (1, 2, 25):
            out = speculative_generate(drafter, target, prompt, new_tokens, {END_TOKEN})
            assert out.output_ids == generate(target, [prompt], new_tokens, 0.0)[0]
            assert 1 + sum(out.acceptance_lengths) == len(out.output_ids)
            assert all(1 <= length <= block_size for length in out.acceptance_lengths)


def test_what_a_trained_drafter_guesses_right_saves_steps(target_dir: Path, drafter: Drafter) -> None:
    target = load_causal_lm(target_dir, CPU, torch.float32)
    fresh = Drafter(drafter.config)
    fresh.reset_parameters(0)
    steps = {}
    for name, model in (("trained", drafter), ("fresh", fresh)):
        runs = [speculative_generate(model, target, prompt, 60, {END_TOKEN}) for prompt in PROMPTS]
        for run, prompt in zip(runs, PROMPTS, strict=True):
            assert run.output_ids == generate(target, [prompt], 60, 0.0)[0]
        steps[name] = sum(len(run.acceptance_lengths) for run in runs)
    assert steps["trained"] < 0.7 * steps["fresh"]


def test_tokens_behind_a_stop_token_do_not_count(target_dir: Path, drafter: Drafter) -> None:
    target = load_causal_lm(target_dir, CPU, torch.float32)
    free = speculative_generate(drafter, target, PROMPTS[0], 60, set())
    ends = [sum(free.acceptance_lengths[: i + 1]) for i in range(len(free.acceptance_lengths))]
    step = next(i for i, n in enumerate(free.acceptance_lengths) if n == drafter.config.block_size)
    new_in_step = free.output_ids[ends[step] - free.acceptance_lengths[step] + 1 : ends[step] + 1]
    stop = new_in_step[0]
    first = free.output_ids.index(stop)
    stopped = speculative_generate(drafter, target, PROMPTS[0], 60, {stop})
    assert stopped.output_ids == free.output_ids[: first + 1]
    assert 1 + sum(stopped.acceptance_lengths) == first + 1


@pytest.mark.parametrize("model_type", FAMILIES)
def test_what_the_target_read_of_a_refused_block_is_forgotten(model_type: str, tmp_path: Path) -> None:
    target = load_causal_lm(wandering_target(tmp_path / "t", model_type), CPU, torch.float32)
    prompt, block, after = list(range(20, 40)), [7, 8, 9, 10, 11], [12, 13, 14]
    with torch.inference_mode():
        for kept in range(1, 6):
            reader, fresh = Reader(target, (1, 3)), Reader(target, (1, 3))
            for tokens in (prompt, block):
                reader.read(tokens)
            reader.keep(kept)
            fresh.read([*prompt, *block[:kept]])
            for ours, theirs in zip(reader.read(after), fresh.read(after), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_drafter_trained_one_position_off_learns_as_well_and_accepts_nothing(target_dir: Path) -> None:
    target = load_causal_lm(target_dir, CPU, torch.float32)

    def one_off(batch: Batch) -> Batch:
        """The label of each position is the token after the right one."""
        rows = batch.trained // batch.block_ids.shape[1]
        wanted = (batch.positions.flatten()[batch.trained] + 1).clamp(max=batch.input_ids.shape[1] - 1)
        return replace(batch, labels=batch.input_ids[rows, wanted])

    found = {}
    changing = PROMPTS[4]  # the text after it seldom repeats a token
    for name, spoil in (("right", lambda batch: batch), ("off", one_off)):
        trained = trained_drafter(target_dir, drafter_config(), [changing], steps=150, spoil=spoil)
        run = speculative_generate(trained, target, changing, 60, {END_TOKEN})
        found[name] = score([run], 1.0).acceptance_length
    assert found["right"] > 3
    assert found["off"] < 1.5


def strangeness(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """How many standard deviations χ² is above its mean, with what is rare put together."""
    rare = expected < 5
    seen = torch.cat((counts[~rare], counts[rare].sum()[None])).double()
    wanted = torch.cat((expected[~rare], expected[rare].sum()[None])).double().clamp_min(1e-9)
    freedom = max(1, len(seen) - 2)
    return float(((seen - wanted).square() / wanted).sum() - freedom) / (2 * freedom) ** 0.5


def takes_all(drafted: list[int], _: torch.Tensor, wanted: torch.Tensor, sampling: Sampling) -> list[int]:
    return [*drafted, int(sampling.draw(wanted[len(drafted)]))]


def takes_what_the_target_finds_likelier(
    drafted: list[int], proposed: torch.Tensor, wanted: torch.Tensor, sampling: Sampling
) -> list[int]:
    for place, token in enumerate(drafted):
        if wanted[place, token] < proposed[place, token]:
            return [*drafted[:place], int(sampling.draw((wanted[place] - proposed[place]).clamp_min(0)))]
    return takes_all(drafted, proposed, wanted, sampling)


def draws_anew_without_the_rest(
    drafted: list[int], proposed: torch.Tensor, wanted: torch.Tensor, sampling: Sampling
) -> list[int]:
    given = verify(drafted, proposed, wanted, sampling)
    if len(given) <= len(drafted):
        given[-1] = int(sampling.draw(wanted[len(given) - 1]))
    return given


def draws_anew_at_another_place(
    drafted: list[int], proposed: torch.Tensor, wanted: torch.Tensor, sampling: Sampling
) -> list[int]:
    given = verify(drafted, proposed, wanted, sampling)
    if len(given) <= len(drafted):
        given[-1] = int(sampling.draw(wanted[len(given)]))
    return given


WRONG = [takes_all, takes_what_the_target_finds_likelier, draws_anew_without_the_rest, draws_anew_at_another_place]


@pytest.mark.parametrize("rule", [verify, *WRONG])
def test_tokens_are_drawn_by_the_targets_probabilities_whatever_the_drafters(
    rule: Callable[..., list[int]],
) -> None:
    torch.manual_seed(0)
    sampling = Sampling(1.0, torch.Generator().manual_seed(1))
    wanted, proposed = torch.randn(4, 7).mul(1.5).softmax(-1), torch.randn(3, 7).softmax(-1)
    counts = torch.zeros(4, 7)
    for _ in range(6000):
        drafted = sampling.draw(proposed).tolist()
        for place, token in enumerate(rule(drafted, proposed, wanted, sampling)):
            counts[place, token] += 1
    worst = max(strangeness(seen, seen.sum() * p) for seen, p in zip(counts, wanted, strict=True))
    assert worst < 5 if rule is verify else worst > 10, worst


def test_rounding_cannot_leave_nothing_to_draw_from() -> None:
    wanted = torch.tensor([[0.5, 0.5], [1.0, 0.0]])
    proposed = torch.tensor([[0.5 + 1e-7, 0.5]])
    never = Sampling(1.0, torch.Generator().manual_seed(0))
    assert all(
        verify([0], proposed, wanted, never)[0] in (0, 1) and verify([0], wanted[:1], wanted, never) == [0, 0]
        for _ in range(50)
    )


@pytest.mark.parametrize(("second", "rule"), [(False, verify), (True, verify), (False, takes_all)])
def test_a_temperature_gives_samples_of_the_targets_own_distribution(
    second: bool, rule: Callable[..., list[int]], target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "verify", rule)
    target = load_causal_lm(target_dir, CPU, torch.float32)
    parts = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5}
    config = replace(drafter_config(), block_size=3, **parts if second else {})
    drafter = trained_drafter(target_dir, config, PROMPTS, steps=40)
    temperature, prompt, runs = 1.6, PROMPTS[1], 900
    with torch.no_grad():
        first = target(torch.tensor([prompt])).logits[0, -1].div(temperature).softmax(-1)
        ids = torch.tensor([[*prompt, token] for token in range(len(first))])
        then = target(ids).logits[:, -1].div(temperature).softmax(-1)
        pairs = torch.tensor([[*prompt, a, b] for a in range(len(first)) for b in range(len(first))])
        last = target(pairs).logits[:, -1].div(temperature).softmax(-1).view(len(first), len(first), -1)
    joint = first[:, None] * then
    expected = [first, joint.sum(0), (joint[..., None] * last).sum((0, 1))]
    counts = torch.zeros(3, len(first))
    sampling = Sampling(temperature, torch.Generator().manual_seed(5))
    accepted = 0
    for _ in range(runs):
        out = speculative_generate(drafter, target, prompt, 3, set(), sampling)
        accepted += sum(out.accepted)
        for place, token in enumerate(out.output_ids):
            counts[place, token] += 1
    if rule is verify:
        assert 0.1 * runs < accepted < 1.8 * runs, "always or never accepted: this proves nothing"
    worst = max(strangeness(seen, runs * p) for seen, p in zip(counts, expected, strict=True))
    assert worst < 5 if rule is verify else worst > 10, worst
