"""Data preparation: what the target writes, nothing lost by a stop, bad prompts named."""

import argparse
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import load_store
from dflash_agent.runfile import from_flags
from dflash_trainer import prepare
from dflash_trainer.chats import load_tokenizer, read_chats, read_prompts
from dflash_trainer.errors import CannotStart, TryAgain
from dflash_trainer.inputs import check
from dflash_trainer.target import load_causal_lm
from drafting import (
    CPU,
    END_TOKEN,
    VOCABULARY,
    add_tokenizer,
    one_thread,  # noqa: F401
    wandering_target,
)

pytestmark = pytest.mark.usefixtures("one_thread")

USER, ASSISTANT = 60, 61


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_tokenizer(wandering_target(tmp_path_factory.mktemp("prepare") / "target", "llama"))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Twenty prompts of one to seven words, the longest not last."""
    path = tmp_path / "prompts.jsonl"
    texts = [" ".join(f"w{3 + (i * 7 + j * 5) % 50}" for j in range(1 + i * 3 % 7)) for i in range(20)]
    path.write_text("".join(json.dumps({"kind": f"k{i % 3}", "prompt": t}) + "\n" for i, t in enumerate(texts)))
    return path


def flags(target: Path, prompts: Path, output: Path, **changes: object) -> list[str]:
    values: dict[str, object] = {"max-new-tokens": 12, "batch-size": 4}
    values |= {name.replace("_", "-"): value for name, value in changes.items()}
    values |= {"target-model": target, "prompts": prompts, "output-dir": output}
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


def run(*arguments: Any, **changes: object) -> int:
    parser = argparse.ArgumentParser()
    prepare.add_arguments(parser)
    return prepare.run(parser.parse_args(flags(*arguments, **changes)))


def rows(output: Path) -> list[tuple[list[int], list[int]]]:
    from datasets import load_from_disk

    data = load_from_disk(output / "dataset")
    return list(zip(data["input_ids"], data["loss_mask"], strict=True))


@torch.no_grad()
def greedy(target: Any, prompt: list[int], new_tokens: int) -> list[int]:
    """The plainest way: no cache, no batch, no padding."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + new_tokens:
        tokens.append(int(target(torch.tensor([tokens])).logits[0, -1].argmax()))
        if tokens[-1] == END_TOKEN:
            break
    return tokens[len(prompt) :]


@pytest.mark.parametrize("model_type", ["llama", "qwen3_5_text"])
def test_rows_are_the_prompts_and_what_the_target_writes_after_each(
    model_type: str, prompts: Path, tmp_path: Path
) -> None:
    target_dir = add_tokenizer(wandering_target(tmp_path / "target", model_type))
    assert run(target_dir, prompts, tmp_path / "out") == 0
    target = load_causal_lm(target_dir, CPU, torch.float32)
    texts = [json.loads(line)["prompt"] for line in prompts.read_text().splitlines()]
    found = rows(tmp_path / "out")
    assert len(found) == len(texts)
    for (ids, mask), text in zip(found, texts, strict=True):
        prompt = [USER, *(int(word[1:]) for word in text.split()), END_TOKEN, ASSISTANT]
        answer = greedy(target, prompt, 12)
        assert ids == prompt + answer
        assert mask == [0] * len(prompt) + [1] * len(answer)


def test_the_dataset_is_what_the_trainer_reads(target_dir: Path, prompts: Path, tmp_path: Path) -> None:
    run(target_dir, prompts, tmp_path / "out")
    store = load_store(tmp_path / "out/dataset", 4096, VOCABULARY)
    card = json.loads((tmp_path / "out/dataset/card.json").read_text())
    assert (card["rows"], card["tokens"]) == (20, len(store.tokens))
    assert card["supervised_tokens"] == store.loss_mask.sum()
    assert card["kinds"] == {"k0": 7, "k1": 7, "k2": 6}
    assert sum(card["lengths"].values()) == 20
    assert card["settings"]["max_new_tokens"] == 12


def test_the_lengths_of_a_card_are_in_ranges_that_double() -> None:
    assert prepare.length_histogram([1, 2, 3, 64, 127, 128]) == {"1-1": 1, "2-3": 2, "64-127": 2, "128-255": 1}


