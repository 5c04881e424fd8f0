"""The one shape that every format becomes before anything else looks at it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model makes; ``arguments`` is a mapping, empty when the data has none."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. Only the assistant has tool calls and reasoning; only a tool's result names its tool and call."""

    role: Role
    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    name: str = ""
    tool_call_id: str = ""
    learned: bool = True
    """Whether an assistant turn carries the loss; data may switch it off turn by turn."""

    def to_template(self) -> dict[str, Any]:
        """The message as chat templates take it: a key that the data lacks is absent."""
        message: dict[str, Any] = {"role": self.role, "content": self.text}
        if self.tool_calls:
            message["tool_calls"] = [_call(call) for call in self.tool_calls]
        optional = {"reasoning_content": self.reasoning, "name": self.name, "tool_call_id": self.tool_call_id}
        return message | {key: value for key, value in optional.items() if value}


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns in any order, the last one the assistant's; ``tools`` are JSON schemas of what it may call."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class PlainText:
    """Text without turns: all of it carries the loss."""

    text: str


class Refused(Exception):
    """A row that cannot be used, with the rule that it breaks. Never leaves this package."""

    def __init__(self, rule: str) -> None:
        super().__init__(rule)
        self.rule = rule


class SystemRefused(Refused):
    """A row that the chat template would write if its system text stood in the first user turn."""


def _call(call: ToolCall) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
    return {"id": call.id, **entry} if call.id else entry
