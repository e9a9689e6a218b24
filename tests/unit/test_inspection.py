"""What `dflash-train inspect` shows of a dataset."""

from pathlib import Path

import numpy as np
import pytest
from conftest import save_dataset
from dflash_trainer.cli import main
from dflash_trainer.inspection import length_plot
from drafting import END_TOKEN, add_tokenizer, wandering_target

PROMPT, ANSWER = [60, 5, 6, END_TOKEN, 61], [7, 8, 9, 10, END_TOKEN]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_tokenizer(wandering_target(tmp_path_factory.mktemp("inspect") / "target", "llama"))


def inspect(target: Path, data: Path, rows: list[tuple[list[int], list[int]]], *words: str) -> int:
    columns = {"input_ids": [ids for ids, _ in rows], "loss_mask": [mask for _, mask in rows]}
    return main(["inspect", str(save_dataset(data, columns)), "--target-model", str(target), *words])


def row(*answer: int) -> tuple[list[int], list[int]]:
    return [*PROMPT, *answer], [0] * len(PROMPT) + [1] * len(answer)


def test_good_data_is_shown_as_text_with_what_is_supervised(
    target: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = [row(*ANSWER), row(11, 12, END_TOKEN), ([*PROMPT, *ANSWER, 13], [0] * 5 + [1] * 5 + [0])]
    assert inspect(target, tmp_path / "d", rows) == 0
    out = capfd.readouterr().out
    assert "3 rows, 29 tokens, 13 of them supervised (45 %)" in out
    assert "no problems found" in out
    assert "row 0: 10 tokens, 5 supervised ⟦…⟧:\n<user> w5 w6 <end> <assistant>⟦w7 w8 w9 w10 <end>⟧\n" in out
    assert "<assistant>⟦w11 w12 <end>⟧" in out
    assert out.rstrip().endswith("⟦w7 w8 w9 w10 <end>⟧w13")
    assert "\033" not in out


def test_problems_are_counted_with_the_rows_and_the_exit_code_says_so(
    target: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    everything = ([*PROMPT, 14, END_TOKEN], [1] * 7)
    rows = [row(*ANSWER), row(9, 9), row(*ANSWER), everything, row(9, 9), row(*ANSWER), row(*ANSWER), row(*ANSWER)]
    assert inspect(target, tmp_path / "d", rows, "--row", "3") == 1
    out = capfd.readouterr().out
    assert "5 rows (62.5 %) hold the same tokens as one before: 2, 4, 5, …" in out
    assert "1 rows (12.5 %) are supervised from the first token to the last" in out
    assert f"2 rows (25.0 %) do not end their last supervised part with the token {END_TOKEN}" in out
    assert "\nrow 3: 7 tokens, 7 supervised" in out
    assert "\nrow 0:" not in out


def test_rows_are_called_by_their_place_in_the_dataset(
    target: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    skipped = (PROMPT, [0] * 5)
    assert (
        inspect(target, tmp_path / "d", [skipped, row(*ANSWER), skipped, row(11, 12, END_TOKEN)], "--row", "3") == 0
    )
    out = capfd.readouterr().out
    assert "2 rows skipped: no two supervised tokens in a row" in out
    assert "\nrow 3: 8 tokens" in out
    words = ["inspect", str(tmp_path / "d"), "--target-model", str(target), "--row", "2"]
    assert main(words) == 78
    assert "has no row 2 that is trained on" in capfd.readouterr().err


def test_control_characters_do_not_reach_the_terminal_and_a_long_row_is_cut(
    target: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_trainer.inspection.LONGEST_SAMPLE", 60)
    tokenizer = target / "tokenizer.json"
    before = tokenizer.read_text()
    tokenizer.write_text(before.replace('"w7"', '"\\u001b[31mred"'))
    try:
        inspect(target, tmp_path / "d", [row(*ANSWER), row(*[8] * 40, END_TOKEN)])
    finally:
        tokenizer.write_text(before)
    out = capfd.readouterr().out
    assert "\033" not in out
    assert "⟦\\x1b[31mred w8" in out
    assert out.rstrip().endswith(" …⟧")
    assert len(out.splitlines()[-1]) < 80


@pytest.mark.parametrize("lengths", [[5], [1, 4096], list(range(1, 200)), [7] * 1_000])
def test_the_plot_counts_every_row_once(lengths: list[int]) -> None:
    lines = length_plot(np.array(lengths))
    assert len(lines) <= 14
    assert sum(int(line.split()[1]) for line in lines[1:-1]) == len(lengths)
    assert lines[-1].endswith(f"longest {max(lengths)}")
