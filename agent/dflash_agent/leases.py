"""Which run has which GPU: a write lock on a file for each GPU, kept open in systemd's file descriptor store.

The lock is of the open file description (fcntl(2), F_OFD_SETLK), so it lives for as long as anybody has the
descriptor: systemd keeps it through every crash and restart of the unit and closes it when the unit ends. What
the file says is only who that is; whether the lease holds is the kernel's word.
"""

import contextlib
import fcntl
import json
import os
import select
import struct
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

LEASES_DIR = Path("/run/dflash/leases")
NAME_IN_STORE = "gpu-"  # and the UUID; systemd allows 255 characters
BARRIER_SECONDS = 10
_FLOCK = "hhqqi4x"  # struct flock: type, whence, start, length, pid


class Leased(Exception):
    """A GPU that another unit has; str() names it."""

    def __init__(self, lease: "Lease") -> None:
        super().__init__(f"leased by {lease.unit or 'an unknown unit'}")
        self.lease = lease


class StoreFailed(Exception):
    """systemd did not take a descriptor; str() says why."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease that holds."""

    uuid: str
    unit: str  # empty if the file does not tell
    since: float


def acquire(uuid: str, unit: str, directory: Path = LEASES_DIR) -> int:
    """The descriptor that holds the lease of a GPU. Raises Leased, OSError."""
    path = directory / uuid
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    try:
        lock = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, lock)
        except (BlockingIOError, PermissionError) as error:
            raise Leased(_read(path, uuid)) from error
        text = json.dumps(asdict(Lease(uuid, unit, time.time()))).encode()
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def current(directory: Path = LEASES_DIR) -> Mapping[str, Lease]:
    """The leases that hold, by UUID; those whose files may not be read are left out."""
    found = {}
    with contextlib.suppress(OSError):
        for path in directory.iterdir():
            with contextlib.suppress(OSError):
                if _locked(path):
                    found[path.name] = _read(path, path.name)
    return found


def _locked(path: Path) -> bool:
    """Whether somebody holds the lease; asking does not disturb an acquire. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        lock = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, lock)
    finally:
        os.close(descriptor)
    return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)


def _read(path: Path, uuid: str) -> Lease:
    try:
        values = json.loads(path.read_text())
        return Lease(uuid, str(values["unit"]), float(values["since"]))
    except (OSError, ValueError, KeyError, TypeError):  # just being written
        return Lease(uuid, "", 0.0)


def keep(uuid: str, descriptor: int) -> None:
    """Gives the descriptor to systemd, for as long as the unit lives. Raises StoreFailed."""
    _notify(f"FDSTORE=1\nFDNAME={NAME_IN_STORE}{uuid}\nFDPOLL=0", [descriptor])
    barrier()


def drop(uuid: str) -> None:
    """Has systemd close the lease of a GPU that the unit no longer uses. Raises StoreFailed."""
    _notify(f"FDSTOREREMOVE=1\nFDNAME={NAME_IN_STORE}{uuid}", [])
    barrier()


def barrier() -> None:
    """Returns when systemd has worked off what it was told before (sd_notify_barrier(3)). Raises StoreFailed."""
    ours, theirs = os.pipe2(os.O_CLOEXEC)
    try:
        try:
            _notify("BARRIER=1", [theirs])
        finally:
            os.close(theirs)
        poll = select.poll()
        poll.register(ours, 0)
        if not poll.poll(BARRIER_SECONDS * 1000):
            raise StoreFailed(f"systemd did not answer within {BARRIER_SECONDS} s")
    finally:
        os.close(ours)


def _notify(state: str, descriptors: list[int]) -> None:
    from systemd import daemon

    if not daemon.notify(state, fds=descriptors):
        raise StoreFailed("there is no notification socket: the unit needs NotifyAccess=exec")


def kept_here(given: Mapping[str, str]) -> dict[str, int]:
    """Leases that systemd has handed to this process (sd_listen_fds(3)): descriptor by UUID."""
    if given.get("LISTEN_PID") != str(os.getpid()):
        return {}
    names = given.get("LISTEN_FDNAMES", "").split(":")
    found = {name: 3 + i for i, name in enumerate(names)}
    return {name.removeprefix(NAME_IN_STORE): fd for name, fd in found.items() if name.startswith(NAME_IN_STORE)}
