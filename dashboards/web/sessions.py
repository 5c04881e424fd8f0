"""Who is signed in. The browser holds a random word; the token that it stands for never leaves this process."""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

IDLE_S = 12 * 3600.0
"""A session that nobody used for this long is over."""
_MOST = 10_000


@dataclass
class Session:
    """One browser that signed in."""

    token: str
    seen_at: float


class Sessions:
    """Sessions of this process, by the digest of the word that the browser holds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[str, Session] = {}

    def begin(self, token: str) -> str:
        """A new session; the word for the browser."""
        word = secrets.token_urlsafe(32)
        with self._lock:
            self._forget_old()
            self._known[_digest(word)] = Session(token, self._clock())
        return word

    def find(self, word: str) -> Session | None:
        """The session that the word belongs to, unless it is over."""
        with self._lock:
            session = self._known.get(_digest(word))
            if session is None or self._clock() - session.seen_at > IDLE_S:
                return None
            session.seen_at = self._clock()
            return session

    def end(self, word: str) -> None:
        """Sign out."""
        with self._lock:
            self._known.pop(_digest(word), None)

    def _forget_old(self) -> None:
        now = self._clock()
        kept = [(key, s) for key, s in self._known.items() if now - s.seen_at <= IDLE_S]
        self._known = dict(kept[-(_MOST - 1) :])


def _digest(word: str) -> str:
    return hashlib.sha256(word.encode()).hexdigest()
