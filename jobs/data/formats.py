"""The layouts of rows that people publish, and how each becomes a conversation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from . import chats
from .canonical import Conversation, Message, PlainText, Refused
from .fields import content_of, text_of
from .preferences import Pair, preference

Converted = Conversation | PlainText | Pair


def detect(row: Mapping[str, Any]) -> str:
    """Name of the format whose keys the row has. Raises Refused when there is none."""
    for name, keys in _KEYS.items():
        if all(key in row for key in keys):
            return name
    raise Refused(f"fits no format; known are {', '.join(FORMATS)}")


def to_conversation(row: Mapping[str, Any], format_name: str) -> Converted:
    """The row in canonical form. Raises Refused with the rule that it breaks."""
    converted = FORMATS[format_name](row)
    if isinstance(converted, PlainText):
        if not converted.text.strip():
            raise Refused("the text is empty")
        return converted
    for conversation in (converted.chosen, converted.rejected) if isinstance(converted, Pair) else (converted,):
        _check(conversation)
    return converted


def _check(conversation: Conversation) -> None:
    *before, last = conversation.messages
    if last.role != "assistant":
        raise Refused(f"the last turn is of the {last.role}, not of the assistant")
    if not any(message.text.strip() for message in before if message.role in ("user", "tool")):
        raise Refused("the prompt is empty")
    if not last.text.strip() and not last.tool_calls:
        raise Refused("the answer is empty")
    if not any(message.learned for message in conversation.messages if message.role == "assistant"):
        raise Refused("no turn carries the loss")


def _alpaca(row: Mapping[str, Any]) -> Conversation:
    instruction = text_of(row, "instruction")
    context = text_of(row, "input", required=False)
    turns = [Message("user", f"{instruction}\n\n{context}" if context.strip() else instruction)]
    system = text_of(row, "system", required=False)
    first = [Message("system", system)] if system.strip() else []
    answer = Message("assistant", text_of(row, "output"))
    return Conversation((*first, *_history(row.get("history")), *turns, answer))


def _history(value: Any) -> list[Message]:
    """Earlier pairs of question and answer."""
    turns: list[Message] = []
    for pair in value or ():
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise Refused("history is not a list of pairs")
        question, answer = (content_of(part, "history") for part in pair)
        turns += [Message("user", question), Message("assistant", answer)]
    return turns


def _pair(prompt: str, answer: str) -> Callable[[Mapping[str, Any]], Conversation]:
    def convert(row: Mapping[str, Any]) -> Conversation:
        return Conversation((Message("user", text_of(row, prompt)), Message("assistant", text_of(row, answer))))

    return convert


def _text(row: Mapping[str, Any]) -> PlainText:
    return PlainText(text_of(row, "text"))


_KEYS = {
    "preference": ("chosen", "rejected"),
    "alpaca": ("instruction", "output"),
    "question/answer": ("question", "answer"),
    "query/response": ("query", "response"),
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "text": ("text",),
}
FORMATS: dict[str, Callable[[Mapping[str, Any]], Converted]] = {
    "preference": preference,
    "alpaca": _alpaca,
    "question/answer": _pair("question", "answer"),
    "query/response": _pair("query", "response"),
    "messages": chats.messages,
    "sharegpt": chats.sharegpt,
    "text": _text,
}
