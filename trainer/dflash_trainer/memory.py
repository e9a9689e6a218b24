"""What is done when a GPU's memory does not suffice for a batch: it is worked off in pieces of fewer rows.

How large a piece may be is remembered in the output directory, so that the next attempt begins with it.
"""

import contextlib
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from dflash_agent import outputs

from dflash_trainer.errors import is_out_of_memory
from dflash_trainer.journal import WARNING, log

T = TypeVar("T")


class PieceLimit:
    """The most tokens, padding included, that are worked on at a time; 0 as long as whole batches have fitted.

    Target and drafter share it, each in its own thread. `splits` counts the batches that did not fit.
    """

    def __init__(self, output: Path) -> None:
        self.tokens = 0
        self.splits = 0
        self._file = output / outputs.PIECES_FILE
        self._lock = threading.Lock()
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            self.tokens = int(json.loads(self._file.read_text())["tokens"])
            log(
                f"batches are worked off in pieces of at most {self.tokens} tokens: an earlier attempt ran out "
                f"of GPU memory; to try whole ones again, remove {self._file}",
                event="pieces",
            )

    def in_pieces(
        self, rows: int, length: int, work: Callable[[int, int], T], again: Callable[[], None], step: int
    ) -> list[T]:
        """work(begin, end) for all rows of a batch, each `length` tokens long, in as few pieces as fit.

        After running out of memory it begins anew with smaller pieces, and with again(). Raises the out-of-memory
        error if one row does not fit.
        """
        while True:
            size = max(1, self.tokens // length) if self.tokens else rows
            try:
                return [work(begin, min(rows, begin + size)) for begin in range(0, rows, size)]
            except RuntimeError as error:
                if not is_out_of_memory(error) or size == 1 or rows == 1:
                    raise
                reason = str(error).strip().partition("\n")[0]
            # Outside the handler: the error holds the frames, and those the tensors of the piece.
            again()
            _give_back_cache()
            self._lower((min(size, rows) // 2) * length, step, reason)

    def _lower(self, tokens: int, step: int, reason: str) -> None:
        with self._lock:
            self.splits += 1
            self.tokens = min(tokens, self.tokens or tokens)
            log(
                f"step {step}: {reason}; from now on in pieces of at most {self.tokens} tokens",
                event="out-of-memory",
                priority=WARNING,
                step=step,
                tokens=self.tokens,
            )
            with contextlib.suppress(OSError):  # the next attempt finds out by itself
                self._file.write_text(json.dumps({"tokens": self.tokens}) + "\n")


def _give_back_cache() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()
