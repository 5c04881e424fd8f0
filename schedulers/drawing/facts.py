"""What the plots show, as plain values: any page or command can draw them, or print them as a table."""

from __future__ import annotations

from dataclasses import dataclass

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
}


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
class TimelinePlot:
    """One step, stream by stream; streams that do nothing are left out."""

    step_s: float
    lanes: tuple[Lane, ...]


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
    return TimelinePlot(timeline.step_s, tuple(lanes))
