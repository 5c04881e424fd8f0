"""What the plots show, as plain values: any page or command can draw them, or print them as a table."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ...jobs.policy import Policy
from ...jobs.timeline import STREAMS, Timeline

HOME_WORDS = {"gpu": "on the GPU", "host": "on the host", "nvme": "on NVMe", "recompute": "recomputed"}
KEPT_WORDS = {
    "none": "nothing kept",
    "matmuls gpu": "products kept on the GPU",
    "matmuls host": "products swapped to the host",
    "all gpu": "everything kept on the GPU",
    "all host": "everything swapped to the host",
}
LANE_WORDS = {
    "compute": "compute",
    "h2d": "host to GPU",
    "d2h": "GPU to host",
    "nvme_read": "NVMe read",
    "nvme_write": "NVMe write",
    "cpu": "CPU",
    "host": "host memory",
}
"""All streams, and what they share."""
_SHORTEST_WAIT = 1e-4
"""Gaps of compute below this share of the step are no waiting: one operation ends and the next begins."""


@dataclass(frozen=True, slots=True)
class Tile:
    """One boundary, or one layer."""

    index: int
    kind: str
    """A key of `HOME_WORDS`, or of `KEPT_WORDS`."""
    words: str
    resident: bool = False
    """Whether the layer's weights stay on the GPU."""


@dataclass(frozen=True, slots=True)
class PolicyMap:
    """A policy as two rows of tiles: boundary i is the input of layer i."""

    boundaries: tuple[Tile, ...]
    layers: tuple[Tile, ...]


@dataclass(frozen=True, slots=True)
class LaneSpan:
    """One operation on its stream; seconds from the start of the step."""

    op: str
    kind: str
    """The operation's kind: the first part of its name, for example ``load``."""
    start_s: float
    end_s: float
    bytes: int


@dataclass(frozen=True, slots=True)
class Lane:
    """One stream with all that it runs."""

    stream: str
    words: str
    busy_share: float
    """Share of the step for which it is at work."""
    spans: tuple[LaneSpan, ...]


@dataclass(frozen=True, slots=True)
class ExposedSpan:
    """Time in which nothing is computed: the exposed time of ``stream``, whose work ends where computing goes on."""

    stream: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class TimelinePlot:
    """One step, stream by stream; streams that do nothing are left out."""

    step_s: float
    lanes: tuple[Lane, ...]
    exposed: tuple[ExposedSpan, ...] = ()
    waits_s: Mapping[str, float] = field(default_factory=dict)
    """Exposed seconds of each stream as the timeline has them, which knows what each operation waited for."""

    def exposed_s(self) -> dict[str, float]:
        """Exposed seconds of each stream; those of the gaps where the timeline does not say."""
        if self.waits_s:
            return {stream: seconds for stream, seconds in self.waits_s.items() if seconds > 0}
        found: dict[str, float] = {}
        for span in self.exposed:
            found[span.stream] = found.get(span.stream, 0.0) + span.end_s - span.start_s
        return found


def policy_map(policy: Policy) -> PolicyMap:
    """The facts of a policy's map."""
    boundaries = tuple(Tile(i, home, f"boundary {i}: {HOME_WORDS[home]}") for i, home in enumerate(policy.homes))
    layers = []
    for layer in policy.layers:
        kind = "none" if layer.internals == "none" else f"{layer.internals} {layer.internals_home}"
        words = f"layer {layer.index}: {KEPT_WORDS[kind]}" + (", weights stay on the GPU" if layer.resident else "")
        layers.append(Tile(layer.index, kind, words, layer.resident))
    return PolicyMap(boundaries, tuple(layers))


def timeline_plot(timeline: Timeline) -> TimelinePlot:
    """The facts of a timeline's plot."""
    lanes = []
    for stream in STREAMS:
        spans = tuple(
            LaneSpan(span.op, span.op.split(".")[0], span.start_s, span.end_s, span.bytes)
            for span in timeline.spans
            if span.stream == stream and span.end_s > span.start_s
        )
        if spans:
            busy = sum(span.end_s - span.start_s for span in spans) / timeline.step_s if timeline.step_s else 0.0
            lanes.append(Lane(stream, LANE_WORDS[stream], busy, spans))
    by_stream = timeline.exposed_s.keys() <= LANE_WORDS.keys()  # a run's record has both ways of NVMe as one
    waits_s = timeline.exposed_s if by_stream else {}
    return TimelinePlot(timeline.step_s, tuple(lanes), tuple(_exposed(timeline)), waits_s)


def _exposed(timeline: Timeline) -> Iterator[ExposedSpan]:
    """The gaps of the compute stream, each with the stream that ended last before computing went on.

    In the simulator an operation starts when the last one that it waits for has ended, so that this is the one.
    """
    others = sorted((span.end_s, span.stream) for span in timeline.spans if span.stream != "compute")
    ends = [end_s for end_s, _ in others]
    compute = sorted((s.start_s, s.end_s) for s in timeline.spans if s.stream == "compute" and s.end_s > s.start_s)
    free_from, shortest = 0.0, timeline.step_s * _SHORTEST_WAIT
    for start_s, end_s in [*compute, (timeline.step_s, timeline.step_s)]:
        last = bisect_right(ends, start_s + shortest) - 1
        if start_s - free_from > shortest and last >= 0 and ends[last] > free_from:
            yield ExposedSpan(others[last][1], free_from, start_s)
        free_from = max(free_from, end_s)
