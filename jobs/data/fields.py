"""Values of a row as text, as JSON, as a list: what is none is refused with the name of its field."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from .canonical import Refused


def text_of(row: Mapping[str, Any], key: str, *, required: bool = True) -> str:
    """Text of a field; numbers are written out, an absent optional one is empty."""
    value = row.get(key)
    if value is None:
        if required:
            raise Refused(f"no {key}")
        return ""
    return as_text(value, key)


def as_text(value: Any, key: str) -> str:
    """A value as text. Raises Refused unless it is text or a finite number."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return str(value)
    if not isinstance(value, str):
        raise Refused(f"{key} is not text")
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise Refused(f"{key} holds half a character (a lone surrogate)")
    return value


def content_of(value: Any, key: str) -> str:
    """The text of a message: null is empty, a list of text parts is joined. Raises Refused for images and the like."""
    if value is None:
        return ""
    if not isinstance(value, list):
        return as_text(value, key)
    texts = []
    for part in value:
        if isinstance(part, Mapping) and part.get("type", "text") == "text":
            texts.append(text_of(part, "text"))
        elif isinstance(part, str):
            texts.append(as_text(part, key))
        else:
            raise Refused(f"{key} holds more than text")
    return "".join(texts)


def parsed(value: Any, key: str) -> Any:
    """A JSON value that may be given as JSON text; empty text and "null" are None. Raises Refused if it is no JSON."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise Refused(f"{key} is not valid JSON") from None
