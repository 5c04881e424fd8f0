"""What is hidden of a job file, and what is not."""

from typing import Any

import pytest

from lazytrain.dashboards.pages.masking import HIDDEN, masked


@pytest.mark.parametrize("key", ["token", "hf_token", "password", "API_KEY", "secret", "aws-secret-key", "credentials"])
def test_keys_that_name_a_secret(key: str) -> None:
    assert masked({"a": [{key: "x"}]}) == {"a": [{key: HIDDEN}]}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://ada:pass@host/x", f"https://{HIDDEN}@host/x"),
        ("hf_abcdefghijklmnopqrst", HIDDEN),
        ("/data/ghp_abcdefghijklmnopqrst/rows", f"/data/{HIDDEN}/rows"),
        ("https://h/x?token=abc&page=1", f"https://h/x?{HIDDEN}&page=1"),
    ],
)
def test_values_that_are_a_secret_by_their_form(text: str, shown: str) -> None:
    assert masked({"path": text}) == {"path": shown}


@pytest.mark.parametrize(
    "value",
    [{"max_new_tokens": 256}, {"path": "hf://org/name"}, {"keys": ["a"]}, {"tokenizer": "x"}, {"token": 5, "x": None}],
)
def test_the_rest_is_shown(value: Any) -> None:
    assert masked(value) == value
