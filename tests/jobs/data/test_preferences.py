"""Layouts of preference pairs that people publish."""

from __future__ import annotations

from typing import Any

import pytest

from lazytrain.jobs.data.canonical import Refused
from lazytrain.jobs.data.formats import detect, to_conversation
from lazytrain.jobs.data.preferences import Pair

PROMPT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes?"},
    {"role": "user", "content": "2+2"},
]
GOOD, BAD = {"role": "assistant", "content": "4"}, {"role": "assistant", "content": "5"}

LAYOUTS: list[dict[str, Any]] = [
    {"prompt": "2+2", "chosen": "4", "rejected": "5"},
    {"question": "2+2", "chosen": "4", "rejected": "5", "system": "be brief"},
    {"instruction": "2+2", "input": "", "chosen": "4", "rejected": "5"},
    {"prompt": "2+2", "chosen": [GOOD], "rejected": [BAD]},
    {"prompt": PROMPT, "chosen": [GOOD], "rejected": [BAD]},
    {"chosen": [*PROMPT, GOOD], "rejected": [*PROMPT, BAD]},
    {"prompt": "2+2", "chosen": [*PROMPT, GOOD], "rejected": [*PROMPT, BAD]},
    {
        "conversations": [{"from": "human", "value": "2+2"}],
        "chosen": {"from": "gpt", "value": "4"},
        "rejected": {"from": "gpt", "value": "5"},
    },
]


@pytest.mark.parametrize("row", LAYOUTS)
def test_layouts(row: dict[str, Any]) -> None:
    assert detect(row) == "preference"
    pair = to_conversation(row, "preference")
    assert isinstance(pair, Pair)
    for conversation, answer in ((pair.chosen, "4"), (pair.rejected, "5")):
        *before, last = conversation.messages
        assert (last.role, last.text, last.learned) == ("assistant", answer, True)
        assert before[-1].text == "2+2"
        assert not any(message.learned for message in before if message.role == "assistant")
        assert (before[0].role == "system") == ("system" in row)
    assert pair.chosen.messages[:-1] == pair.rejected.messages[:-1]


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        ({"prompt": "2+2", "chosen": "4", "rejected": "4"}, "the same"),
        ({"chosen": "4", "rejected": "5"}, "no prompt"),
        ({"prompt": "2+2", "chosen": "4", "rejected": ""}, "answer is empty"),
        ({"prompt": "2+2", "chosen": "4", "rejected": 7j}, "not text"),
        ({"prompt": "2+2", "chosen": "4", "rejected": None}, "no rejected"),
        ({"chosen": [*PROMPT, GOOD], "rejected": PROMPT}, "last turn is of the user"),
    ],
)
def test_refusals(row: dict[str, Any], rule: str) -> None:
    with pytest.raises(Refused, match=rule):
        to_conversation(row, "preference")
