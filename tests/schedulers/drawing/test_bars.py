"""Use of machines, and the expected times of the queue."""

from __future__ import annotations

import re

import pytest

from lazytrain.schedulers.drawing import QueueBar, UsageBar, draw_queue, draw_usage, queue_plot
from lazytrain.schedulers.drawing.elements import number, seconds, ticks


def widths(html: str, kind: str) -> list[float]:
    return [float(width) for width in re.findall(rf'width="([\d.]+)" height="[\d.]+" class="{kind}[ "]', html)]


def test_a_bar_is_as_long_as_its_share() -> None:
    drawn = draw_usage("In use", [UsageBar("GPUs", 3, 4, "3 of 4"), UsageBar("NVMe", 2, 1, "2 of 1")])
    lanes = widths(drawn, "plot-lane")
    assert widths(drawn, "plot-used") == pytest.approx([0.75 * lanes[0], lanes[1]])
    assert "plot-full" in drawn and 'aria-label="In use: GPUs 3 of 4, NVMe 2 of 1"' in drawn
    assert "Nothing has been measured" in draw_usage("In use", [])


def test_the_queue_is_in_the_order_of_starting() -> None:
    bars = [QueueBar("late", 500, 900, False), QueueBar("soon", 100, 200, False), QueueBar("runs", -50, 300, True)]
    drawn = draw_queue(queue_plot(bars, unknown=2))
    labels = re.findall(r'class="plot-text plot-label">([^<]+)', drawn)
    assert labels == ["runs", "soon", "late"]
    assert "starts in 100 s, ends in 3.33 min" in drawn and "2 more wait" in drawn
    (soon, late), (running,) = widths(drawn, "plot-waiting"), widths(drawn, "plot-running")
    assert late / soon == pytest.approx(4, rel=0.01) and running / soon == pytest.approx(3.5, rel=0.01)


def test_a_long_queue_is_cut_and_says_so() -> None:
    facts = queue_plot(QueueBar(f"job {k}", k, k + 10, False) for k in range(1000))
    assert len(facts.bars) == 40 and "960 later ones are not drawn" in draw_queue(facts)
    assert "No job has an expected time" in draw_queue(queue_plot([]))


def test_job_names_stay_text() -> None:
    assert "<img" not in draw_queue(queue_plot([QueueBar("<img src=x>", 0, 5, True, "<b>")]))
    assert "<img" not in draw_usage("<img>", [UsageBar("<img>", 1, 2, "<img>")])


def test_numbers_are_short_and_ticks_are_round() -> None:
    assert [number(v) for v in (0.5, 1234.0, 12_345.0, 1e-5, None)] == ["0.5", "1,234", "12.3k", "1e-05", "none"]
    assert [seconds(v) for v in (0.0, 0.0123, 5.0, 600.0, 7200.0)] == ["0 s", "12.3 ms", "5 s", "10 min", "2 h"]
    assert ticks(0, 10) == [0, 2, 4, 6, 8, 10] and ticks(3, 3) == [3]
    assert ticks(-0.13, 0.21) == pytest.approx([-0.1, 0, 0.1, 0.2])
