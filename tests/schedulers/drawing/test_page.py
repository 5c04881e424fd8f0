"""The drawn plan: every tile and operation is there, in words too, and the file needs nothing else."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable

import pytest

from lazytrain.jobs.model_facts import ModelFacts
from lazytrain.jobs.policy import LayerPolicy, Policy
from lazytrain.schedulers.drawing import draw_policy_map, draw_timeline, page, policy_map, timeline_plot
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


def test_the_map_has_a_tile_for_each_boundary_and_layer(policy: Policy) -> None:
    facts = policy_map(policy)
    assert len(facts.boundaries) == 41 and len(facts.layers) == 40
    assert facts.boundaries[2].words == "boundary 2: on NVMe" and facts.layers[1].kind == "matmuls host"
    assert facts.layers[7].resident and "stay on the GPU" in facts.layers[7].words
    drawn = ET.fromstring(draw_policy_map(facts))
    tiles = [rect for rect in drawn.iter(f"{SVG}rect") if "tile" in rect.get("class", "")]
    assert len(tiles) == 81 and len({(rect.get("x"), rect.get("y")) for rect in tiles}) == 81
    assert [group.get("aria-label") for group in drawn.iter(f"{SVG}g")][:2] == [
        "boundary 0: on the GPU", "boundary 1: on the host",
    ]  # fmt: skip


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
    spans = [rect for rect in ET.fromstring(draw_timeline(facts)).iter(f"{SVG}rect") if "span" in rect.get("class", "")]
    longest = max(spans, key=lambda rect: float(rect.get("width", 0)))
    last = max(span.end_s - span.start_s for span in timeline.spans)
    assert float(longest.get("width", 0)) == pytest.approx(last / timeline.step_s * (1100 - 96), abs=0.01)


def test_the_page_stands_alone_and_is_safe(policy: Policy, make_facts: Make, make_profile: Machine) -> None:
    text = page("<b>x</b>", policy, simulate(policy, make_facts(40), make_profile()), {"step": "1 s & more"})
    assert "<b>x</b>" not in text and "1 s &amp; more" in text
    assert not re.search(r"<script|<link|src=|href=|url\(|@import", text)
    assert "prefers-color-scheme:dark" in text and text.count("<svg") == 2
    assert text == page("<b>x</b>", policy, simulate(policy, make_facts(40), make_profile()), {"step": "1 s & more"})
