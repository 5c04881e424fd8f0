from __future__ import annotations

import json

from lazytrain.jobs.timeline import STREAMS, Span, Timeline

TIMELINE = Timeline(
    [
        Span("load.0@0", "h2d", 0.0, 0.5, 100),
        Span("forward.0@0", "compute", 0.5, 2.0),
        Span("load.1@0", "h2d", 0.5, 1.0, 60),
    ],
    step_s=2.0,
)


def test_bytes_and_seconds_add_up_by_stream():
    assert TIMELINE.bytes_by_stream() == {"h2d": 160, "compute": 0}
    assert TIMELINE.busy_s() == {"h2d": 1.0, "compute": 1.5}


def test_the_trace_is_what_perfetto_reads(tmp_path):
    TIMELINE.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    spans = [event for event in events if event["ph"] == "X"]
    assert names == set(STREAMS)
    assert next((e["name"], e["ts"], e["dur"]) for e in spans) == ("load.0@0", 0.0, 500_000.0)
    assert {e["tid"] for e in spans} <= {event["tid"] for event in events if event["ph"] == "M"}
