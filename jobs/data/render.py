"""Conversations as the exact text that the model sees, with the part that it must learn to write.

A conversation is rendered once, with the tokenizer's chat template when it has one, else plainly. Special tokens are
part of the rendered text: it is tokenized without automatic ones, in training and in generation alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from ..errors import ModelError
from .canonical import Conversation, Refused, Turn

_PROBE = "an answer"
_TEMPLATE_HINT = "use a tokenizer whose chat_template writes user and assistant turns, or remove its chat_template"


@dataclass(frozen=True, slots=True)
class Rendered:
    """``text[answer_start:]`` carries the loss; ``prompt`` is what generation starts from."""

    text: str
    answer_start: int
    prompt: str


def renderer(tokenizer: Any) -> Callable[[Conversation], Rendered]:
    """How conversations are rendered for this tokenizer. Raises ModelError if it cannot serve for training."""
    if not getattr(tokenizer, "is_fast", False):
        raise ModelError(
            "the tokenizer gives no character offsets", hint="use the model's fast tokenizer (tokenizer.json)"
        )
    if not tokenizer.eos_token:
        raise ModelError("the tokenizer has no end-of-sequence token", hint="set eos_token in tokenizer_config.json")
    if tokenizer.chat_template:
        tail = _tail(tokenizer)
        return lambda conversation: _by_template(tokenizer, tail, conversation)
    start = _automatic_start(tokenizer)
    return lambda conversation: _plainly(tokenizer, start, conversation)


def render_prompt(tokenizer: Any, text: str) -> str:
    """What generation starts from when a person asks ``text``."""
    return renderer(tokenizer)(Conversation((Turn("user", text),), "-")).prompt


def stop_ids(tokenizer: Any) -> list[int]:
    """Ids that end an answer: the end-of-sequence token, and the special token with which the template ends a turn."""
    ids = {tokenizer.eos_token_id} - {None}
    if tokenizer.chat_template:
        ids.update(tokenizer.convert_tokens_to_ids(_specials(tokenizer, _tail(tokenizer))[:1]))
    return sorted(ids)


def _plainly(tokenizer: Any, start: str, conversation: Conversation) -> Rendered:
    prompt = start + "\n\n".join(turn.text for turn in conversation.prompt) + "\n"
    return Rendered(prompt + conversation.answer + tokenizer.eos_token, len(prompt), prompt)


def _automatic_start(tokenizer: Any) -> str:
    """The begin token, as text, if this tokenizer puts one in front of plain text."""
    ids = tokenizer("a").input_ids
    starts = tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id]
    return str(tokenizer.bos_token) if starts else ""


def _by_template(tokenizer: Any, tail: str, conversation: Conversation) -> Rendered:
    prompt, text = _both(tokenizer, conversation)
    if not text.startswith(prompt) or not text.endswith(tail):
        raise Refused("the chat template writes a finished conversation otherwise than the prompt of one")
    body = text.removesuffix(tail)
    if conversation.answer.strip() not in body[len(prompt) :]:
        raise Refused("the chat template leaves the answer out")
    end = tail.rstrip() if _specials(tokenizer, tail) else tokenizer.eos_token
    return Rendered(body + end, len(prompt), prompt)


def _tail(tokenizer: Any) -> str:
    """What the template puts behind an answer. Raises ModelError if it cannot write the simplest conversation."""
    try:
        _, text = _both(tokenizer, Conversation((Turn("user", "a question"),), _PROBE))
    except Refused as refused:
        raise ModelError(refused.rule, hint=_TEMPLATE_HINT) from refused
    _, found, tail = text.rpartition(_PROBE)
    if not found:
        raise ModelError("the tokenizer's chat template leaves the answer out", hint=_TEMPLATE_HINT)
    return tail


def _both(tokenizer: Any, conversation: Conversation) -> tuple[str, str]:
    """The prompt, and the finished conversation."""
    messages = [{"role": turn.role, "content": turn.text} for turn in conversation.prompt]
    answer = {"role": "assistant", "content": conversation.answer}
    prompt = _apply(tokenizer, messages, add_generation_prompt=True)
    return prompt, _apply(tokenizer, [*messages, answer], add_generation_prompt=False)


def _apply(tokenizer: Any, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool) -> str:
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    except (TemplateError, TypeError, ValueError) as error:
        raise Refused(f"the chat template refuses: {error}") from error
    return str(text)


def _specials(tokenizer: Any, text: str) -> list[str]:
    """Special tokens in a text, in order."""
    special = {str(token) for token in tokenizer.all_special_tokens}
    special.update(token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    found = ((text.find(token), token) for token in special)
    return [token for at, token in sorted(found) if at >= 0]
