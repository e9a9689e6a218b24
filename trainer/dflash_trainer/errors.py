"""The two ways in which a run ends on purpose; the exit codes are the contract with the unit."""

EXIT_TRY_AGAIN = 75
EXIT_CANNOT_START = 78


class CannotStart(Exception):
    """The run cannot start as configured: exit 78, which the unit does not restart. str() is one line."""


class TryAgain(Exception):
    """Worth another attempt (out of memory, a lost peer, I/O): exit 75. str() is one line."""
