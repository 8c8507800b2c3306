"""Time as an argument: the only module that reads the system's clock."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of time in seconds."""

    def monotonic_s(self) -> float:
        """Seconds since an arbitrary origin; never goes back."""
        ...

    def wall_s(self) -> float:
        """Seconds since the Unix epoch; may jump."""
        ...


class SystemClock:
    """The operating system's clocks. Any thread may call it."""

    def monotonic_s(self) -> float:
        return time.monotonic()

    def wall_s(self) -> float:
        return time.time()


class ManualClock:
    """A clock that stands still until a test or a simulator moves it."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def monotonic_s(self) -> float:
        return self._now_s

    def wall_s(self) -> float:
        return self._now_s

    def advance(self, by_s: float) -> None:
        """Move the clock forward by ``by_s`` seconds (>= 0)."""
        if by_s < 0:
            raise ValueError(f"by_s={by_s} would move the clock back")
        self._now_s += by_s
