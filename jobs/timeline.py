"""When each operation of a step ran, written alike by the simulator (predicted) and the executor (measured)."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STREAMS = ("compute", "h2d", "d2h", "nvme_read", "nvme_write", "cpu")


@dataclass(frozen=True, slots=True)
class Span:
    """One operation: seconds from the start of the step."""

    op: str
    stream: str
    start_s: float
    end_s: float
    bytes: int = 0


@dataclass(slots=True)
class Timeline:
    """The spans of one step, with the peaks and the waiting that follow from them."""

    spans: list[Span]
    step_s: float
    exposed_s: dict[str, float] = field(default_factory=dict)
    """Seconds for which compute waited for each stream."""
    peak_bytes: dict[str, int] = field(default_factory=dict)
    """Highest use per tier: ``gpu``, ``host``, ``nvme``."""

    def bytes_by_stream(self) -> dict[str, int]:
        """Bytes moved in the step, per stream."""
        total: dict[str, int] = defaultdict(int)
        for span in self.spans:
            total[span.stream] += span.bytes
        return dict(total)

    def busy_s(self) -> dict[str, float]:
        """Seconds of work in the step, per stream."""
        total: dict[str, float] = defaultdict(float)
        for span in self.spans:
            total[span.stream] += span.end_s - span.start_s
        return dict(total)

    def to_dict(self) -> dict[str, Any]:
        """The timeline as JSON values; a span is ``[op, stream, start_s, end_s, bytes]``."""
        spans = [[span.op, span.stream, span.start_s, span.end_s, span.bytes] for span in self.spans]
        return {"step_s": self.step_s, "exposed_s": self.exposed_s, "peak_bytes": self.peak_bytes, "spans": spans}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Timeline:
        """What `to_dict` gave."""
        spans = [Span(*fields) for fields in values["spans"]]
        return cls(spans, values["step_s"], dict(values["exposed_s"]), dict(values["peak_bytes"]))

    def to_trace(self) -> dict[str, Any]:
        """Chrome trace events, which Perfetto and chrome://tracing draw (times in microseconds)."""
        lanes = {stream: lane for lane, stream in enumerate(STREAMS)}
        names = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": lane, "args": {"name": stream}}
            for stream, lane in lanes.items()
        ]
        events = [
            {
                "ph": "X",
                "name": span.op,
                "pid": 0,
                "tid": lanes[span.stream],
                "ts": span.start_s * 1e6,
                "dur": (span.end_s - span.start_s) * 1e6,
                "args": {"bytes": span.bytes},
            }
            for span in self.spans
        ]
        return {"traceEvents": names + events, "displayTimeUnit": "ms"}

    def save_trace(self, path: str | Path) -> None:
        """Write the Chrome trace."""
        Path(path).write_text(json.dumps(self.to_trace()), encoding="utf-8")
