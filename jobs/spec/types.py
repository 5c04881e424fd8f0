"""Field types of the job file that are more than a number or a word."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ..errors import InputError
from ..units import MOST_BYTES, MOST_ROWS, parse_bytes

_MOST = 10**12


def _auto_or_count(value: Any) -> Any:
    if value == "auto" or (type(value) is int and 1 <= value <= MOST_ROWS):
        return value
    raise ValueError(f"must be auto or a whole number from 1 to {MOST_ROWS:,}")


def _auto_or_bytes(value: Any) -> Any:
    if value == "auto":
        return value
    try:
        size = parse_bytes(value) if type(value) in (int, str) else 0
    except InputError:
        size = 0
    if not 1 <= size <= MOST_BYTES:
        raise ValueError("must be auto or an amount of memory such as 70GB or 96GiB")
    return size


def _all_linear_or_names(value: Any) -> Any:
    if value == "all-linear":
        return value
    if isinstance(value, list | tuple) and value and all(isinstance(name, str) and name for name in value):
        return tuple(value)
    raise ValueError("must be all-linear or a list of names such as [q_proj, v_proj]")


AutoCount = Annotated[int | Literal["auto"], BeforeValidator(_auto_or_count)]
"""``auto`` or rows."""
AutoBytes = Annotated[int | Literal["auto"], BeforeValidator(_auto_or_bytes)]
"""``auto`` or bytes, written as ``70GB``, ``96GiB`` or a plain number."""
Targets = Annotated[Literal["all-linear"] | tuple[str, ...], BeforeValidator(_all_linear_or_names)]
"""``all-linear`` or names of modules, at least one."""
Count = Annotated[int, Field(ge=1, le=_MOST)]
Rows = Annotated[int, Field(ge=1, le=MOST_ROWS)]
Share = Annotated[float, Field(ge=0, le=1)]
Text = Annotated[str, Field(min_length=1)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
"""Letters, digits, dots, dashes and underscores: it becomes a folder and a run name."""
Seed = Annotated[int, Field(ge=0, lt=1 << 32)]
"""What every generator of random numbers takes."""
