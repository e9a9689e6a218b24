"""Bounded channels between the stages of the pipeline, one thread at each end.

A channel hands over ownership, carries the producer's end or error to the consumer, wakes a producer whose
consumer has gone, and counts how long either side waited. Nobody polls or sleeps.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Ended(Exception):
    """The producer has no more items."""


class Closed(Exception):
    """The consumer has gone; the producer's work is not wanted any more."""


class Channel(Generic[T]):
    """At most `capacity` items on their way from one thread to another."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity {capacity}: a channel holds at least one item")
        self._capacity = capacity
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._ending: BaseException | None = None
        self._closed = False
        self._passed = 0
        self._for_room = _Waiting()
        self._for_input = _Waiting()

    def put(self, item: T) -> None:
        """Hands an item over; waits while the channel is full. Raises Closed if the consumer has gone."""
        with self._changed:
            with self._for_room:
                self._changed.wait_for(lambda: self._closed or len(self._items) < self._capacity)
            if self._closed:
                raise Closed
            if self._ending is not None:
                raise RuntimeError("put after the end of the channel")
            self._items.append(item)
            self._changed.notify_all()

    def get(self) -> T:
        """The next item. Raises Ended after the last one, the error that the producer died of, or Closed."""
        with self._changed:
            with self._for_input:
                self._changed.wait_for(lambda: self._items or self._ending is not None or self._closed)
            if self._items:
                self._passed += 1
                self._changed.notify_all()
                return self._items.popleft()
            if self._ending is not None:
                raise self._ending
            raise Closed

    def __iter__(self) -> Iterator[T]:
        while True:
            try:
                yield self.get()  # through no variable: this frame must not keep it alive
            except Ended:
                return

    def end(self) -> None:
        """Tells the consumer that no more items come."""
        self.fail(Ended())

    def fail(self, error: BaseException) -> None:
        """Lets the consumer's get raise `error`, with its traceback, once it has taken what is there."""
        with self._changed:
            if self._ending is None:
                self._ending = error
            self._changed.notify_all()

    def close(self) -> None:
        """Drops what is in the channel and wakes both sides; called by the consumer when it stops."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()

    @property
    def passed(self) -> int:
        """Items that the consumer has taken."""
        with self._changed:
            return self._passed

    @property
    def waited_for_room(self) -> float:
        """Seconds that the producer has waited, the wait under way included."""
        with self._changed:
            return self._for_room.seconds()

    @property
    def waited_for_input(self) -> float:
        """Seconds that the consumer has waited, the wait under way included."""
        with self._changed:
            return self._for_input.seconds()


class _Waiting:
    """The time spent inside its context by one thread; another may ask in between."""

    def __init__(self) -> None:
        self._before = 0.0
        self._since: float | None = None

    def __enter__(self) -> None:
        self._since = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._before, self._since = self.seconds(), None

    def seconds(self) -> float:
        """So far."""
        return self._before + (time.monotonic() - self._since if self._since is not None else 0.0)


def run_stage(name: str, work: Callable[[], None], output: Channel[Any]) -> threading.Thread:
    """Starts a thread for one stage; its end, or the error that it dies of, goes into its output channel.

    Closed out of `work` is an end too: somebody downstream has stopped.
    """

    def body() -> None:
        try:
            work()
        except Closed:
            output.end()
        except BaseException as error:  # noqa: BLE001 - it is raised again, in the consumer
            output.fail(error)
        else:
            output.end()

    thread = threading.Thread(target=body, name=name, daemon=True)
    thread.start()
    return thread
