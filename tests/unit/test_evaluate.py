"""Speculative decoding: the target's own text, whatever the drafter; and its measure."""

import argparse
import json
from pathlib import Path

import pytest
import torch
from dflash_trainer import evaluate
from dflash_trainer.drafter import Drafter, save_drafter
from dflash_trainer.errors import CannotStart
from dflash_trainer.evaluate import Generation, find_differences, score, speculative_generate
from dflash_trainer.prepare import generate
from dflash_trainer.target import load_causal_lm
from drafting import (
    CPU,
    END_TOKEN,
    PROMPTS,
    add_tokenizer,
    drafter_config,
    one_thread,  # noqa: F401
    trained_drafter,
    wandering_target,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_tokenizer(wandering_target(tmp_path_factory.mktemp("evaluate") / "target", "llama"))


@pytest.fixture(scope="module")
def drafter(target_dir: Path) -> Drafter:
    return trained_drafter(target_dir, drafter_config(), PROMPTS, steps=40)


@pytest.fixture
def drafter_dir(drafter: Drafter, tmp_path: Path) -> Path:
    save_drafter(drafter.state_dict(), drafter.config, tmp_path / "drafter", torch.float32)
    return tmp_path / "drafter"


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


def test_scores_are_means_over_steps_and_over_steps_that_offered_a_position() -> None:
    first = Generation([7] * 6, acceptance_lengths=[3, 2], offered=[3, 1], accepted=[2, 1])
    second = Generation([7] * 2, acceptance_lengths=[1], offered=[3], accepted=[0])
    found = score([first, second], seconds=2.0)
    assert found.acceptance_length == pytest.approx(2.0)
    assert found.accepted_by_position == pytest.approx([2 / 3, 1 / 2, 0.0])
    assert found.tokens_per_s == pytest.approx(4.0)


def test_another_text_is_found_and_told_from_a_tie(target_dir: Path) -> None:
    target = load_causal_lm(target_dir, CPU, torch.float32)
    own = generate(target, [PROMPTS[0]], 10, 0.0)[0]
    wrong = [*own[:4], (own[4] + 1) % 60, *own[5:]]
    generations = [Generation(own, [], [], []), Generation(wrong, [], [], [])]
    (difference,) = find_differences(target, [PROMPTS[0]] * 2, [own, own], generations)
    assert (difference.prompt, difference.position) == (1, 4)
    assert (difference.alone, difference.speculative) == (own[4], wrong[4])
    assert difference.gap > 100 * difference.rounding
    head = target.lm_head.weight.data
    head[wrong[4]] = head[own[4]]  # now both tokens are equally likely
    (difference,) = find_differences(target, [PROMPTS[0]], [own], [Generation(wrong, [], [], [])])
    assert difference.gap <= difference.rounding


def command(drafter: Path, target: Path, tmp_path: Path, *more: str) -> argparse.Namespace:
    (tmp_path / "held.jsonl").write_text('{"prompt": "w5 w9"}\n{"prompt": "w33"}\n{"prompt": "w12 w12"}\n')
    parser = argparse.ArgumentParser()
    evaluate.add_arguments(parser)
    words = [str(drafter), "--target-model", str(target), "--prompts", str(tmp_path / "held.jsonl")]
    return parser.parse_args([*words, "--max-new-tokens", "20", *more])


def test_the_table_names_what_it_measures(
    target_dir: Path, drafter_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate.run(command(drafter_dir, target_dir, tmp_path, "--untrained", "--limit", "2")) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[0].split() == ["drafter", "untrained"]
    assert "accepted at block position 5" in text
    assert "accepted at block position 6" not in text
    assert "text identical to the target's own: 2 of 2" in text


def test_json_holds_the_same(
    target_dir: Path, drafter_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate.run(command(drafter_dir, target_dir, tmp_path, "--json")) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["prompts"] == values["identical"] == 3
    assert 1 <= values["drafter"]["acceptance_length"] <= 6
    assert len(values["drafter"]["accepted_by_position"]) == 5
    assert "untrained" not in values


def test_a_text_that_is_not_the_targets_own_fails(
    target_dir: Path,
    drafter_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def keep_everything(self: evaluate._Reader, count: int) -> None:
        """A cache that is not cut back, as after a fault in it."""

    monkeypatch.setattr(evaluate._Reader, "keep", keep_everything)
    assert evaluate.run(command(drafter_dir, target_dir, tmp_path)) == 1
    assert "not a tie: the verification is wrong" in capsys.readouterr().out


def test_a_drafter_of_another_target_is_refused(drafter_dir: Path, tmp_path: Path) -> None:
    from conftest import make_target

    other = add_tokenizer(make_target(tmp_path / "other"))
    with pytest.raises(CannotStart, match=r"num_target_layers 6, but .* has 4"):
        evaluate.run(command(drafter_dir, other, tmp_path))
