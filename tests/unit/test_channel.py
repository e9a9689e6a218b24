"""Channels between real threads: order, bounds, ends, errors, and what they keep alive."""

import threading
import time
import traceback
import weakref
from collections.abc import Callable

import pytest
from dflash_trainer.channel import Channel, Closed, Ended, run_stage

DEADLINE = 20


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.001)


def waits_for_room(channel: Channel[int]) -> bool:
    before = channel.waited_for_room
    return channel.waited_for_room > before


def put_all(channel: Channel[int], count: int) -> None:
    for i in range(count):
        channel.put(i)


def drain(channel: Channel[int]) -> None:
    for _ in channel:
        pass


def joined(thread: threading.Thread) -> bool:
    thread.join(DEADLINE)
    return not thread.is_alive()


class Item:
    """Something that a weak reference can watch."""


@pytest.mark.parametrize("capacity", [1, 2, 7])
def test_items_come_in_order_and_then_the_end(capacity: int) -> None:
    channel: Channel[int] = Channel(capacity)
    run_stage("producer", lambda: put_all(channel, 500), channel)
    assert list(channel) == list(range(500))
    assert channel.passed == 500
    with pytest.raises(Ended):
        channel.get()


def test_no_more_than_its_capacity_is_on_the_way() -> None:
    channel: Channel[int] = Channel(3)
    made: list[int] = []

    def produce() -> None:
        for i in range(10):
            made.append(i)
            channel.put(i)

    run_stage("producer", produce, channel)
    for taken in range(7):
        wait_until(lambda n=taken: len(made) >= n + 4 and waits_for_room(channel))
        assert len(made) == taken + 4  # three on the way, one in hand
        assert channel.get() == taken


def test_an_error_comes_out_after_what_was_made_before_it_with_its_own_traceback() -> None:
    channel: Channel[int] = Channel(5)

    def fails_here() -> None:
        channel.put(1)
        channel.put(2)
        raise ZeroDivisionError("the reason")

    assert joined(run_stage("producer", fails_here, channel))
    assert [channel.get(), channel.get()] == [1, 2]
    with pytest.raises(ZeroDivisionError, match="the reason") as caught:
        channel.get()
    assert "fails_here" in "".join(traceback.format_exception(caught.value))


def test_an_error_wakes_a_consumer_that_waits() -> None:
    channel: Channel[int] = Channel(1)
    go = threading.Event()

    def produce() -> None:
        go.wait(DEADLINE)
        raise ValueError("late")

    run_stage("producer", produce, channel)
    threading.Timer(0.01, go.set).start()
    with pytest.raises(ValueError, match="late"):
        channel.get()


def test_an_error_passes_through_a_stage_in_between() -> None:
    first: Channel[int] = Channel(1)
    second: Channel[int] = Channel(1)

    def produce() -> None:
        first.put(1)
        raise OSError("at the source")

    def double() -> None:
        for item in first:
            second.put(2 * item)

    run_stage("source", produce, first)
    run_stage("middle", double, second)
    assert second.get() == 2
    with pytest.raises(OSError, match="at the source"):
        second.get()


def test_close_wakes_a_producer_that_waits_for_room() -> None:
    channel: Channel[int] = Channel(1)
    outcome: list[str] = []

    def produce() -> None:
        channel.put(1)
        try:
            channel.put(2)
        except Closed:
            outcome.append("closed")
            raise

    thread = run_stage("producer", produce, channel)
    wait_until(lambda: channel.waited_for_room > 0.005)
    assert outcome == []
    channel.close()
    assert joined(thread)
    assert outcome == ["closed"]
    with pytest.raises(Closed):
        channel.put(3)


def test_closing_the_last_channel_and_the_first_ends_every_stage() -> None:
    first: Channel[int] = Channel(1)
    second: Channel[int] = Channel(1)

    def produce() -> None:
        while True:
            first.put(1)

    def forward() -> None:
        for item in first:
            second.put(item)

    threads = [run_stage("source", produce, first), run_stage("middle", forward, second)]
    second.get()
    first.close()
    second.close()
    assert all(joined(thread) for thread in threads)


def test_close_wakes_a_consumer_that_waits() -> None:
    channel: Channel[int] = Channel(1)
    output: Channel[int] = Channel(1)
    thread = run_stage("consumer", lambda: output.put(channel.get()), output)
    wait_until(lambda: channel.waited_for_input > 0.005)
    channel.close()
    assert joined(thread)
    with pytest.raises(Ended):
        output.get()


def test_nothing_is_kept_of_an_item_that_was_handed_over() -> None:
    channel: Channel[Item] = Channel(2)
    watch: list[weakref.ref[Item]] = []

    def produce() -> None:
        for _ in range(3):
            item = Item()
            watch.append(weakref.ref(item))
            channel.put(item)
            del item

    items = iter(channel)
    thread = run_stage("producer", produce, channel)
    got = next(items)
    assert watch[0]() is got
    del got
    assert joined(thread)
    assert watch[0]() is None  # by reference counting alone, as GPU memory needs it
    got = next(items)
    assert watch[1]() is got
    del got
    assert watch[1]() is None
    assert watch[2]() is not None
    channel.close()
    assert watch[2]() is None


def test_an_item_is_free_while_the_iterator_waits_for_the_next() -> None:
    channel: Channel[Item] = Channel(1)
    watch: list[weakref.ref[Item]] = []
    output: Channel[int] = Channel(1)

    def consume() -> None:
        for item in channel:
            watch.append(weakref.ref(item))
            del item

    item = Item()
    channel.put(item)
    del item
    thread = run_stage("consumer", consume, output)
    wait_until(lambda: bool(watch) and channel.waited_for_input > 0.005)
    wait_until(lambda: watch[0]() is None)
    channel.end()
    assert joined(thread)


def test_waiting_is_counted_on_the_side_that_waits_also_while_it_lasts() -> None:
    channel: Channel[int] = Channel(1)
    thread = run_stage("producer", lambda: put_all(channel, 2), channel)
    wait_until(lambda: channel.waited_for_room > 0.02)
    assert channel.waited_for_input == 0
    assert [channel.get(), channel.get()] == [0, 1]
    assert joined(thread)
    waited = channel.waited_for_room
    assert 0.02 < waited < DEADLINE
    idle: Channel[int] = Channel(1)
    consumer = run_stage("consumer", lambda: drain(idle), channel)
    wait_until(lambda: idle.waited_for_input > 0.02)
    assert idle.waited_for_room == 0
    idle.end()
    assert joined(consumer)
    assert channel.waited_for_room == waited


def test_a_waiting_thread_uses_no_processor_time() -> None:
    channel: Channel[int] = Channel(1)
    used: list[float] = []

    def wait() -> None:
        before = time.thread_time()
        for _ in channel:
            pass
        used.append(time.thread_time() - before)

    thread = run_stage("consumer", wait, Channel(1))
    wait_until(lambda: channel.waited_for_input > 0.5)
    channel.end()
    assert joined(thread)
    assert used[0] < 0.05


def test_a_stage_bears_its_name_and_a_channel_holds_at_least_one() -> None:
    assert run_stage("target", lambda: None, Channel(1)).name == "target"
    with pytest.raises(ValueError, match="capacity 0"):
        Channel(0)


def test_put_after_the_end_is_a_fault_of_the_caller() -> None:
    channel: Channel[int] = Channel(1)
    channel.end()
    with pytest.raises(RuntimeError, match="after the end"):
        channel.put(1)
