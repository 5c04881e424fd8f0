"""Renders conversations of one shape fast: the template's own text between the turns is found once.

A conversation is still rendered by its template, once. When the result is the template's known pieces with the turns
between them, character for character, the spans follow by counting; otherwise they are searched for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .canonical import Conversation, Message, Refused
from .template_spans import ChatTemplate, Rendered, Span

_MOST_SHAPES = 256
_MOST_TURNS = 64

_Shape = tuple[tuple[str, bool], ...]


@dataclass(frozen=True, slots=True)
class _Skeleton:
    pieces: tuple[str, ...]
    """What the template writes before, between and after the turns."""
    spans: tuple[tuple[int, int, int], ...]
    """Turn, start relative to the start of its text, stop relative to its end."""
    prompt: int
    """End of the prompt, relative to the start of the last turn's text."""
    context_turns: int


class Skeletons:
    """Skeletons of the shapes met so far; a shape is the roles of the turns."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._known: dict[_Shape, _Skeleton | None] = {}

    def render(self, conversation: Conversation) -> Rendered:
        """The same as `ChatTemplate.render`."""
        skeleton = self._skeleton(conversation)
        if skeleton is not None:
            text = self._template.ended(self._template.text(conversation))
            places = _places(text, skeleton.pieces, conversation.messages)
            if places is not None:
                spans = tuple((places[at][0] + start, places[at][1] + stop) for at, start, stop in skeleton.spans)
                prompt = text[: places[-1][0] + skeleton.prompt]
                return Rendered(text, spans, prompt, conversation.messages[-1].text, skeleton.context_turns)
        return self._template.render(conversation)

    def _skeleton(self, conversation: Conversation) -> _Skeleton | None:
        messages = conversation.messages
        special = conversation.tools or any(
            message.tool_calls or message.reasoning or message.name or message.tool_call_id for message in messages
        )
        if special or len(messages) > _MOST_TURNS or not all(message.text.strip() for message in messages):
            return None
        shape = tuple((message.role, message.learned) for message in messages)
        if shape not in self._known and len(self._known) < _MOST_SHAPES:
            self._known[shape] = self._find(conversation)
        return self._known.get(shape)

    def _find(self, conversation: Conversation) -> _Skeleton | None:
        marks = [f"Turn{at}zQx{at}" for at in range(len(conversation.messages))]
        turns = [replace(message, text=mark) for message, mark in zip(conversation.messages, marks, strict=True)]
        try:
            rendered = self._template.render(Conversation(tuple(turns)))
        except Refused:
            return None
        places: list[Span] = []
        for mark in marks:
            if rendered.text.count(mark) != 1:
                return None
            start = rendered.text.index(mark)
            places.append((start, start + len(mark)))
        if places != sorted(places):
            return None
        edges = [0, *(edge for place in places for edge in place), len(rendered.text)]
        pieces = tuple(rendered.text[edges[at] : edges[at + 1]] for at in range(0, len(edges), 2))
        relative = []
        for start, stop in rendered.spans:
            turn = next((at for at, place in enumerate(places) if place[1] <= stop and place[0] >= start), None)
            if turn is None:
                return None
            relative.append((turn, start - places[turn][0], stop - places[turn][1]))
        return _Skeleton(pieces, tuple(relative), len(rendered.prompt) - places[-1][0], rendered.context_turns)


def _places(text: str, pieces: tuple[str, ...], messages: tuple[Message, ...]) -> list[Span] | None:
    """Where each turn stands in a text that is pieces and turns in turn; None if it is not."""
    if not text.startswith(pieces[0]):
        return None
    places, at = [], len(pieces[0])
    for message, piece in zip(messages, pieces[1:], strict=True):
        for written in (message.text, message.text.strip()):
            if text.startswith(written, at) and text.startswith(piece, at + len(written)):
                break
        else:
            return None
        places.append((at, at + len(written)))
        at += len(written) + len(piece)
    return places if at == len(text) else None
