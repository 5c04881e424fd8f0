"""Answers of the API, kept for a moment: fifty open pages ask it no more often than one."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

Answer = TypeVar("Answer")

FRESH_S = 1.5
"""How long an answer is passed on to others who ask the same."""
_MOST = 2_000


@dataclass
class _Kept:
    lock: threading.Lock = field(default_factory=threading.Lock)
    at: float = float("-inf")
    answer: Any = None


class Reads:
    """Kept answers of many users; what one may not see is never shown to them, because the token is part of the key."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: dict[tuple[Any, ...], _Kept] = {}

    def get(self, token: str, key: tuple[Any, ...], ask: Callable[[], Answer], fresh_s: float = FRESH_S) -> Answer:
        """The kept answer to ``key``, or that of ``ask``; who asks meanwhile waits for it. Errors are not kept."""
        place = self._place((hashlib.sha256(token.encode()).digest(), *key))
        with place.lock:
            if self._clock() - place.at > fresh_s:
                place.answer, place.at = ask(), self._clock()
            found: Answer = place.answer
            return found

    def forget(self, token: str) -> None:
        """Ask anew: this user has changed something."""
        whose = hashlib.sha256(token.encode()).digest()
        with self._lock:
            self._kept = {key: kept for key, kept in self._kept.items() if key[0] != whose}

    def _place(self, key: tuple[Any, ...]) -> _Kept:
        with self._lock:
            if len(self._kept) > _MOST:
                newest = sorted(self._kept.items(), key=lambda item: item[1].at)[-_MOST // 2 :]
                self._kept = dict(newest)
            return self._kept.setdefault(key, _Kept())
