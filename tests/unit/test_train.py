"""Whole runs of the trainer as a process: exit codes, resume, refusals, what a person reads."""

import contextlib
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import MASK_TOKEN, make_dataset, make_target, save_dataset, small_disk
from drafting import add_tokenizer
from safetensors.torch import load_file

Flags = Callable[..., list[str]]
DEADLINE = 120


def command(flags: list[str], *more: str) -> list[str]:
    return [sys.executable, "-m", "dflash_trainer", *flags, *more]


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(p for p in sys.path if p.endswith(("agent", "trainer")))
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "2", **more}


def train(flags: list[str], *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(flags, *more),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )


def last_line(process: subprocess.CompletedProcess[str]) -> str:
    return process.stderr.strip().splitlines()[-1]


def rows(output: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [row for row in lines if "loss" in row]


@contextlib.contextmanager
def running(flags: list[str], tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], socket.socket]]:
    """The trainer under a real notify socket, as systemd would run it."""
    address = str(tmp_path / "notify")
    (tmp_path / "notify").unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
        notified.bind(address)
        process = subprocess.Popen(
            command(flags),
            env=environment(NOTIFY_SOCKET=address),
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        try:
            yield process, notified
        finally:
            process.kill()
            process.communicate()


def wait_for(notified: socket.socket, wanted: str) -> list[str]:
    """Every notification up to the one that contains `wanted`."""
    seen: list[str] = []
    end = time.monotonic() + DEADLINE
    while (left := end - time.monotonic()) > 0:
        if select.select([notified], [], [], left)[0]:
            seen.append(notified.recv(65536).decode())
            if wanted in seen[-1]:
                return seen
    raise AssertionError(f"no {wanted} within {DEADLINE} s, but {seen}")


def drafter_of(output: Path) -> dict[str, object]:
    return {name: tensor.tolist() for name, tensor in load_file(output / "drafter" / "model.safetensors").items()}


def test_the_start_is_timed_by_its_parts_and_says_what_is_loaded(train_flags: Flags) -> None:
    done = train(train_flags(max_steps=2))
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("training: the first step, 1 of 2"))
    parts = re.findall(r"(imports|data|target|drafter|first step) (\d+\.\d) s", line)
    assert [part for part, _ in parts] == ["imports", "data", "target", "drafter", "first step"]
    whole = re.search(r"is done; (\d+\.\d) s since the process began", line)
    assert whole
    assert sum(float(seconds) for _, seconds in parts) == pytest.approx(float(whole[1]), abs=0.3)  # each is rounded
    assert re.search(r"^2 steps in 1 epochs, \d+\.\d % of a batch is padding$", done.stderr, re.MULTILINE)
    assert "target loaded, 2 of 4 layers, as far as they are tapped; attention by sdpa" in done.stderr


def test_a_run_trains_saves_and_exits_0(train_flags: Flags, tmp_path: Path) -> None:
    done = train(train_flags(max_steps=80, lr=1e-2))
    assert done.returncode == 0, done.stderr
    assert "complete at step 80/80" in last_line(done)
    output = tmp_path / "out"
    steps = [row["step"] for row in rows(output)]
    assert steps == [1, *range(5, 81, 5)]
    assert rows(output)[-1]["loss"] < 0.75 * rows(output)[0]["loss"]
    assert sorted(p.name for p in (output / "checkpoints").iterdir())[-1] == "step-00000080"
    assert (output / "drafter" / "config.json").exists()
    assert any((output / "tensorboard").iterdir())


def test_a_complete_run_says_so_and_exits_0_at_once(train_flags: Flags, tmp_path: Path) -> None:
    assert train(train_flags()).returncode == 0
    with running(train_flags(), tmp_path) as (process, notified):
        wait_for(notified, "READY=1")
        assert process.wait(DEADLINE) == 0
        assert process.stderr is not None
        assert "nothing left to train" in process.stderr.read()


ALL_AT_ONCE = {
    "distill": 0.5,
    "position_weights": "dpace",
    "sliding_window": 12,
    "conv_kernel_size": 2,
    "conv_group_size": 8,
    "selector_rank": 4,
    "selector_top_k": 8,
}


