"""Device nodes, watched: plain files stand for them, the kernel's inotify is real."""

import select
from pathlib import Path

import pytest
from dflash_agent.devices import DeviceNodes, Pace


def is_told(nodes: DeviceNodes) -> bool:
    """Whether the main loop would be woken."""
    return bool(select.select([nodes.descriptor], [], [], 0)[0])


@pytest.fixture
def dev(tmp_path: Path) -> Path:
    """A directory with two GPUs and other things."""
    for name in ("nvidia0", "nvidia1", "nvidiactl", "null"):
        (tmp_path / name).touch()
    return tmp_path


QUIET, USED, COME_OR_GONE = (False, False), (True, False), (False, True)


def test_opening_and_closing_a_gpus_node_is_told_once(dev: Path) -> None:
    nodes = DeviceNodes(dev)
    assert nodes.changed() == QUIET
    with (dev / "nvidia1").open("rb"):
        assert is_told(nodes)
        assert nodes.changed() == USED
        assert nodes.changed() == QUIET
    assert nodes.changed() == USED


def test_other_files_do_not_wake_it(dev: Path) -> None:
    nodes = DeviceNodes(dev)
    for name in ("nvidiactl", "null"):
        (dev / name).read_bytes()
    assert not is_told(nodes)


def test_nodes_of_a_driver_that_is_loaded_later_are_watched(tmp_path: Path) -> None:
    nodes = DeviceNodes(tmp_path)
    (tmp_path / "shm").touch()
    assert nodes.changed() == QUIET
    (tmp_path / "nvidia0").touch()
    assert nodes.changed() == COME_OR_GONE
    (tmp_path / "nvidia0").read_bytes()
    assert nodes.changed() == USED
    (tmp_path / "nvidia0").unlink()
    assert nodes.changed() == COME_OR_GONE


def test_more_events_than_the_kernel_keeps_are_a_change(dev: Path) -> None:
    nodes = DeviceNodes(dev)
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    for _ in range(limit // 2 + 10):
        (dev / "nvidia0").open("rb").close()
        (dev / "nvidia1").open("rb").close()
    assert nodes.changed() == (True, True)
    assert nodes.changed() == QUIET


def test_after_somebody_came_the_gpus_are_looked_at_soon_and_ever_later() -> None:
    pace = Pace()
    assert pace.stirred(1000.0) == Pace.SOONEST
    pauses = [pace.looked(news=False) for _ in range(5)]
    assert pauses == [1.0, 5.0, 25.0, None, None]


def test_news_are_followed_closely() -> None:
    pace = Pace()
    for _ in range(4):
        pace.looked(news=False)
    assert pace.looked(news=True) == Pace.SOON


def test_a_tool_that_opens_the_node_every_few_seconds_is_followed_once_a_minute() -> None:
    pace = Pace()
    now, looks, due = 0.0, 0, None
    while now < 3600:
        soon = now + pace.stirred(now)
        due = soon if due is None else min(due, soon)
        if now >= due:
            looks += 1
            pause = pace.looked(news=False)
            due = None if pause is None else now + pause
        now += 5.0
    assert 55 <= looks <= 70


def test_after_a_quiet_minute_the_next_one_is_noticed_at_once() -> None:
    pace = Pace()
    pace.stirred(0.0)
    for _ in range(4):
        pace.looked(news=False)
    assert pace.stirred(30.0) == Pace.LATEST
    assert pace.stirred(91.0) == Pace.SOONEST
