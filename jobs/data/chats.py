"""Conversations of many turns: ShareGPT's and OpenAI's layouts, with system turns, tools and tool results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .canonical import Conversation, Message, Refused, Role, ToolCall
from .fields import as_text, content_of, parsed, text_of

ROLES: dict[str, Role | str] = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user", "prompter": "user",
    "assistant": "assistant", "gpt": "assistant", "model": "assistant", "chatgpt": "assistant",
    "tool": "tool", "observation": "tool", "function": "tool", "function_response": "tool", "tool_response": "tool",
    "ipython": "tool",
    "function_call": "calls", "tool_call": "calls",
}  # fmt: skip
"""What people call the roles; ``calls`` is an assistant's turn whose text is its calls as JSON."""


def sharegpt(row: Mapping[str, Any]) -> Conversation:
    """``conversations`` of ``from`` and ``value``, with ``system`` and ``tools`` beside them."""
    return _chat(row, "conversations")


def messages(row: Mapping[str, Any]) -> Conversation:
    """``messages`` of ``role`` and ``content``, with ``tool_calls``, ``tools`` and ``system``."""
    return _chat(row, "messages")


def _chat(row: Mapping[str, Any], key: str) -> Conversation:
    turns = parsed(row.get(key), key)
    if turns is None:
        raise Refused(f"no {key}")
    if not isinstance(turns, list):
        raise Refused(f"{key} is not a list")
    if not turns:
        raise Refused("the conversation is empty")
    read = [_message(turn) for turn in turns]
    system = text_of(row, "system", required=False)
    if system.strip() and read[0].role != "system":
        read.insert(0, Message("system", system))
    return Conversation(tuple(read), _tools(row.get("tools")))


def _message(turn: Any) -> Message:
    if not isinstance(turn, Mapping):
        raise Refused("a turn is not a JSON object")
    role = _role(turn)
    content = next((turn[key] for key in ("content", "value") if turn.get(key) is not None), None)
    if role == "tool" and isinstance(content, Mapping):
        content = json.dumps(content, ensure_ascii=False)
    text = content_of(content, "content")
    if role == "calls":
        return Message("assistant", "", _calls(text, "function_call"), learned=_learned(turn))
    if role == "tool":
        return Message("tool", text, name=_label(turn, "name"), tool_call_id=_label(turn, "tool_call_id"))
    if role != "assistant":
        return Message(role, text)  # type: ignore[arg-type]  # the table holds no other word
    calls = _calls(turn.get("tool_calls") or turn.get("function_call"), "tool_calls")
    reasoning = content_of(turn.get("reasoning_content"), "reasoning_content")
    return Message("assistant", text, calls, reasoning=reasoning, learned=_learned(turn))


def _role(turn: Mapping[str, Any]) -> Role | str:
    name = next((turn[key] for key in ("role", "from") if turn.get(key) is not None), None)
    if name is None:
        raise Refused("a turn has no role")
    role = ROLES.get(name.strip().lower()) if isinstance(name, str) else None
    if role is None:
        raise Refused(f"unknown role {str(name)[:40]!r}; known are {', '.join(ROLES)}")
    return role


def _learned(turn: Mapping[str, Any]) -> bool:
    """False where the data says ``weight: 0`` or ``train: false``."""
    return not any(key in turn and turn[key] in (0, False) for key in ("weight", "train"))


def _label(turn: Mapping[str, Any], key: str) -> str:
    value = turn.get(key)
    return "" if value is None else as_text(value, key)


def _calls(value: Any, key: str) -> tuple[ToolCall, ...]:
    value = parsed(value, key)
    if value is None:
        return ()
    return tuple(_call(call, key) for call in (value if isinstance(value, list) else [value]))


def _call(call: Any, key: str) -> ToolCall:
    if not isinstance(call, Mapping):
        raise Refused(f"an entry of {key} is not a JSON object")
    function = call["function"] if isinstance(call.get("function"), Mapping) else call
    arguments = parsed(function.get("arguments", function.get("parameters")), "arguments of a tool call")
    if arguments is not None and not isinstance(arguments, Mapping):
        raise Refused("arguments of a tool call are no JSON object")
    return ToolCall(text_of(function, "name"), dict(arguments or {}), _label(call, "id"))


def _tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    value = parsed(value, "tools")
    if value is None:
        return ()
    entries: Sequence[Any] = value if isinstance(value, list) else [value]
    entries = [parsed(entry, "tools") for entry in entries]
    if not all(isinstance(entry, Mapping) for entry in entries):
        raise Refused("an entry of tools is not a JSON object")
    return tuple(entry if "function" in entry else {"type": "function", "function": entry} for entry in entries)