def test_earlier_turns_are_context_and_only_the_new_answer_is_supervised(target_dir: Path, tmp_path: Path) -> None:
    turns = [("user", "w3 w4"), ("assistant", "w5"), ("user", "w6")]
    messages = [{"role": role, "content": content} for role, content in turns]
    chats = tmp_path / "chats.jsonl"
    chats.write_text(json.dumps({"messages": messages}) + "\n")
    run(target_dir, chats, tmp_path / "out")
    ((ids, mask),) = rows(tmp_path / "out")
    before = [USER, 3, 4, END_TOKEN, ASSISTANT, 5, END_TOKEN, USER, 6, END_TOKEN, ASSISTANT]
    assert ids[: len(before)] == before
    assert mask == [0] * len(before) + [1] * (len(ids) - len(before))


def test_an_answer_at_the_end_is_written_anew(target_dir: Path, tmp_path: Path) -> None:
    chat = [{"from": "human", "value": "w3 w4"}, {"from": "gpt", "value": "w50 w50 w50"}]
    for name, turns in (("answered", chat), ("asked", chat[:1])):
        path = tmp_path / f"{name}.jsonl"
        path.write_text(json.dumps({"conversations": turns}) + "\n")
        run(target_dir, path, tmp_path / name)
    assert rows(tmp_path / "answered") == rows(tmp_path / "asked")
    assert rows(tmp_path / "asked")[0][0][:4] == [USER, 3, 4, END_TOKEN]


def test_answers_may_be_kept_as_they_are(target_dir: Path, tmp_path: Path) -> None:
    turns = [("user", "w3 w4"), ("assistant", "w5 w6"), ("user", "w7"), ("assistant", "w8 w9 w10")]
    chats = tmp_path / "chats.jsonl"
    messages = [{"role": role, "content": content} for role, content in turns]
    chats.write_text(json.dumps({"messages": messages}) + "\n" + json.dumps({"prompt": "w3"}) + "\n")
    run(target_dir, chats, tmp_path / "out", responses="keep")
    first = [USER, 3, 4, END_TOKEN, ASSISTANT, 5, 6, END_TOKEN]
    second = [USER, 7, END_TOKEN, ASSISTANT, 8, 9, 10, END_TOKEN]
    assert rows(tmp_path / "out") == [(first + second, [0] * 5 + [1] * 3 + [0] * 4 + [1] * 4)]
    card = json.loads((tmp_path / "out/dataset/card.json").read_text())
    assert card["left_out"] == {"no answer at the end": 1}
    assert not (tmp_path / "out/completions.jsonl").exists()
    run(target_dir, chats, tmp_path / "cut", responses="keep", max_length=10)
    assert rows(tmp_path / "cut") == [((first + second)[:10], [0] * 5 + [1] * 3 + [0] * 2)]


def test_some_prompts_are_held_out_by_what_they_ask_and_nobody_trains_on_those(
    target_dir: Path, prompts: Path, tmp_path: Path
) -> None:
    lines = prompts.read_text().splitlines()
    asked_again = [json.dumps({"prompt": "  " + json.loads(line)["prompt"].upper()}) for line in lines]
    prompts.write_text("\n".join([*lines, *asked_again]) + "\n")
    split = prepare.split_chats(read_chats(prompts), 0.3, None)
    held = {json.dumps(chat.asked[0]["content"]) for chat in split.held_out}
    assert 0 < len(held) < 15
    assert len(split.chats) + 2 * len(held) == 40
    assert not {chat.key for chat in split.chats} & {chat.key for chat in split.held_out}
    (tmp_path / "more.jsonl").write_text(prompts.read_text() + '{"prompt": "w1 w2 w3 w4 w5"}\n')
    more = prepare.split_chats(read_chats(tmp_path / "more.jsonl"), 0.3, None)
    assert held <= {json.dumps(chat.asked[0]["content"]) for chat in more.held_out}
    prompts.write_text("\n".join(lines) + "\n")
    run(target_dir, prompts, tmp_path / "out", heldout=0.3)
    card = json.loads((tmp_path / "out/dataset/card.json").read_text())
    assert (card["rows"], card["heldout"]) == (20 - len(held), len(held))
    again = read_prompts(tmp_path / "out/heldout.jsonl", load_tokenizer(target_dir))
    assert len(again) == len(held)
    run(target_dir, prompts, tmp_path / "other", without=tmp_path / "out/heldout.jsonl")
    assert rows(tmp_path / "other") == rows(tmp_path / "out")
    card = json.loads((tmp_path / "other/dataset/card.json").read_text())
    assert (card["heldout"], card["repeated"]) == (0, len(held))
    with pytest.raises(CannotStart, match="no prompt is left to train on"):
        run(target_dir, prompts, tmp_path / "none", without=prompts)


