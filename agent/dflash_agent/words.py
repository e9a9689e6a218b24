"""Figures for people."""

import time


def printable(text: str) -> str:
    """Text that others have chosen, as a process its name: on one line, and nothing in it that a terminal obeys.

    >>> printable("red\\x1b[31m\\nbytes\\udcff")
    'red?[31m bytes?'
    """
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))


def size(count: float) -> str:
    """Bytes.

    >>> size(17_000_000_000), size(512)
    ('15.8 GiB', '512 B')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.1f} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1024
    return f"{count:.1f} TiB"


def age(since: float) -> str:
    """How long ago a moment was, in its largest unit.

    >>> age(time.time() - 7300)
    '2 h'
    """
    return span(time.time() - since)


def span(seconds: float) -> str:
    """A length of time, in its largest unit.

    >>> span(90), span(2.4)
    ('2 min', '2 s')
    """
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
