"""Other ways to say the same conversation, for templates that do not accept it as it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .canonical import Conversation, Message

_BETWEEN = "\n\n"


def variants(conversation: Conversation) -> Iterator[tuple[Conversation, bool]]:
    """The conversation as it is, then with turns of one role in a row merged, then with system text in a user turn.

    The second value says whether the system text was moved.
    """
    yield conversation, False
    together = merged(conversation)
    if together is not conversation:
        yield together, False
    without = folded(conversation)
    if without is not None:
        yield without, True
        together = merged(without)
        if together is not without:
            yield together, True


def merged(conversation: Conversation) -> Conversation:
    """Neighbouring turns of one role as one; the same object when there are none."""
    turns: list[Message] = []
    for message in conversation.messages:
        if turns and turns[-1].role == message.role and turns[-1].learned == message.learned:
            turns[-1] = _joined(turns[-1], message)
        else:
            turns.append(message)
    if len(turns) == len(conversation.messages):
        return conversation
    return replace(conversation, messages=tuple(turns))


def folded(conversation: Conversation) -> Conversation | None:
    """System text in front of the first user turn; None without a system turn or a user turn."""
    systems = [message.text for message in conversation.messages if message.role == "system"]
    turns = [message for message in conversation.messages if message.role != "system"]
    first = next((at for at, message in enumerate(turns) if message.role == "user"), None)
    if not systems or first is None:
        return None
    turns[first] = replace(turns[first], text=_BETWEEN.join([*systems, turns[first].text]))
    return replace(conversation, messages=tuple(turns))


def _joined(one: Message, other: Message) -> Message:
    text = _BETWEEN.join(part for part in (one.text, other.text) if part)
    reasoning = _BETWEEN.join(part for part in (one.reasoning, other.reasoning) if part)
    return replace(one, text=text, reasoning=reasoning, tool_calls=one.tool_calls + other.tool_calls)
