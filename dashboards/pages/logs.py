"""What a job printed: its end while it runs, lines that hold a word, and all of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

from anyio import CapacityLimiter, to_thread
from starlette.responses import Response, StreamingResponse

from ...platform.client import Client
from ...platform.schemas import JobView, LogPart
from ..web import Visit

END_BYTES = 64 << 10
_PIECE_BYTES = 1 << 20
MOST_FOUND = 200
MOST_SEARCHED_BYTES = 64 << 20
_LONGEST_LINE = 2_000


@dataclass(frozen=True)
class Search:
    """Lines of a log that hold what was looked for."""

    words: str
    lines: tuple[tuple[int, str], ...]
    """Number of the line, counted from 1, and its text."""
    complete: bool
    """Whether all of the log was looked at."""


def collect(visit: Visit, job: JobView) -> dict[str, Any]:
    """The end of the log of the attempt that was chosen, or what was looked for in it."""
    attempt = visit.number("attempt", max(1, job.attempt), 1, max(1, job.attempt))
    words = visit.asked("find").strip()[:200]
    if words:
        key = ("find", job.id, attempt, words)
        found = visit.once(key, lambda: search(visit.client, job.id, attempt, words), fresh_s=5.0)
        return {"attempt": attempt, "search": found, "log": None, "find": words}
    part: LogPart = visit.read("log", job.id, attempt=attempt, limit=END_BYTES)
    return {"attempt": attempt, "search": None, "log": part, "find": "", "cut": part.offset > END_BYTES}


def search(client: Client, job_id: str, attempt: int, words: str) -> Search:
    """Lines that hold ``words``, capital or not; the first ones, and of a very long log its beginning."""
    found: list[tuple[int, str]] = []
    wanted, number, read = words.lower(), 0, 0
    for text in pieces(client, job_id, attempt):
        for line in text.splitlines():
            number += 1
            if wanted in line.lower():
                found.append((number, line[:_LONGEST_LINE]))
                if len(found) == MOST_FOUND:
                    return Search(words, tuple(found), False)
        read += len(text)
        if read > MOST_SEARCHED_BYTES:
            return Search(words, tuple(found), False)
    return Search(words, tuple(found), True)


def pieces(client: Client, job_id: str, attempt: int) -> Iterator[str]:
    """All of a log, piece by piece; each ends where a line does, but for the last."""
    offset = 0
    while True:
        part = client.log(job_id, offset=offset, limit=_PIECE_BYTES, attempt=attempt)
        if part.offset == offset:
            return
        yield part.text
        offset = part.offset


def whole(visit: Visit) -> Response:
    """The log as a text file, however long it is."""
    job: JobView = visit.read("job", visit.job_id)
    attempt = visit.number("attempt", max(1, job.attempt), 1, max(1, job.attempt))
    headers = {"content-disposition": f'attachment; filename="{job.id}-{attempt}.txt"'}
    body = _in_threads(pieces(visit.client, job.id, attempt), visit.state.threads)
    return StreamingResponse(body, media_type="text/plain; charset=utf-8", headers=headers)


async def _in_threads(texts: Iterator[str], threads: CapacityLimiter) -> AsyncIterator[str]:
    """Wait for each piece in a thread of the pages: those of the API have to stay free to answer."""
    while (piece := await to_thread.run_sync(lambda: next(texts, None), limiter=threads)) is not None:
        yield piece