def test_a_run_is_refused_data_of_another_tokenizer_and_warned_of_another_template(
    target_dir: Path, prompts: Path, tmp_path: Path
) -> None:
    run(target_dir, prompts, tmp_path / "out")
    other = tmp_path / "other"
    shutil.copytree(target_dir, other)
    values = {
        "target.model": str(other),
        "data.dir": str(tmp_path / "out/dataset"),
        "output.dir": str(tmp_path / "o"),
    }
    training = from_flags("r", values | {"drafter.mask_token_id": 63})

    def findings() -> list[tuple[str, str]]:
        return [(finding.severity, finding.text) for finding in check(training)]

    assert [severity for severity, _ in findings()] == ["ok", "ok"]
    template = (other / "chat_template.jinja").read_text()
    (other / "chat_template.jinja").write_text(template + " ")
    (warning,) = [text for severity, text in findings() if severity == "warn"]
    assert "was made with another chat template than that of" in warning
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    (other / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    (doubt,) = [text for severity, text in findings() if severity == "warn"]
    assert "may hold tokens of another tokenizer" in doubt
    words = tokenizer["model"]["vocab"]
    words["w3"], words["w4"] = words["w4"], words["w3"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    (refusal,) = findings()
    assert refusal[0] == "refuse"
    assert "was made with another tokenizer than that of" in refusal[1]


def test_penalties_of_the_targets_generation_config_do_not_change_its_choice(
    target_dir: Path, prompts: Path, tmp_path: Path
) -> None:
    run(target_dir, prompts, tmp_path / "plain")
    other = add_tokenizer(wandering_target(tmp_path / "target", "llama"))
    config = json.loads((other / "generation_config.json").read_text())
    config |= {"repetition_penalty": 3.0, "do_sample": True, "no_repeat_ngram_size": 2}
    (other / "generation_config.json").write_text(json.dumps(config))
    run(other, prompts, tmp_path / "out")
    assert rows(tmp_path / "out") == rows(tmp_path / "plain")


def test_sampling_is_repeatable_and_not_greedy(target_dir: Path, prompts: Path, tmp_path: Path) -> None:
    for name, temperature in (("greedy", 0.0), ("first", 2.0), ("second", 2.0)):
        run(target_dir, prompts, tmp_path / name, temperature=temperature)
    assert rows(tmp_path / "first") == rows(tmp_path / "second")
    assert rows(tmp_path / "first") != rows(tmp_path / "greedy")


def test_no_row_is_longer_than_max_length(
    target_dir: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(target_dir, prompts, tmp_path / "all")
    run(target_dir, prompts, tmp_path / "out", max_length=9)
    fitting = [(ids[:9], mask[:9]) for ids, mask in rows(tmp_path / "all") if mask.index(1) < 9]
    assert rows(tmp_path / "out") == fitting
    assert f"{20 - len(fitting)} prompts skipped: 9 tokens or longer" in capsys.readouterr().err


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_stopped_preparation_goes_on_and_ends_with_the_same_dataset(
    target_dir: Path, tmp_path: Path, temperature: float
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"w{3 + i % 50} w{3 + i // 50}"}) + "\n" for i in range(120)))
    output, unbroken = tmp_path / "out", tmp_path / "unbroken"
    words = flags(target_dir, prompts, output, temperature=temperature)
    path = os.pathsep.join(entry for entry in sys.path if entry.endswith(("agent", "trainer")))
    process = subprocess.Popen(
        [sys.executable, "-m", "dflash_trainer", "prepare", *words],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    with process:
        said = next(line for line in process.stderr if " of 120 prompts" in line)
        process.send_signal(signal.SIGTERM)
        said += process.stderr.read()
    assert process.returncode == 130
    assert said.endswith("stopped; the same command goes on from here\n")
    assert not (output / "dataset").exists()
    before = (output / "completions.jsonl").read_bytes()
    assert 4 <= before.count(b"\n") < 120
    assert before.count(b"\n") % 4 == 0
    (output / "completions.jsonl").write_bytes(before[:-3])  # and the last line is torn
    run(target_dir, prompts, output, temperature=temperature)
    run(target_dir, prompts, unbroken, temperature=temperature)
    kept = before[: before[:-1].rfind(b"\n") + 1]
    assert (output / "completions.jsonl").read_bytes().startswith(kept)
    run(target_dir, prompts, output, temperature=temperature)  # finds nothing damaged
    assert rows(output) == rows(unbroken)


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"max_new_tokens": 13}, "max_new_tokens 12, now 13"), ({"limit": 19}, "another prompts")],
)
def test_other_settings_are_refused_by_name(
    target_dir: Path, prompts: Path, tmp_path: Path, change: dict[str, object], reason: str
) -> None:
    run(target_dir, prompts, tmp_path / "out")
    before = sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "out").rglob("*"))
    with pytest.raises(CannotStart) as caught:
        run(target_dir, prompts, tmp_path / "out", **change)
    assert f"was begun with {reason}; restore that" in str(caught.value)
    assert before == sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "out").rglob("*"))


