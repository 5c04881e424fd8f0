"""The drawn plan: every tile and operation is there, in words too, and the file needs nothing else."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from typing import get_args

import pytest

from lazytrain.jobs.model_facts import ModelFacts
from lazytrain.jobs.policy import LayerPolicy, Policy
from lazytrain.jobs.policy.program import Kind
from lazytrain.jobs.timeline import Span, Timeline
from lazytrain.schedulers.drawing import draw_policy_map, draw_timelines, page, policy_map, timeline_plot
from lazytrain.schedulers.drawing.draw_timeline import KINDS
from lazytrain.schedulers.drawing.page import STYLE
from lazytrain.schedulers.hardware import HardwareProfile
from lazytrain.schedulers.simulator import simulate

Make = Callable[..., ModelFacts]
Machine = Callable[..., HardwareProfile]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def policy(make_facts: Make) -> Policy:
    """40 layers with every home and every kind of internals among them."""
    homes = ["gpu", "host", "nvme", "recompute", "gpu"] * 8
    made = Policy.from_homes(make_facts(40), [*homes, "gpu"])  # type: ignore[list-item]
    kept = {0: ("all", "gpu"), 1: ("matmuls", "host"), 4: ("matmuls", "gpu"), 5: ("all", "host")}
    layers = [
        LayerPolicy(
            index=i, internals=kept.get(i, ("none", "gpu"))[0], internals_home=kept.get(i, ("none", "gpu"))[1],
            resident=i == 7,
        )  # type: ignore[arg-type]
        for i in range(40)
    ]  # fmt: skip
    return made.model_copy(update={"layers": tuple(layers)})


def elements(html: str, tag: str) -> list[ET.Element]:
    """Elements of the first picture; the text around it is no XML."""
    start = html.index('<svg class="plot plot-')
    depth, end = 0, start
    for match in re.finditer(r"<svg|</svg>", html[start:]):
        depth += 1 if match[0] == "<svg" else -1
        end = start + match.end()
        if not depth:
            break
    return list(ET.fromstring(html[start:end]).iter(f"{SVG}{tag}"))


def test_the_map_has_a_tile_for_each_boundary_and_layer(policy: Policy) -> None:
    facts = policy_map(policy)
    assert len(facts.boundaries) == 41 and len(facts.layers) == 40
    assert facts.boundaries[2].words == "boundary 2: on NVMe" and facts.layers[1].kind == "matmuls host"
    assert facts.layers[7].resident and "stay on the GPU" in facts.layers[7].words
    drawn = draw_policy_map(facts)
    tiles = [rect for rect in elements(drawn, "rect") if "plot-tile" in rect.get("class", "")]
    assert len(tiles) == 81 and len({(rect.get("x"), rect.get("y")) for rect in tiles}) == 81
    assert [title.text for title in elements(drawn, "title")][:2] == [
        "boundary 0: on the GPU",
        "boundary 1: on the host",
    ]
    said = elements(drawn, "svg")[0].get("aria-label", "")
    assert "41 boundaries: 17 on the GPU, 8 on the host, 8 on NVMe, 8 recomputed" in said
    assert "weights of 1 stay on the GPU" in said


def test_the_timeline_has_every_operation_where_and_as_long_as_it_runs(
    policy: Policy, make_facts: Make, make_profile: Machine
) -> None:
    timeline = simulate(policy, make_facts(40), make_profile())
    facts = timeline_plot(timeline)
    drawn_ops = sorted(span.op for lane in facts.lanes for span in lane.spans)
    assert drawn_ops == sorted(span.op for span in timeline.spans if span.end_s > span.start_s)
    busy = timeline.busy_s()
    assert {lane.stream: lane.busy_share for lane in facts.lanes} == pytest.approx(
        {stream: seconds / timeline.step_s for stream, seconds in busy.items() if seconds}
    )
    drawn = [rect for rect in elements(draw_timelines(facts, None), "rect") if "plot-span" in rect.get("class", "")]
    widths = sorted(float(rect.get("width", 0)) for rect in drawn)
    expected = sorted((s.end_s - s.start_s) / timeline.step_s * 1000 for s in timeline.spans if s.end_s > s.start_s)
    assert widths == pytest.approx(expected, abs=1e-3)


def test_exposed_time_is_that_of_the_simulator(policy: Policy, make_facts: Make, make_profile: Machine) -> None:
    timeline = simulate(policy, make_facts(40), make_profile())
    gaps = timeline_plot(timeline).exposed_s()
    assert sum(gaps.values()) > 0.1 * timeline.step_s
    computing = timeline.busy_s()["compute"]
    assert sum(gaps.values()) == pytest.approx(timeline.step_s - computing, rel=0.01)


def test_what_waits_for_which_stream_is_what_the_plan_says(
    policy: Policy, make_facts: Make, make_profile: Machine
) -> None:
    """Host memory that all share included, which is no stream; a gap may be the fault of several."""
    facts = make_facts(40)
    for host_bytes_s in (1e10, 1e8):
        timeline = simulate(policy, facts, make_profile(host_bytes_s=host_bytes_s))
        plot = timeline_plot(timeline)
        assert plot.exposed_s() == {stream: waits for stream, waits in timeline.exposed_s.items() if waits}
        assert ("for host memory" in draw_timelines(plot, None)) == (host_bytes_s < 1e9)


def test_every_kind_of_operation_has_a_colour_and_is_in_the_legend() -> None:
    kinds = {*get_args(Kind)}
    assert kinds == {kind for listed in KINDS.values() for kind in listed.split()}
    assert kinds == set(re.findall(r"\.o-(\w+)", STYLE))


def test_a_gap_belongs_to_the_stream_that_ends_with_it() -> None:
    spans = [
        Span("forward.0@0", "compute", 0.0, 1.0),
        Span("load.1@0", "h2d", 0.0, 3.0, 8),
        Span("offload.0@0", "d2h", 1.0, 2.5),
        Span("forward.1@0", "compute", 3.0, 4.0),
        Span("gradient.1@0", "d2h", 4.0, 4.5),
    ]
    exposed = timeline_plot(Timeline(spans, 4.5)).exposed
    assert [(span.stream, span.start_s, span.end_s) for span in exposed] == [("h2d", 1.0, 3.0), ("d2h", 4.0, 4.5)]


def test_predicted_and_measured_share_one_axis(policy: Policy, make_facts: Make, make_profile: Machine) -> None:
    predicted = timeline_plot(simulate(policy, make_facts(40), make_profile()))
    slow = Timeline([Span("forward.0@0", "compute", 0.0, 2 * predicted.step_s)], 2 * predicted.step_s)
    drawn = draw_timelines(predicted, timeline_plot(slow))
    lanes = [words for text in elements(drawn, "text") if (words := text.text or "").endswith("busy")]
    assert lanes[0].startswith("predicted ") and lanes[1] == "measured 100% busy"
    spans = [rect for rect in elements(drawn, "rect") if "plot-span" in rect.get("class", "")]
    assert max(float(r.get("x", 0)) + float(r.get("width", 0)) for r in spans) == pytest.approx(1000)
    assert draw_timelines(None, None).count("<svg") == 0 and "no timeline yet" in draw_timelines(None, None)


def test_the_page_stands_alone_and_is_safe(policy: Policy, make_facts: Make, make_profile: Machine) -> None:
    text = page("<b>x</b>", policy, simulate(policy, make_facts(40), make_profile()), {"step": "1 s & more"})
    assert "<b>x</b>" not in text and "1 s &amp; more" in text
    assert not re.search(r"<script [^>]|<link|src=|href=|url\(|@import|https?://(?!www\.w3\.org/2000/svg)", text)
    assert "light-dark(" in text and "color-scheme:light dark" in text and text.count('<svg class="plot plot-') == 2
    assert text == page("<b>x</b>", policy, simulate(policy, make_facts(40), make_profile()), {"step": "1 s & more"})
