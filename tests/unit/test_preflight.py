"""The preflight's loop: what each policy does with a node that changes while it looks."""

import os
import pwd
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from dflash_agent import preflight, reap
from dflash_agent.config import AgentConfig
from dflash_agent.gpus import Reading
from dflash_agent.holders import Holder, Use
from dflash_agent.leases import Lease, Leased
from dflash_agent.preflight import Verdict, reap_targets, wait_for_gpus, wanted_devices
from dflash_agent.runfile import Preflight, RunFile, from_flags
from dflash_agent.verdict import Choice, Snapshot, choose
from nodes import GIB, UNIT, a_gpu, a_holder, a_node, on

BUSY = a_node(a_gpu(held=GIB), holders=(a_holder(41, on(a_gpu(), count=GIB)),))
CLEAN = a_node(a_gpu())


def a_run(**changes: str) -> RunFile:
    run = from_flags("run1", {"target.model": "/t", "data.dir": "/d"})
    return replace(run, preflight=replace(Preflight(), **changes))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """No pauses but those of the loop's own clock, and what is said is kept."""
    said: list[str] = []
    clock = [0.0]
    monkeypatch.setattr(preflight.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    monkeypatch.setattr(preflight.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(preflight, "say", lambda _name, text, **_fields: said.append(text))
    monkeypatch.setattr(preflight, "notify", lambda _text: None)
    return said


def looking(*snapshots: Snapshot) -> Callable[[AgentConfig], Snapshot]:
    """One snapshot after the other, the last for good."""
    left: Iterator[Snapshot] = iter(snapshots)
    last = [snapshots[0]]

    def look(_config: AgentConfig) -> Snapshot:
        last[0] = next(left, last[0])
        return last[0]

    return look


def lease_nothing(_choice: Choice, _unit: str, _snapshot: Snapshot) -> None:
    pass


def test_clean_gpus_are_taken_at_once(quick: list[str]) -> None:
    choice = wait_for_gpus(a_run(), AgentConfig(), looking(CLEAN), lease_nothing)
    assert [gpu.index for gpu in choice.gpus] == [0]
    assert quick == []


def test_wait_looks_until_they_are_clean_and_says_what_for_every_few_seconds(quick: list[str]) -> None:
    snapshots = [BUSY] * 12 + [CLEAN]
    choice = wait_for_gpus(a_run(wait="10min"), AgentConfig(), looking(*snapshots), lease_nothing)
    assert choice.gpus
    assert 2 <= len(quick) <= 12
    assert all("pid 41" in text for text in quick)


def test_wait_ends_after_its_time_and_tells_how_long_it_was(quick: list[str]) -> None:
    choice = wait_for_gpus(a_run(wait="1min"), AgentConfig(), looking(BUSY), lease_nothing)
    assert [f.code for f in choice.refusals] == ["gpu-busy"]
    assert "after waiting 1 min" in choice.refusals[0].text
    assert 5 <= len(quick) <= 13


def test_fail_does_not_wait_for_a_process(quick: list[str]) -> None:
    choice = wait_for_gpus(a_run(on_dirty="fail"), AgentConfig(), looking(BUSY, CLEAN), lease_nothing)
    assert choice.refusals
    assert quick == []


@pytest.mark.parametrize("policy", ["wait", "fail", "reap"])
def test_memory_of_the_dead_gets_a_moment_under_every_policy(policy: str) -> None:
    just_killed = a_node(a_gpu(held=GIB), holders=(Holder(41, (Use("GPU-0000", "compute", GIB),), state="gone"),))
    choice = wait_for_gpus(
        a_run(on_dirty=policy), AgentConfig(), looking(just_killed, just_killed, CLEAN), lease_nothing
    )
    assert choice.gpus


def test_what_waiting_cannot_end_is_not_waited_for() -> None:
    looks = [0]

    def look(_config: AgentConfig) -> Snapshot:
        looks[0] += 1
        return a_node(a_gpu(mig=True))

    choice = wait_for_gpus(a_run(wait="1h"), AgentConfig(), look, lease_nothing)
    assert choice.hopeless
    assert looks == [1]


def test_a_lease_that_another_start_got_is_looked_at_again() -> None:
    leased = replace(CLEAN, leases={"GPU-0000": Lease("GPU-0000", "dflash-train@b.service", time.time())})
    tries = []

    def lease(choice: Choice, _unit: str, _snapshot: Snapshot) -> None:
        tries.append(choice)
        raise Leased(Lease("GPU-0000", "dflash-train@b.service", 0.0))

    choice = wait_for_gpus(a_run(on_dirty="fail"), AgentConfig(), looking(CLEAN, leased), lease)
    assert len(tries) == 1
    assert [f.code for f in choice.refusals] == ["gpu-leased"]


def test_reap_ends_three_generations_and_then_says_that_they_come_back(
    monkeypatch: pytest.MonkeyPatch, quick: list[str]
) -> None:
    me = pwd.getpwuid(os.getuid())
    monkeypatch.setattr(preflight.pwd, "getpwnam", lambda _name: me)
    ended = []
    monkeypatch.setattr(
        preflight,
        "reap",
        lambda targets, _uid: [ended.append(h) or reap.Outcome(h, True, "ended") for h in targets],
    )
    mine = a_node(a_gpu(held=GIB), holders=(a_holder(41, on(a_gpu(), count=GIB), uid=me.pw_uid),))
    choice = wait_for_gpus(a_run(on_dirty="reap", wait="2s"), AgentConfig(), looking(mine), lease_nothing)
    assert len(ended) == preflight.REAP_ROUNDS
    assert "started anew" in choice.refusals[0].text
    assert "something starts it anew" in quick[1]


def test_nothing_is_reaped_on_a_gpu_that_would_stay_dirty(monkeypatch: pytest.MonkeyPatch) -> None:
    me = pwd.getpwuid(os.getuid())
    monkeypatch.setattr(preflight.pwd, "getpwnam", lambda _name: me)
    gpu = a_gpu(held=2 * GIB)
    mine, other = a_holder(41, on(gpu, count=GIB), uid=me.pw_uid), a_holder(42, on(gpu, count=GIB), uid=12345)
    both = a_node(gpu, holders=(mine, other))
    assert reap_targets(both, choose(both, "auto", 1, UNIT), UNIT) == []
    alone = a_node(gpu, holders=(mine,))
    assert reap_targets(alone, choose(alone, "auto", 1, UNIT), UNIT) == [mine]


def test_what_may_be_ended_is_where_another_has_the_node_open_too(monkeypatch: pytest.MonkeyPatch) -> None:
    me = pwd.getpwuid(os.getuid())
    monkeypatch.setattr(preflight.pwd, "getpwnam", lambda _name: me)
    gpu = a_gpu(held=GIB)
    mine = a_holder(41, Use(gpu.uuid, "open"), uid=me.pw_uid)
    other = a_holder(42, Use(gpu.uuid, "open"), uid=12345)
    both = a_node(gpu, holders=(mine, other))
    assert reap_targets(both, choose(both, "auto", 1, UNIT), UNIT) == [mine]
    alone = a_node(gpu, holders=(other,))
    assert reap_targets(alone, choose(alone, "auto", 1, UNIT), UNIT) == []


def test_the_pauses_between_restarts_double_up_to_ten_minutes() -> None:
    waits = [preflight.pause(n) + preflight.RESTART_SECONDS for n in range(1, 12)]
    assert waits == [5, 10, 20, 40, 80, 160, 320, 600, 600, 600, 600]
    assert preflight.pause(0) == 0
    assert preflight.pause(10**9) == 595


def test_devices_of_the_run_file_come_before_those_of_the_environment() -> None:
    assert wanted_devices(a_run(), {}) == "auto"
    assert wanted_devices(a_run(), {"CUDA_VISIBLE_DEVICES": "1,2"}) == "1,2"
    assert wanted_devices(a_run(), {"CUDA_VISIBLE_DEVICES": ""}) == "none"
    assert wanted_devices(a_run(devices="3"), {"CUDA_VISIBLE_DEVICES": "1"}) == "3"


def test_a_verdict_is_read_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "VERDICTS_DIR", tmp_path / "verdicts")
    assert preflight.read("run1") is None
    refusals = wait_for_gpus(a_run(on_dirty="fail"), AgentConfig(), looking(BUSY), lease_nothing).refusals
    for verdict in (
        Verdict("id", 0, ("GPU-1", "GPU-2"), (0, 3), ("0000:3b:00", "0000:86:00")),
        Verdict("id", 75, findings=refusals),
    ):
        preflight.write("run1", verdict)
        assert preflight.read("run1") == verdict
    (tmp_path / "verdicts" / "run1.json").write_text('{"invocation": "x"')
    assert preflight.read("run1") is None


def test_without_a_driver_reading_and_waiting_go_on(quick: list[str]) -> None:
    away = Snapshot(Reading((), problem="Driver Not Loaded"), hardware=True)
    choice = wait_for_gpus(a_run(wait="1min"), AgentConfig(), looking(away, away, CLEAN), lease_nothing)
    assert choice.gpus
    assert "Driver Not Loaded" in quick[0]
