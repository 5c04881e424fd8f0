"""Preference pairs: one prompt, an answer that was chosen and one that was rejected, in the layouts people publish."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from . import chats
from .canonical import Conversation, Message, Refused
from .fields import text_of

_PROMPTS = ("prompt", "question", "query", "instruction")
_TURNS = ("prompt", "conversations", "messages")


@dataclass(frozen=True, slots=True)
class Pair:
    """Two conversations that differ in their last turn, which alone carries the loss."""

    chosen: Conversation
    rejected: Conversation


def preference(row: Mapping[str, Any]) -> Pair:
    """``chosen`` and ``rejected``: texts, turns, or whole conversations.

    The prompt is a text (``prompt``, ``question``, ``query``, ``instruction`` with ``input``), a list of turns
    (``prompt``, ``conversations``, ``messages``), or the beginning of whole conversations.
    """
    if row.get("chosen") == row.get("rejected"):
        raise Refused("chosen and rejected are the same")
    return Pair(_conversation(row, "chosen"), _conversation(row, "rejected"))


def _conversation(row: Mapping[str, Any], side: str) -> Conversation:
    value = row.get(side)
    if isinstance(value, list) and len(value) > 1:
        turns: list[Any] = list(value)
    elif isinstance(value, list | Mapping):
        turns = [*_prompt(row), *(value if isinstance(value, list) else [value])]
    else:
        turns = [*_prompt(row), {"role": "assistant", "content": text_of(row, side)}]
    given = {key: row[key] for key in ("system", "tools") if key in row}
    return _only_last_learned(chats.messages({**given, "messages": turns}))


def _prompt(row: Mapping[str, Any]) -> list[Any]:
    """The turns before the answer."""
    for key in _TURNS:
        if isinstance(row.get(key), list):
            return list(row[key])
    name = next((key for key in _PROMPTS if row.get(key) is not None), None)
    if name is None:
        raise Refused(f"no prompt: none of {', '.join(dict.fromkeys((*_PROMPTS, *_TURNS)))}")
    text, context = text_of(row, name), text_of(row, "input", required=False)
    return [{"role": "user", "content": f"{text}\n\n{context}" if context.strip() else text}]


def _only_last_learned(conversation: Conversation) -> Conversation:
    *before, last = conversation.messages
    quiet: list[Message] = [replace(m, learned=False) if m.role == "assistant" else m for m in before]
    return replace(conversation, messages=(*quiet, last))
