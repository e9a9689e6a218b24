"""What a check found: one line with a code, a severity and what to do."""

from dataclasses import dataclass
from typing import Literal

Severity = Literal["ok", "warn", "refuse"]


@dataclass(frozen=True, slots=True)
class Finding:
    """`code` is one of those that the manual lists; `hint` is something that can be typed or changed."""

    code: str
    severity: Severity
    text: str
    hint: str = ""
    gpu: str = ""  # UUID of the GPU that it is about
    pid: int = 0  # of the process that it is about

    def line(self) -> str:
        """For people: severity, code, text and hint on one line."""
        return f"{self.severity:6}  {self.code}: {self.text}" + (f"; {self.hint}" if self.hint else "")
