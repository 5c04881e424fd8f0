"""What the assistant wrote in a rendered conversation, found by rendering its beginnings.

A turn carries the loss from where the prompt of that turn ends (generation prompt included) to the end of the turn. The
text of the prompt and of the turn must stand at the start of the one rendering that is trained on; a turn that the
template writes otherwise once more turns follow (history without its reasoning) is context only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from ..errors import ModelError
from .canonical import Conversation, Message, Refused

_PROBE = "an answer"
_HINT = "use a tokenizer whose chat_template writes user and assistant turns, or set data.chat_template"

Span = tuple[int, int]
"""Start and stop, in characters of a text or in tokens of a row."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """The text; ``spans`` of it carry the loss, ``prompt`` is what generation of the last answer starts from."""

    text: str
    spans: tuple[Span, ...]
    prompt: str
    answer: str
    context_turns: int = 0
    """Assistant turns that carry no loss because the template rewrites them."""


class ChatTemplate:
    """A tokenizer's chat template. Raises ModelError if it cannot write the simplest conversation."""

    def __init__(self, tokenizer: Any, *, supervise_generation_prompt: bool = False) -> None:
        self._tokenizer = tokenizer
        self._supervise_prompt = supervise_generation_prompt
        special = {str(token) for token in tokenizer.all_special_tokens}
        special.update(token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
        self._special = special
        self.tail = self._find_tail()
        """What the template puts behind the last answer."""
        self._end = self.tail.rstrip() if self.specials(self.tail) else str(tokenizer.eos_token)

    def render(self, conversation: Conversation) -> Rendered:
        """The conversation with its spans. Raises Refused when the template cannot write it for training."""
        full = self.text(conversation)
        messages = conversation.messages
        last = len(messages) - 1
        text, spans, unlearned = full, [], 0
        for at, message in enumerate(messages):
            if message.role != "assistant":
                continue
            if at == last:
                span, text, prompt = self._last(conversation, full)
            else:
                found = self._earlier(conversation, at, full) if message.learned else None
                unlearned += found is None and message.learned
                if found is None:
                    continue
                span = found
            if message.learned:
                spans.append(span)
        if not spans:
            raise Refused("no turn carries the loss")
        return Rendered(text, tuple(spans), prompt, messages[last].text, unlearned)

    def text(self, conversation: Conversation) -> str:
        """The one rendering that is trained on, as the template writes it."""
        text = self._apply(conversation, len(conversation.messages), add_generation_prompt=False)
        for message in conversation.messages:
            if message.role in ("system", "user") and message.text.strip() not in text:
                raise Refused(f"the chat template leaves a {message.role} turn out")
        return text

    def ended(self, text: str) -> str:
        """A rendering with the end of its last turn, and nothing behind it."""
        if text.endswith(self.tail):
            return text.removesuffix(self.tail) + self._end
        if not self.specials(self.tail):
            raise Refused("the chat template writes a finished conversation otherwise than the prompt of one")
        return text.rstrip()

    def specials(self, text: str) -> list[str]:
        """Special tokens in a text, in order."""
        found = ((text.find(token), token) for token in self._special)
        return [token for at, token in sorted(found) if at >= 0]

    def _last(self, conversation: Conversation, full: str) -> tuple[Span, str, str]:
        prompt = self._apply(conversation, len(conversation.messages) - 1, add_generation_prompt=True)
        if not full.startswith(prompt):
            raise Refused("the chat template writes a finished conversation otherwise than the prompt of one")
        text = self.ended(full)
        if not _holds(text[len(prompt) :], conversation.messages[-1]):
            raise Refused("the chat template leaves the answer out")
        return (self._start(conversation, len(conversation.messages) - 1, prompt), len(text)), text, prompt

    def _earlier(self, conversation: Conversation, at: int, full: str) -> Span | None:
        try:
            prompt = self._apply(conversation, at, add_generation_prompt=True)
            turn = self._apply(conversation, at + 1, add_generation_prompt=False)
        except Refused:
            return None
        body = turn.removesuffix(self.tail) if turn.endswith(self.tail) else turn.rstrip()
        if not body.startswith(prompt) or not full.startswith(body):
            return None
        stop = len(body) + (len(self._end) if full.startswith(self._end, len(body)) else 0)
        if not _holds(full[len(prompt) : stop], conversation.messages[at]):
            return None
        return self._start(conversation, at, prompt), stop

    def _start(self, conversation: Conversation, at: int, prompt: str) -> int:
        if not self._supervise_prompt:
            return len(prompt)
        return len(self._apply(conversation, at, add_generation_prompt=False))

    def _apply(self, conversation: Conversation, turns: int, *, add_generation_prompt: bool) -> str:
        messages = [message.to_template() for message in conversation.messages[:turns]]
        return self._written(messages, conversation.tools, add_generation_prompt=add_generation_prompt)

    def _written(self, messages: Sequence[dict[str, Any]], tools: Sequence[Any], *, add_generation_prompt: bool) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                messages,
                tools=[dict(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise Refused(f"the chat template refuses: {_first_line(error)}") from error
        return str(text)

    def _find_tail(self) -> str:
        question = Conversation((Message("user", "a question"), Message("assistant", _PROBE)))
        try:
            text = self._apply(question, 2, add_generation_prompt=False)
        except Refused as refused:
            raise ModelError(refused.rule, hint=_HINT) from refused
        _, found, tail = text.rpartition(_PROBE)
        if not found:
            raise ModelError("the tokenizer's chat template leaves the answer out", hint=_HINT)
        return tail


def _holds(text: str, message: Message) -> bool:
    """Whether a span holds what the message says, blanks aside."""
    squashed = "".join(text.split())
    answer = message.text.rpartition("</think>")[2]
    return "".join(answer.split()) in squashed and all(call.name in text for call in message.tool_calls)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
