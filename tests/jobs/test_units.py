from __future__ import annotations

import pytest

from lazytrain.jobs.errors import InputError
from lazytrain.jobs.units import format_bytes, format_needed, parse_bytes, parse_duration


@pytest.mark.parametrize(
    "text, size",
    [
        ("96GiB", 96 << 30),
        ("70GB", 70 * 10**9),
        ("1.5 MB", 1_500_000),
        (123, 123),
        ("123", 123),
        (".5gb", 5 * 10**8),
        ("2G", 2 * 10**9),
        ("0", 0),
    ],
)
def test_amounts_of_memory(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        "70 Gigs",
        "GB",
        "-",
        "nan",
        "-1",
        -1,
        "1,5GB",
        "5.GB",
        "1e3GB",
        "1e-400GB",
        "8bit",
        "1_000",
        "70GB more",
        "2048PiB",
        True,
        "9" * 40,
    ],
)
def test_a_bad_amount_says_what_to_write(text):
    with pytest.raises(InputError, match="70GB"):
        parse_bytes(text)


def test_bytes_read_well():
    assert format_bytes(1536) == "1.5KiB"


@pytest.mark.parametrize("text", ["1B", "1023B", "1.5KiB", "12.5GiB", "1000.0TiB", "900.1PiB"])
def test_what_is_needed_is_rounded_up(text):
    """One byte more than an amount with one digit takes the next one, and either is enough when it is given."""
    size = parse_bytes(text)
    assert format_needed(size) == text == format_bytes(size)
    assert format_needed(size + 1) != text
    assert parse_bytes(format_needed(size + 1)) >= size + 1 > parse_bytes(text)


@pytest.mark.parametrize(
    "text, seconds", [("90s", 90), ("15m", 900), ("24h", 86400), ("2d", 172800), (5, 5), ("0.5h", 1800)]
)
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "24", "h", "24 hours", "-1h", True])
def test_a_bad_duration_says_what_to_write(text):
    with pytest.raises(ValueError, match="24h"):
        parse_duration(text)
