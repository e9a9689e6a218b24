"""Speculative decoding: the target's own text, whatever the drafter; and its measure."""

import argparse
import json
from pathlib import Path

import pytest
import torch
from dflash_trainer import decode, evaluate
from dflash_trainer.completions import generate
from dflash_trainer.decode import Generation
from dflash_trainer.drafter import Drafter, save_drafter
from dflash_trainer.errors import CannotStart
from dflash_trainer.evaluate import find_differences, score
from dflash_trainer.target import load_causal_lm
from drafting import (
    CPU,
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


def test_scores_are_means_over_steps_and_over_steps_that_offered_a_position() -> None:
    first = Generation([7] * 6, acceptance_lengths=[3, 2], offered=[3, 1], accepted=[2, 1])
    second = Generation([7] * 2, acceptance_lengths=[1], offered=[3], accepted=[0])
    found = score([first, second], seconds=2.0)
    assert found.acceptance_length == pytest.approx(2.0)
    assert found.interval == pytest.approx((1.0, 2.5))
    assert score([first] * 50, 1.0).interval == pytest.approx((2.5, 2.5))
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
    assert "of story" not in text  # there is one kind


def test_kinds_of_prompts_have_rows_of_their_own_and_a_temperature_needs_no_comparison(
    target_dir: Path, drafter_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = command(drafter_dir, target_dir, tmp_path, "--temperature", "0.8", "--seed", "3")
    kinds = [{"kind": kind, "prompt": f"w{i} w9"} for i, kind in enumerate(("story", "code", "story"))]
    (tmp_path / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kinds))
    assert evaluate.run(words) == 0
    text = capsys.readouterr().out
    assert "of story (2)" in text
    assert "of code (1)" in text
    assert "a sample of the target's own distribution" in text
    words.json = True
    tries = []
    for seed in (3, 3, 4):
        words.seed = seed
        assert evaluate.run(words) == 0
        values = json.loads(capsys.readouterr().out)
        assert "identical" not in values
        tries.append((values["drafter"]["accepted_by_position"], values["kinds"]["story"]["acceptance_length"]))
    assert tries[0] == tries[1] != tries[2]


def test_the_drafter_of_a_checkpoint_or_of_an_output_is_found(drafter_dir: Path, tmp_path: Path) -> None:
    assert evaluate.find_drafter(drafter_dir) == drafter_dir
    assert evaluate.find_drafter(drafter_dir.parent) == drafter_dir
    with pytest.raises(CannotStart, match="is not a drafter"):
        evaluate.run(command(tmp_path / "nothing", tmp_path, tmp_path))


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
    def keep_everything(self: decode.Reader, count: int) -> None:
        """A cache that is not cut back, as after a fault in it."""

    monkeypatch.setattr(decode.Reader, "keep", keep_everything)
    assert evaluate.run(command(drafter_dir, target_dir, tmp_path)) == 1
    assert "not a tie: the verification is wrong" in capsys.readouterr().out


def test_a_drafter_of_another_target_is_refused(drafter_dir: Path, tmp_path: Path) -> None:
    from conftest import make_target

    other = add_tokenizer(make_target(tmp_path / "other"))
    with pytest.raises(CannotStart, match=r"num_target_layers 6, but .* has 4"):
        evaluate.run(command(drafter_dir, other, tmp_path))