@pytest.mark.parametrize("more", [{}, ALL_AT_ONCE], ids=["plain", "all at once"])
def test_sigkill_and_resume_give_the_same_drafter_bit_for_bit(
    more: dict[str, object], train_flags: Flags, tmp_path: Path
) -> None:
    done = train(train_flags(output_dir=tmp_path / "unbroken", **more))
    assert done.returncode == 0, done.stderr
    flags = train_flags(output_dir=tmp_path / "broken", **more)
    with running(flags, tmp_path) as (process, notified):
        wait_for(notified, "STATUS=step 10/20")
        process.kill()
    resumed = train(flags)
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming from" in resumed.stderr
    assert drafter_of(tmp_path / "unbroken") == drafter_of(tmp_path / "broken")
    losses = {row["step"]: row["loss"] for row in rows(tmp_path / "unbroken")}
    again = {row["step"]: row["loss"] for row in rows(tmp_path / "broken")}
    assert losses[20] == again[20]


def evaluations(output: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [row for row in lines if "acceptance_length" in row]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Three held-out prompts, for a target that gets a tokenizer."""
    path = tmp_path / "held.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"w{i} w{i + 2} w{i + 4}"}) + "\n" for i in (5, 9, 30)))
    return path


@pytest.fixture(scope="module")
def speaking_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_tokenizer(make_target(tmp_path_factory.mktemp("speaking") / "llama"))


def test_evaluation_tells_the_acceptance_length_and_changes_nothing_else(
    train_flags: Flags, prompts: Path, speaking_target: Path, tmp_path: Path
) -> None:
    common = {"target_model": speaking_target, "max_steps": 60, "lr": 1e-2}
    assert train(train_flags(output_dir=tmp_path / "plain", **common)).returncode == 0
    held = {"eval_prompts": prompts, "eval_interval": 25, "eval_new_tokens": 24, "eval_limit": 2}
    with running(train_flags(output_dir=tmp_path / "held", **common, **held), tmp_path) as (process, notified):
        seen = wait_for(notified, "saving step 60")
        assert process.wait(DEADLINE) == 0
        assert process.stderr is not None
        text = process.stderr.read()
    assert any("STATUS=step" in told and "· acceptance " in told for told in seen)
    assert "2 of 4 layers, as far as they are tapped, the rest for evaluations" in text
    assert re.search(r"^step 25: acceptance length \d\.\d\d \(.*\) on 2 of 2 held-out prompts", text, re.MULTILINE)
    found = evaluations(tmp_path / "held")
    assert [row["step"] for row in found] == [25, 50, 60]
    assert found[0]["eval_prompts"] == 2
    assert found[0]["eval_tokens"] == 48
    assert len(found[0]["accepted_by_position"]) == 3
    assert 1 <= found[0]["acceptance_length"] <= found[-1]["acceptance_length"] <= 4
    assert drafter_of(tmp_path / "plain") == drafter_of(tmp_path / "held")
    losses = [[(row["step"], row["loss"]) for row in rows(tmp_path / name)] for name in ("plain", "held")]
    assert losses[0] == losses[1]
    (events,) = (tmp_path / "held/tensorboard").iterdir()
    assert b"acceptance_length" in events.read_bytes()
    # It is the figure of `dflash-train eval` for the same drafter.
    words = ["eval", str(tmp_path / "held"), "--json", "--limit", "2", "--target-model", str(speaking_target)]
    words += ["--prompts", str(prompts), "--max-new-tokens", "24"]
    done = subprocess.run(command(words), env=environment(), capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["drafter"]["acceptance_length"] == found[-1]["acceptance_length"]


def test_an_evaluation_that_fails_or_takes_too_long_ends_no_training(
    train_flags: Flags, prompts: Path, speaking_target: Path, tmp_path: Path
) -> None:
    settings = json.loads((speaking_target / "generation_config.json").read_text())
    mute = tmp_path / "mute"
    shutil.copytree(speaking_target, mute)
    for name in ("generation_config.json", "config.json"):
        values = json.loads((mute / name).read_text())
        (mute / name).write_text(json.dumps(values | {"eos_token_id": None}))
    assert settings["eos_token_id"] is not None
    flags = {"eval_prompts": prompts, "eval_interval": 10, "eval_new_tokens": 24}
    done = train(train_flags(target_model=mute, output_dir=tmp_path / "mute-out", **flags))
    assert done.returncode == 0, done.stderr
    assert "evaluation after step 10 left out: CannotStart: the target names no end token" in done.stderr
    assert evaluations(tmp_path / "mute-out") == []
    flags |= {"eval_budget": "0s", "target_model": speaking_target}
    done = train(train_flags(output_dir=tmp_path / "hasty", **flags))
    assert done.returncode == 0, done.stderr
    assert {row["eval_prompts"] for row in evaluations(tmp_path / "hasty")} == {1}


def test_prompts_that_cannot_be_used_are_refused_before_anything_is_loaded(
    train_flags: Flags, prompts: Path, speaking_target: Path
) -> None:
    prompts.write_text('{"prompt": "w5"}\n{"question": "w9"}\n')
    done = train(train_flags(target_model=speaking_target, eval_prompts=prompts))
    assert done.returncode == 78
    assert "held.jsonl:2: " in last_line(done)
    assert "loading target" not in done.stderr
    checked = subprocess.run(
        command(["check", *train_flags(target_model=speaking_target, eval_prompts=prompts)]),
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 78
    assert "held.jsonl:2: " in checked.stdout


def test_a_run_begins_with_the_weights_and_the_shape_of_another_drafter(train_flags: Flags, tmp_path: Path) -> None:
    shape = {"draft_layers": 1, "block_size": 5, "sliding_window": 12, "sliding_layers": 0}
    assert train(train_flags(output_dir=tmp_path / "first", max_steps=60, lr=1e-2, **shape)).returncode == 0
    begun = tmp_path / "first/drafter"
    more = {"max_steps": 3, "init_from": begun}
    refused = train(train_flags(output_dir=tmp_path / "second", draft_layers=1, block_size=7, **more))
    assert refused.returncode == 78
    assert last_line(refused).endswith("has block_size 5, [drafter] 7; remove that, or set it alike")
    sliding = train_flags(output_dir=tmp_path / "second", draft_layers=1, block_size=5, sliding_layers="1", **more)
    assert "has sliding_layers (0,), [drafter] (1,)" in last_line(train(sliding))
    # 5 layers and blocks of 16 are the defaults: nothing was asked for
    done = train(train_flags(output_dir=tmp_path / "second", draft_layers=5, block_size=16, **more))
    assert done.returncode == 0, done.stderr
    assert rows(tmp_path / "second")[0]["loss"] < 1.1 * rows(tmp_path / "first")[-1]["loss"]
    config = json.loads((tmp_path / "second/drafter/config.json").read_text())
    assert (config["num_hidden_layers"], config["block_size"], config["sliding_window"]) == (1, 5, 12)
    other = make_target(tmp_path / "other", "qwen3_5_text")
    text = json.loads((other / "config.json").read_text()) | {"num_hidden_layers": 2}
    (other / "config.json").write_text(json.dumps(text | {"layer_types": text["layer_types"][:2]}))
    strange = train(train_flags(output_dir=tmp_path / "third", init_from=begun, target_model=other))
    assert strange.returncode == 78
    assert "is of a target with num_target_layers 4" in last_line(strange)


def test_sigterm_saves_and_exits_0_and_the_next_start_goes_on(train_flags: Flags, tmp_path: Path) -> None:
    flags = train_flags(save_interval=1000, max_steps=400, epochs=400)
    with running(flags, tmp_path) as (process, notified):
        before_ready = wait_for(notified, "READY=1")
        assert not any("WATCHDOG=1" in message for message in before_ready[:1])
        process.send_signal(signal.SIGTERM)
        wait_for(notified, "STOPPING=1")
        assert process.wait(DEADLINE) == 0
    saved = [p.name for p in (tmp_path / "out" / "checkpoints").iterdir()]
    assert len(saved) == 1
    with running(flags, tmp_path) as (process, notified):
        assert process.stderr is not None
        for line in process.stderr:
            if "resuming from" in line:
                assert saved[0] in line
                break
        else:
            raise AssertionError("it did not resume")


def test_ready_comes_after_the_first_step_and_the_watchdog_from_the_loop(
    train_flags: Flags, tmp_path: Path
) -> None:
    with running(train_flags(), tmp_path) as (process, notified):
        until_ready = wait_for(notified, "READY=1")
        assert any("first step under way" in message for message in until_ready)
        rest = wait_for(notified, "STATUS=step 20/20")
        assert sum("WATCHDOG=1" in message for message in (*until_ready, *rest)) >= 19
        assert process.wait(DEADLINE) == 0


def test_a_truncated_newest_checkpoint_is_skipped_and_named(train_flags: Flags, tmp_path: Path) -> None:
    assert train(train_flags(max_steps=12)).returncode == 0
    newest = tmp_path / "out" / "checkpoints" / "step-00000012"
    state = newest / "state.pt"
    state.write_bytes(state.read_bytes()[:-100])
    again = train(train_flags(max_steps=12))
    assert again.returncode == 0, again.stderr
    assert any("skipped checkpoint" in x and "step-00000012" in x for x in again.stderr.splitlines())
    assert "step-00000010" in again.stderr
    assert "complete at step 12/12" in last_line(again)


def test_another_runs_output_is_refused_with_the_keys_and_fresh_puts_it_aside(
    train_flags: Flags, tmp_path: Path
) -> None:
    assert train(train_flags()).returncode == 0
    before = drafter_of(tmp_path / "out")
    refused = train(train_flags(lr=1e-4, draft_layers=1))
    assert refused.returncode == 78
    assert "train.lr 0.002 there, 0.0001 now" in last_line(refused)
    assert "drafter.layers 2 there, 1 now" in last_line(refused)
    assert "--fresh" in last_line(refused)
    assert "train.seed" not in last_line(refused)
    assert drafter_of(tmp_path / "out") == before
    assert train(train_flags(lr=1e-4, draft_layers=1), "--fresh").returncode == 0
    (aside,) = (tmp_path / "out").glob("previous-*")
    assert drafter_of(aside) == before


def test_a_run_that_an_earlier_version_began_goes_on_with_keys_that_it_did_not_know(
    train_flags: Flags, tmp_path: Path
) -> None:
    assert train(train_flags(max_steps=5)).returncode == 0
    for name in ("run.json", "complete.json"):
        marker = tmp_path / "out" / name
        known = json.loads(marker.read_text())
        for key in ("train.distill", "drafter.init_from", "drafter.sliding_layers"):
            del known["settings"][key]
        marker.write_text(json.dumps(known))
    again = train(train_flags(max_steps=5))
    assert again.returncode == 0, again.stderr
    assert "nothing left to train" in again.stderr
    other = train(train_flags(max_steps=5, distill=0.5))
    assert other.returncode == 78
    assert "train.distill 0.0 there, 0.5 now" in last_line(other)


def test_settings_that_do_not_shape_the_result_may_change_between_attempts(train_flags: Flags) -> None:
    assert train(train_flags()).returncode == 0
    assert train(train_flags(log_interval=3, save_interval=7, keep_last=2)).returncode == 0


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"input_ids": [[5, 6, 7]]}, "loss_mask"),
        ({"input_ids": [[5, 6, 96]], "loss_mask": [[1, 1, 1]]}, "96"),
        ({"input_ids": [[5, 6, 7]], "loss_mask": [[0, 0, 0]]}, "supervised"),
        ({"input_ids": [[5, 6, 7]], "loss_mask": [[1, 1]]}, "row 0"),
        ({"input_ids": [[], [4]], "loss_mask": [[], [1]]}, "short"),
        ({"input_ids": [[5, MASK_TOKEN, 7]], "loss_mask": [[1, 1, 1]]}, "mask_token_id"),
    ],
)
def test_bad_data_is_exit_78_with_one_line(
    columns: dict[str, list[list[int]]], reason: str, train_flags: Flags, tmp_path: Path
) -> None:
    refused = train(train_flags(data_dir=save_dataset(tmp_path / "d", columns)))
    assert refused.returncode == 78
    assert reason in last_line(refused)
    assert "Traceback" not in refused.stderr
    assert not (tmp_path / "out").exists()


def test_short_rows_are_skipped_and_counted(train_flags: Flags, tmp_path: Path) -> None:
    ids = [[4], [], *[[5, 6, 7, 8]] * 3]
    directory = save_dataset(tmp_path / "d", {"input_ids": ids, "loss_mask": [[1] * len(i) for i in ids]})
    done = train(train_flags(data_dir=directory, max_steps=2))
    assert done.returncode == 0, done.stderr
    assert any("3 rows" in x and "2" in x and "short" in x for x in done.stderr.splitlines())


@pytest.mark.parametrize("fault", ["no directory", "shard missing", "truncated shard"])
def test_a_bad_target_is_exit_78_with_one_line(fault: str, train_flags: Flags, tmp_path: Path) -> None:
    target = tmp_path / "target"
    if fault != "no directory":
        weights = make_target(target) / "model.safetensors"
        if fault == "shard missing":
            weights.unlink()
        else:
            weights.write_bytes(weights.read_bytes()[:4000])
    refused = train(train_flags(target_model=target))
    assert refused.returncode == 78
    assert str(target) in last_line(refused)
    assert "Traceback" not in refused.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_while_saving_keeps_training_and_the_old_checkpoints(
    train_flags: Flags, tmp_path: Path
) -> None:
    assert train(train_flags(output_dir=tmp_path / "measure", max_steps=5)).returncode == 0
    size = sum(p.stat().st_size for p in (tmp_path / "measure").rglob("*") if p.is_file())
    with small_disk(tmp_path / "small", int(size * 1.6)) as output:
        flags = train_flags(output_dir=output)
        full = train(flags)
        assert full.returncode == 75, full.stderr
        assert any("checkpoint not saved" in x for x in full.stderr.splitlines())
        assert "step 20" in last_line(full)
        assert "No space left" in last_line(full)
        assert [p.name for p in (output / "checkpoints").iterdir()] == ["step-00000005"]
        subprocess.run(["mount", "-o", f"remount,size={size * 20}", output], check=True)
        mended = train(flags)
        assert mended.returncode == 0, mended.stderr
        assert "step-00000005" in mended.stderr


def test_check_reports_without_starting_or_writing(train_flags: Flags, tmp_path: Path) -> None:
    def check(*more: str, **changes: object) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "dflash_trainer", "check", *train_flags(**changes), *more]
        return subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=60, check=False)

    good = check("--json")
    assert good.returncode == 0, good.stderr
    findings = [json.loads(line) for line in good.stdout.splitlines()]
    assert {f["severity"] for f in findings} == {"ok"}
    assert any("20 steps" in f["text"] for f in findings)
    bad = check(mask_token_id=4)
    assert bad.returncode == 78
    assert "occurs in the data" in bad.stdout
    assert not (tmp_path / "out").exists()


def test_usage_errors_name_the_flag(train_flags: Flags) -> None:
    wrong = train(train_flags(lr="fast"))
    assert wrong.returncode in (2, 78)
    assert "fast" in last_line(wrong)
    negative = train(train_flags(block_size=-4))
    assert negative.returncode == 78
    assert "block_size" in last_line(negative)
    last = train(train_flags(target_layer_ids="1,3"))  # of four: served after the final norm, so never trained on
    assert last.returncode == 78
    assert "3 cannot be tapped" in last_line(last)


def test_a_hybrid_target_trains_too(train_flags: Flags, tmp_path: Path) -> None:
    target = make_target(tmp_path / "qwen", "qwen3_5_text")
    done = train(train_flags(target_model=target, max_steps=3, data_dir=make_dataset(tmp_path / "d", 12)))
    assert done.returncode == 0, done.stderr


def test_a_second_training_into_the_same_output_is_refused_and_names_the_first(
    train_flags: Flags, tmp_path: Path
) -> None:
    flags = train_flags(max_steps=100000, epochs=100000)
    with running(flags, tmp_path) as (process, notified):
        wait_for(notified, "READY=1")
        second = train(flags)
        assert second.returncode == 78
        assert f"(pid {process.pid})" in last_line(second)
        assert "in use" in last_line(second)
        process.kill()
    assert train(train_flags(max_steps=1)).returncode != 0  # other settings, but no lock that stays
    assert "in use" not in train(train_flags(max_steps=1)).stderr


def test_sigterm_while_loading_ends_it_at_once_with_exit_0(train_flags: Flags, tmp_path: Path) -> None:
    with running(train_flags(), tmp_path) as (process, notified):
        wait_for(notified, "STATUS=loading target")
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE) == 0
        assert time.monotonic() - began < 10
        assert process.stderr is not None
        assert "stopped" in process.stderr.read().splitlines()[-1]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_saves_that_fail_for_longer_than_the_patience_are_exit_75(train_flags: Flags, tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", 1 << 20) as output:
        (output / "ballast").write_bytes(bytes(1 << 19))
        done = train(train_flags(output_dir=output, max_steps=100000, epochs=100000, save_patience="0s"))
        assert done.returncode == 75
        assert "longer than save_patience" in last_line(done)


def test_a_complete_run_is_marked_with_its_settings(train_flags: Flags, tmp_path: Path) -> None:
    assert train(train_flags(max_steps=3)).returncode == 0
    marker = json.loads((tmp_path / "out" / "complete.json").read_text())
    assert marker["step"] == 3
    assert marker["settings"]["train.max_steps"] == 3
