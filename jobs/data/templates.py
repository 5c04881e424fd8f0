"""Chat templates by name, for tokenizers that come without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import ModelError

NAMED = {
    "chatml": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "alpaca": (
        "{% for m in messages %}{% if m.role == 'user' %}### Instruction:\n{{ m.content }}\n\n"
        "{% elif m.role == 'assistant' %}### Response:\n{{ m.content }}{{ eos_token }}\n\n"
        "{% elif m.role == 'system' %}{{ m.content }}\n\n"
        "{% else %}### Input:\n{{ m.content }}\n\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}### Response:\n{% endif %}"
    ),
    "vicuna": (
        "{% for m in messages %}{% if m.role == 'user' %}USER: {{ m.content }} "
        "{% elif m.role == 'assistant' %}ASSISTANT: {{ m.content }}{{ eos_token }}"
        "{% elif m.role == 'system' %}{{ m.content }}\n\n"
        "{% else %}TOOL: {{ m.content }} {% endif %}{% endfor %}"
        "{% if add_generation_prompt %}ASSISTANT: {% endif %}"
    ),
}
"""Templates that need no tokens of their own."""


def choose_template(tokenizer: Any, choice: str | None) -> None:
    """Give the tokenizer the template of this name or file, so that training, generation and export share it.

    ``None`` keeps the tokenizer's own. Raises ModelError for a name that is neither known nor a file.
    """
    if choice is None:
        return
    if choice in NAMED:
        tokenizer.chat_template = NAMED[choice]
        return
    try:
        tokenizer.chat_template = Path(choice).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ModelError(
            f"chat_template {choice} is neither a known name nor a readable file", hint=options()
        ) from error


def options() -> str:
    """What may stand at ``data.chat_template``."""
    return f"set data.chat_template to {', '.join(NAMED)}, or to a file with a Jinja template"
