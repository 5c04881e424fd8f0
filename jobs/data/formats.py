"""The layouts of rows that people publish, and how each becomes a conversation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import InputError
from .canonical import Conversation, Refused, Turn

LATER = ("sharegpt", "messages", "text")
_LATER_KEYS = {"conversations": "sharegpt", "messages": "messages", "text": "text"}


def detect(row: Mapping[str, Any]) -> str:
    """Name of the format whose keys the row has. Raises Refused when there is none."""
    for name, keys in _KEYS.items():
        if all(key in row for key in keys):
            return name
    later = next((name for key, name in _LATER_KEYS.items() if key in row), None)
    if later is not None:
        raise Refused(f"looks like the format {later}; {_reads()}")
    raise Refused(f"fits no format; {_reads()}")


def check_format(name: str) -> None:
    """Raise InputError unless this version reads the format (or is to detect it)."""
    if name != "auto" and name not in FORMATS:
        raise InputError(f"the format {name} cannot be read; {_reads()}", hint="convert the rows to one of these")


def to_conversation(row: Mapping[str, Any], format_name: str) -> Conversation:
    """The row in canonical form. Raises Refused with the rule that it breaks."""
    conversation = FORMATS[format_name](row)
    if not any(turn.text.strip() for turn in conversation.prompt if turn.role == "user"):
        raise Refused("the prompt is empty")
    if not conversation.answer.strip():
        raise Refused("the answer is empty")
    return conversation


def _alpaca(row: Mapping[str, Any]) -> Conversation:
    instruction = _text(row, "instruction")
    context = _text(row, "input", required=False)
    turns = [Turn("user", f"{instruction}\n\n{context}" if context.strip() else instruction)]
    system = _text(row, "system", required=False)
    if system.strip():
        turns.insert(0, Turn("system", system))
    return Conversation(tuple(turns), _text(row, "output"))


def _pair(prompt: str, answer: str) -> Callable[[Mapping[str, Any]], Conversation]:
    def convert(row: Mapping[str, Any]) -> Conversation:
        return Conversation((Turn("user", _text(row, prompt)),), _text(row, answer))

    return convert


_KEYS = {
    "alpaca": ("instruction", "output"),
    "question/answer": ("question", "answer"),
    "query/response": ("query", "response"),
}
FORMATS: dict[str, Callable[[Mapping[str, Any]], Conversation]] = {
    "alpaca": _alpaca,
    "question/answer": _pair("question", "answer"),
    "query/response": _pair("query", "response"),
}


def _text(row: Mapping[str, Any], key: str, *, required: bool = True) -> str:
    """Text of a field; numbers are written out, an absent optional one is empty."""
    value = row.get(key)
    if value is None:
        if required:
            raise Refused(f"no {key}")
        return ""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return str(value)
    if not isinstance(value, str):
        raise Refused(f"{key} is not text")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise Refused(f"{key} holds half a character (a lone surrogate)")
    return value


def _reads() -> str:
    return f"this version reads {', '.join(FORMATS)}"
