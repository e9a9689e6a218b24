"""What happens to files, as the kernel tells it (inotify(7)): unlike GLib's monitors, opening and closing too."""

import contextlib
import ctypes
import os
import struct
from collections.abc import Iterator
from pathlib import Path

CLOSE_WRITE, CLOSE_NOWRITE, OPEN = 0x8, 0x10, 0x20
MOVED_FROM, MOVED_TO, CREATE, DELETE = 0x40, 0x80, 0x100, 0x200
OVERFLOW = 0x4000  # the kernel keeps max_queued_events; what came after is lost
_EVENT = struct.Struct("iIII")
_LIBC = ctypes.CDLL(None, use_errno=True)


class Inotify:
    """Watches on files and directories, for as long as this is kept; its descriptor is readable on events.

    Raises OSError if the kernel has no more of these.
    """

    def __init__(self) -> None:
        self.descriptor: int = _LIBC.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self.descriptor < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"inotify: {os.strerror(number)}; see fs.inotify in sysctl")

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)

    def add(self, path: Path, mask: int) -> None:
        """Watches a path; one that is not there is not watched."""
        _LIBC.inotify_add_watch(self.descriptor, os.fsencode(path), mask)

    def events(self) -> Iterator[tuple[int, str]]:
        """Mask, and name in the directory, of each event that is there; does not wait."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.descriptor, 1 << 16):
                while data:
                    _, mask, _, length = _EVENT.unpack_from(data)
                    yield mask, data[_EVENT.size : _EVENT.size + length].rstrip(b"\0").decode(errors="replace")
                    data = data[_EVENT.size + length :]
