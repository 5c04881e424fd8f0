"""Numbers and times in words."""

import math

import pytest
from jinja2 import UndefinedError

from lazytrain.dashboards.web.rendering import ago, clock, duration, number, renderer, size, state_tone
from lazytrain.jobs.lifecycle import JobState


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (None, "–"), (0, "0 s"), (0.31, "310 ms"), (4.23, "4.23 s"), (59.9, "59.9 s"), (61, "1 min 1 s"),
        (1830, "30 min"), (3600, "1 h"), (11520, "3 h 12 min"), (90000, "1 d 1 h"), (86400 * 40, "40 d"),
    ],
)  # fmt: skip
def test_durations(seconds: float | None, words: str) -> None:
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("value", "words"), [(None, "–"), (0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (512 << 30, "512 GiB")]
)
def test_bytes(value: float | None, words: str) -> None:
    assert size(value) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [(None, "–"), (math.nan, "–"), (math.inf, "–"), (12345.6, "12,346"), (1.23456, "1.23"), (0.0001234, "1.23e-04")],
)
def test_numbers(value: float | None, words: str) -> None:
    assert number(value) == words


def test_times_say_the_moment_so_that_the_browser_can_show_its_own_clock() -> None:
    assert 'datetime="2001-09-09T01:46:40+00:00"' in ago(1e9)
    assert 'data-as="clock"' in clock(1e9)
    assert ago(None) == "–"
    assert ago(1e9 + 4) == ago(1e9) != ago(1e9 + 6)
    assert clock(1e9 + 4) != clock(1e9)


def test_every_state_has_a_tone() -> None:
    assert {state_tone(state.value) for state in JobState} == {"good", "warn", "bad", "busy", "calm"}


def test_templates_escape_and_a_forgotten_name_is_an_error() -> None:
    template = renderer().from_string("{{ name }}")
    assert template.render(name="<b>") == "&lt;b&gt;"
    with pytest.raises(UndefinedError):
        template.render()
