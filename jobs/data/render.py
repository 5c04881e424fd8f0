"""Conversations as the exact text that the model sees, with the parts that it must learn to write.

A conversation is rendered once, with the tokenizer's chat template when it has one, else plainly. Special tokens are
part of the rendered text: it is tokenized without automatic ones, in training and in generation alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import ModelError
from .canonical import Conversation, Message, PlainText, Refused, SystemRefused
from .skeleton import Skeletons
from .template_spans import ChatTemplate, Rendered
from .templates import options
from .variants import folded, variants

Render = Callable[[Conversation | PlainText], Rendered]


@dataclass(frozen=True, slots=True)
class Rendering:
    """Choices of the section data that decide how rows are written."""

    system_policy: Literal["fold", "error"] = "fold"
    supervise_generation_prompt: bool = False


def renderer(tokenizer: Any, rendering: Rendering | None = None) -> Render:
    """How rows are rendered for this tokenizer. Raises ModelError if it cannot serve for training."""
    rendering = rendering or Rendering()
    if not getattr(tokenizer, "is_fast", False):
        raise ModelError(
            "the tokenizer gives no character offsets", hint="use the model's fast tokenizer (tokenizer.json)"
        )
    if not tokenizer.eos_token:
        raise ModelError("the tokenizer has no end-of-sequence token", hint="set eos_token in tokenizer_config.json")
    start = _automatic_start(tokenizer)
    if tokenizer.chat_template:
        by_template = _ByTemplate(tokenizer, rendering)
        return lambda row: _text(tokenizer, start, row) if isinstance(row, PlainText) else by_template(row)
    return lambda row: _text(tokenizer, start, row) if isinstance(row, PlainText) else _plainly(tokenizer, start, row)


def render_prompt(tokenizer: Any, text: str) -> str:
    """What generation starts from when a person asks ``text``."""
    question = Conversation((Message("user", text), Message("assistant", "-")))
    return renderer(tokenizer)(question).prompt


def stop_ids(tokenizer: Any) -> list[int]:
    """Ids that end an answer: the end-of-sequence token, and the special token with which the template ends a turn."""
    ids = {tokenizer.eos_token_id} - {None}
    if tokenizer.chat_template:
        template = ChatTemplate(tokenizer)
        ids.update(tokenizer.convert_tokens_to_ids(template.specials(template.tail)[:1]))
    return sorted(ids)


class _ByTemplate:
    """Renders with the first variant of a conversation that the template accepts."""

    def __init__(self, tokenizer: Any, rendering: Rendering) -> None:
        self._template = ChatTemplate(tokenizer, supervise_generation_prompt=rendering.supervise_generation_prompt)
        self._skeletons = Skeletons(self._template)
        self._fold = rendering.system_policy == "fold"

    def __call__(self, conversation: Conversation) -> Rendered:
        first: Refused | None = None
        for variant, folds in variants(conversation):
            try:
                rendered = self._skeletons.render(variant)
            except Refused as refused:
                first = first or refused
                continue
            if folds and not self._fold:
                raise SystemRefused("the chat template has no system turn and data.system_policy is error")
            return rendered
        assert first is not None
        raise first


def _text(tokenizer: Any, start: str, row: PlainText) -> Rendered:
    text = start + row.text + tokenizer.eos_token
    return Rendered(text, ((len(start), len(text)),), "", row.text)


def _plainly(tokenizer: Any, start: str, conversation: Conversation) -> Rendered:
    """Question and answer without any template."""
    *before, answer = conversation.messages
    if any(message.role not in ("system", "user") for message in before) or answer.tool_calls or conversation.tools:
        raise ModelError("conversations of many turns need a chat template and the tokenizer has none", hint=options())
    prompt = start + "\n\n".join(message.text for message in before) + "\n"
    text = prompt + answer.text + tokenizer.eos_token
    return Rendered(text, ((len(prompt), len(text)),), prompt, answer.text)


def _automatic_start(tokenizer: Any) -> str:
    """The begin token, as text, if this tokenizer puts one in front of plain text."""
    ids = tokenizer("a").input_ids
    starts = tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id]
    return str(tokenizer.bos_token) if starts else ""


__all__ = ["Render", "Rendered", "Rendering", "folded", "render_prompt", "renderer", "stop_ids"]
