"""The benchmark: what it prints, and that it counts the operations that are done."""

import re

import pytest
import torch
from conftest import make_target
from dflash_trainer import bench
from dflash_trainer.drafter import Drafter
from dflash_trainer.step import block_loss
from dflash_trainer.target import load_target
from torch.utils.flop_counter import FlopCounterMode

CPU = torch.device("cpu")


def matrix_products(counter: FlopCounterMode) -> int:
    counts = counter.get_flop_counts()["Global"]
    return sum(count for operation, count in counts.items() if str(operation) in ("aten.mm", "aten.addmm"))


def test_the_targets_operations_are_counted_as_torch_counts_them(tmp_path_factory: pytest.TempPathFactory) -> None:
    target = load_target(make_target(tmp_path_factory.mktemp("t") / "llama"), (0, 2), CPU, torch.float32)
    ids = torch.randint(3, 90, (3, 40))
    with FlopCounterMode(display=False) as counter:
        target.states(ids)
    attention = 4 * 4 * 8 * (3 * 40 * 41 / 2) * 3  # heads, their size, pairs, layers
    assert bench.target_operations(target, 3, 40) == matrix_products(counter) + attention


def test_the_drafters_operations_are_counted_as_torch_counts_them() -> None:
    shape = bench.SHAPES["tiny"]
    config = bench.drafter_of(shape, 4)
    target = bench.random_target(bench.target_config(shape), config.target_layer_ids, CPU, torch.float32)
    batch = bench.random_cutter(config, 2, 48, 6, 1).cut(0)
    states = target.states(batch.input_ids)
    drafter = Drafter(config)
    with FlopCounterMode(display=False) as counter:
        loss, _ = block_loss(drafter, target, batch, states)
        loss.backward()
    seen = int(batch.anchors.sum()) + batch.block_ids.numel()
    attention = 2 * 3.5 * 4 * (4 * 16) * seen * 4  # layers, heads and their size, keys, queries of a block
    counted = bench.drafter_operations(config, batch) - attention
    assert counted == pytest.approx(matrix_products(counter), rel=1e-6)


def test_it_prints_a_row_for_each_batch(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--shape", "tiny", "--batch", "1x96", "2x48", "--anchors", "8", "--block-size", "4", "--steps", "2"]
    assert bench.main(words) == 0
    head, titles, *rows = capsys.readouterr().out.splitlines()
    assert re.match(
        r"CPU, torch .*, tiny, block 4, 8 anchors; matrix products at .* TFLOP/s, .*; attention by sdpa, ",
        head,
    )
    assert [row[:12].split() for row in rows] == [["1", "×", "96"], ["2", "×", "48"]]
    columns = titles[12:].split("  ")
    figures = [float(word) for word in rows[0][12:].split()]
    assert len(figures) == len([title for title in columns if title.strip()])
    assert all(figure > 0 for figure in figures[:7])
