"""What the step log says of the stages' time."""

import time

import pytest
from dflash_trainer.channel import Channel
from dflash_trainer.metrics import shares
from dflash_trainer.pipeline import Pipeline


class Clock:
    """Time that goes on when it is told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "monotonic", made)
    return made


def waited(channel: "Channel[int]", for_input: float, for_room: float) -> None:
    channel._for_input._before += for_input
    channel._for_room._before += for_room


def test_each_stage_is_busy_or_waits_and_every_call_tells_of_the_time_since_the_last(clock: Clock) -> None:
    line = Pipeline(Channel(2), Channel(2), _since=clock.now)
    waited(line.batches, for_input=1.0, for_room=8.0)
    waited(line.tapped, for_input=6.0, for_room=2.0)
    clock.now += 10
    first = line.stage_seconds()
    assert first == {
        "loader": {"busy": 2.0, "input": 0.0, "output": 8.0},
        "target": {"busy": 7.0, "input": 1.0, "output": 2.0},
        "drafter": {"busy": 4.0, "input": 6.0, "output": 0.0},
    }
    assert shares(first) == "loader 20 %, target 70 %, drafter 40 %"
    clock.now += 5
    waited(line.tapped, for_input=4.0, for_room=0.0)
    assert line.stage_seconds()["drafter"] == {"busy": 1.0, "input": 4.0, "output": 0.0}


def test_on_a_gpu_a_stage_is_busy_as_long_as_its_work_takes_there(clock: Clock) -> None:
    line = Pipeline(Channel(2), Channel(2), _since=clock.now)
    for _ in range(2):
        for _ in range(4):
            line.worked_on_gpu({"target": 0.7, "drafter": 0.25})
        waited(line.batches, for_input=0.5, for_room=9.0)
        waited(line.tapped, for_input=0.0, for_room=0.1)  # of the threads, which do not wait for the GPU
        clock.now += 4
        found = line.stage_seconds()
        assert found["target"] == pytest.approx({"busy": 2.8, "input": 0.5, "output": 0.7})
        assert found["drafter"] == pytest.approx({"busy": 1.0, "input": 3.0, "output": 0.0})
