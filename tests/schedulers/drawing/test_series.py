"""Lines over steps: gaps, values that are no numbers, one point, very many points; and text that means markup."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET

import pytest

from lazytrain.schedulers.drawing import SeriesPlot, draw_series, line, series_plot, thin

NAN, INF = float("nan"), float("inf")


def paths(html: str) -> list[str]:
    """The paths of all drawn lines, legend left out."""
    picture = html[html.index("<svg") : html.index("</svg>") + 6]
    ET.fromstring(picture)
    return re.findall(r'<path d="([^"]*)" class="plot-line', picture)


def plot(*values: float | None, title: str = "Loss") -> SeriesPlot:
    return series_plot(title, [line("run", list(range(1, len(values) + 1)), list(values))])


def test_a_line_goes_through_every_point() -> None:
    (path,) = paths(draw_series(plot(1.0, 2.0, 3.0)))
    points = [tuple(map(float, point.split())) for point in re.split("[ML]", path)[1:]]
    assert len(points) == 3
    assert points[0][0] < points[1][0] < points[2][0] and points[0][1] > points[1][1] > points[2][1]


def test_a_gap_breaks_the_line_and_is_marked() -> None:
    drawn = draw_series(plot(1.0, 2.0, NAN, INF, None, 3.0, 4.0))
    (path,) = paths(drawn)
    assert path.count("M") == 2 and path.count("L") == 2
    assert drawn.count('class="plot-bad"') == 3
    assert "step 3: not a number" in drawn and "step 4: infinite" in drawn and "step 5: not a finite number" in drawn
    assert "has values that are no finite numbers" in drawn


def test_one_point_and_a_point_between_gaps_are_dots() -> None:
    assert 'class="plot-dot' in draw_series(plot(0.5)) and not paths(draw_series(plot(0.5)))
    assert draw_series(plot(1.0, NAN, 2.0, NAN, 3.0)).count("plot-dot") == 3


def test_nothing_and_nothing_finite_are_said_in_words() -> None:
    assert "Nothing has been reported yet" in draw_series(series_plot("Loss", []))
    assert "without a finite value" in draw_series(plot(NAN, NAN))


def test_many_points_are_thinned_without_losing_a_peak_or_a_gap() -> None:
    values: list[float | None] = [math.sin(k / 500) for k in range(100_000)]
    values[31_415], values[62_831], values[77_777] = 9.0, -7.0, None
    kept = line("run", list(range(100_000)), values, most=400)
    assert len(kept.steps) <= 700 and kept.count == 100_000
    assert (kept.steps[0], kept.steps[-1]) == (0, 99_999)
    assert max(kept.finite) == 9.0 and min(kept.finite) == -7.0
    assert [step for step, value in zip(kept.steps, kept.values, strict=True) if value is None] == [77_777]
    assert len(draw_series(series_plot("Loss", [kept]))) < 60_000


def test_few_points_are_not_thinned() -> None:
    assert thin([1.0, None, 3.0], 400) == [0, 1, 2]


def test_text_that_is_markup_stays_text() -> None:
    bad = "<img src=x onerror=alert(1)>"
    drawn = draw_series(series_plot(bad, [line(bad, [1, 2], [1.0, NAN])], unit=bad))
    assert "<img" not in drawn and "&lt;img" in drawn


def test_a_logarithmic_axis_needs_positive_values() -> None:
    positive = series_plot("Norm", [line("run", [1, 2, 3], [0.01, 1.0, 100.0])], log=True)
    (path,) = paths(draw_series(positive))
    heights = [float(point.split()[1]) for point in re.split("[ML]", path)[1:]]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.2)
    assert paths(draw_series(series_plot("Norm", [line("run", [1, 2], [0.0, 1.0])], log=True)))


def test_runs_differ_in_more_than_colour_and_all_are_named() -> None:
    drawn = draw_series(series_plot("Loss", [line(f"run {k}", [1, 2], [k, k + 1]) for k in range(10)]))
    assert len(paths(drawn)) == 8 and "2 more runs are not drawn" in drawn
    assert all(f"run {k}" in drawn for k in range(8))


@pytest.mark.parametrize("values", [[0.0, 0.0], [-5.0, -5.0], [1e300, 1e-300], [5e-324, 0.0], [-1e308, 1e308]])
def test_extreme_values_are_drawn_within_the_picture(values: list[float]) -> None:
    (path,) = paths(draw_series(plot(*values)))
    assert all(-1 <= float(number) <= 521 for number in re.findall(r"-?[\d.]+", path))
