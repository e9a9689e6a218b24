"""What takes time, done in threads beside GLib's main loop and shown in it."""

import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from gi.repository import GLib

T = TypeVar("T")


class Fresh(Generic[T]):
    """Something that takes time to make: one thread makes it, and those who ask meanwhile get the same."""

    def __init__(self, make: Callable[[], T], made: Callable[[T], None]) -> None:
        self._make, self._made = make, made
        self._lock = threading.Lock()
        self._value: tuple[float, T] | None = None
        self.busy = False

    def get(self, age: float = 0.0) -> T:
        """One whose making began at most so many seconds before this call."""
        asked = time.monotonic()
        with self._lock:
            if self._value is None or self._value[0] < asked - age:
                began = time.monotonic()
                self.busy = True  # until it has been adopted
                try:
                    self._value = (began, self._make())
                    GLib.idle_add(self._adopt, self._value[1])
                except BaseException:
                    self.busy = False
                    raise
            return self._value[1]

    def _adopt(self, value: T) -> None:
        self._made(value)
        self.busy = False


class Later:
    """Something that is done in a thread, once for all who ask while it is not yet due."""

    def __init__(self, do: Callable[[], Any]) -> None:
        self._do = do
        self._due = float("inf")
        self._timer = 0

    def within(self, seconds: float) -> None:
        """Has it done after so many seconds at most."""
        due = time.monotonic() + seconds
        if due >= self._due:
            return
        if self._timer:
            GLib.source_remove(self._timer)
        self._due = due
        self._timer = GLib.timeout_add(int(seconds * 1000), self._now)

    def _now(self) -> bool:
        self._due, self._timer = float("inf"), 0
        in_thread(self._do)
        return False


def in_thread(function: Callable[..., Any], *arguments: Any) -> None:
    """Runs it beside the main loop; it does not keep the process alive."""
    threading.Thread(target=function, args=arguments, daemon=True).start()