def test_another_target_of_the_same_shape_is_refused(target_dir: Path, prompts: Path, tmp_path: Path) -> None:
    run(target_dir, prompts, tmp_path / "out")
    other = add_tokenizer(wandering_target(tmp_path / "other", "llama"))
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-10] ^= 1
    (other / "model.safetensors").write_bytes(weights)
    with pytest.raises(CannotStart, match=r"begun with another target; restore"):
        run(other, prompts, tmp_path / "out")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "Expecting"),
        ("[]", "neither or both"),
        ('{"text": "w3"}', "neither or both"),
        ('{"prompt": "w3", "messages": []}', "neither or both"),
        ('{"prompt": 3}', "not text"),
        ('{"prompt": "  "}', "the user's, or empty"),
        ('{"messages": []}', "not a list of turns"),
        ('{"messages": ["w3"]}', "not text"),
        ('{"messages": [{"role": "user"}]}', "not text"),
        ('{"messages": [{"role": "system", "content": "w3"}]}', "the user's, or empty"),
        ('{"messages": [{"role": "assistant", "content": "w4"}]}', "the user's, or empty"),
        ('{"conversations": [{"from": "martian", "value": "w4"}]}', "'martian', who is none of human"),
    ],
)
def test_a_bad_line_is_refused_by_file_and_number(line: str, reason: str, target_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "w3"}\n\n' + line + "\n")
    with pytest.raises(CannotStart) as caught:
        run(target_dir, path, tmp_path / "out")
    assert str(caught.value).startswith(f"{path}:3: ")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_no_prompts_no_file_and_no_chat_template_are_refused(
    target_dir: Path, prompts: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(CannotStart, match="holds no prompt"):
        run(target_dir, tmp_path / "empty.jsonl", tmp_path / "out")
    with pytest.raises(CannotStart, match="cannot be read"):
        run(target_dir, tmp_path / "none.jsonl", tmp_path / "out")
    untuned = add_tokenizer(wandering_target(tmp_path / "untuned", "llama"))
    (untuned / "chat_template.jinja").unlink()
    with pytest.raises(CannotStart, match="no chat template"):
        run(untuned, prompts, tmp_path / "out")


def test_another_batch_size_may_go_on(target_dir: Path, prompts: Path, tmp_path: Path) -> None:
    run(target_dir, prompts, tmp_path / "out")
    path, found = tmp_path / "out/completions.jsonl", rows(tmp_path / "out")
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:8]))
    run(target_dir, prompts, tmp_path / "out", batch_size=3)
    assert rows(tmp_path / "out") == found


def test_a_full_disk_loses_nothing_and_says_what_to_do(target_dir: Path, prompts: Path, tmp_path: Path) -> None:
    run(target_dir, prompts, tmp_path / "out")
    found = rows(tmp_path / "out")
    path = tmp_path / "out/completions.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:8]))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, hard))
    try:
        with pytest.raises(TryAgain, match=r"out: .*File too large; mend that, and the same command goes on"):
            run(target_dir, prompts, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    run(target_dir, prompts, tmp_path / "out")
    assert rows(tmp_path / "out") == found


def test_a_damaged_completion_is_refused_by_its_line(target_dir: Path, prompts: Path, tmp_path: Path) -> None:
    run(target_dir, prompts, tmp_path / "out")
    path = tmp_path / "out/completions.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + "nonsense\n" + "".join(lines[2:]))
    with pytest.raises(CannotStart, match=r"completions\.jsonl:2 is damaged"):
        run(target_dir, prompts, tmp_path / "out")


def test_completions_are_not_made_twice(target_dir: Path, prompts: Path, tmp_path: Path) -> None:
    run(target_dir, prompts, tmp_path / "out")
    before = (tmp_path / "out/completions.jsonl").read_bytes()
    found = rows(tmp_path / "out")
    run(target_dir, prompts, tmp_path / "out")
    assert (tmp_path / "out/completions.jsonl").read_bytes() == before
    assert rows(tmp_path / "out") == found
    assert np.unique([json.loads(line)["prompt"] for line in before.splitlines()]).size == 20
