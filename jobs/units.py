"""Quantities people write, as values: ``"96GiB"`` is bytes and ``"24h"`` is seconds, once, at the door."""

from __future__ import annotations

import re
from datetime import datetime
from decimal import Decimal
from typing import Annotated

from pydantic import BeforeValidator, ByteSize

from .errors import InputError

MOST_ROWS = 65_536
"""Of a batch. Beyond this, and beyond `MOST_TOKENS`, a number is a slip of the finger."""
MOST_TOKENS = 4_194_304
"""Of a row."""
MOST_LAYERS = 1024
"""Of a model; the deepest that anybody trains have an eighth of it."""
MOST_BYTES = 1 << 60
"""Of any memory."""
MOST_SOLVE_S = 86_400.0
"""In the solver."""
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([smhd])\s*")
_BYTES = re.compile(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?|\.[0-9]{1,30})\s*(?:([kmgtp])(i?))?b?\s*", re.IGNORECASE)
_POWERS = {prefix: power for power, prefix in enumerate("kmgtp", 1)}


def parse_bytes(text: str | int) -> int:
    """Bytes of ``"96GiB"`` (binary), ``"70GB"`` (decimal) or a number, at most `MOST_BYTES`. Raises InputError."""
    match = _BYTES.fullmatch(str(text))
    size = MOST_BYTES + 1
    if match is not None:
        number, prefix, binary = match.groups()
        size = int(Decimal(number) * (1024 if binary else 1000) ** _POWERS.get((prefix or "").lower(), 0))
    if size > MOST_BYTES:
        raise InputError(f"{text!r} is not an amount of memory", hint="write for example 70GB or 96GiB")
    return size


def format_bytes(size: float) -> str:
    """``1536`` becomes ``"1.5KiB"``."""
    return ByteSize(int(size)).human_readable()


def format_needed(size: int) -> str:
    """As `format_bytes`, but rounded up: whoever gives as much as it says has given enough."""
    power = min(max(size.bit_length() - 1, 0) // 10, len(_POWERS))
    tenths = -(-size * 10 // 1024**power)
    return f"{tenths // 10}.{tenths % 10}{'KMGTP'[power - 1]}iB" if power else f"{size}B"


def parse_duration(text: str | float) -> float:
    """Seconds of ``"90s"``, ``"15m"``, ``"24h"``, ``"2d"`` or a plain number of seconds. Raises ValueError."""
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        return float(text)
    match = _DURATION.fullmatch(str(text))
    if match is None:
        raise ValueError("a duration is a number and a unit, for example 90s, 15m, 24h or 2d")
    return float(match[1]) * _SECONDS[match[2]]


def parse_moment(value: object) -> float:
    """Unix seconds of an ISO 8601 date and time (local time without a zone), or of a number of them. ValueError."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str):
        value = datetime.fromisoformat(value.replace("Z", "+00:00"))
    if not isinstance(value, datetime):
        raise ValueError("a moment is a date and a time, for example 2027-01-31 08:00")
    return value.timestamp()


Moment = Annotated[float, BeforeValidator(parse_moment)]
"""A pydantic field of Unix seconds that accepts ``"2027-01-31 08:00"``."""
Duration = Annotated[float, BeforeValidator(parse_duration)]
"""A pydantic field of seconds that accepts ``"24h"``."""
