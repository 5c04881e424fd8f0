"""Templates, and the words in which they say numbers and times."""

from __future__ import annotations

import math
from datetime import datetime, timezone
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

TEMPLATES = Path(__file__).parents[1] / "templates"
STREAM_WORDS = {
    "compute": "compute",
    "h2d": "host to GPU",
    "d2h": "GPU to host",
    "nvme": "NVMe",
    "nvme_read": "NVMe read",
    "nvme_write": "NVMe write",
    "cpu": "CPU",
    "host": "host memory",
}
_UNITS = (("d", 86400), ("h", 3600), ("min", 60))
_BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


@cache
def renderer() -> Environment:
    """All templates escape; a name that a page forgot to give is an error."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "bytes": size,
        "duration": duration,
        "number": number,
        "ago": ago,
        "clock": clock,
        "stream": stream,
    }
    environment.globals["state_tone"] = state_tone
    # Not imported by each template: a block that is rendered alone would not know it.
    environment.globals["parts"] = environment.get_template("parts.html").module
    return environment


def size(value: float | None) -> str:
    """``1536`` becomes ``1.5 KiB``; nothing becomes a dash."""
    if value is None:
        return "–"
    power = min(len(_BYTES) - 1, int(math.log(value, 1024))) if value >= 1 else 0
    scaled = value / 1024**power
    return f"{scaled:.0f} {_BYTES[power]}" if scaled >= 100 or not power else f"{scaled:.1f} {_BYTES[power]}"


def duration(seconds: float | None) -> str:
    """Two units at most: ``3 h 12 min``, ``4.2 s``, ``310 ms``."""
    if seconds is None:
        return "–"
    if seconds < 60:
        return f"{seconds * 1e3:.0f} ms" if 0 < seconds < 1 else f"{seconds:.3g} s"
    for index, (unit, length) in enumerate(_UNITS):
        if seconds >= length:
            whole, rest = divmod(round(seconds), length)
            if index + 1 == len(_UNITS):
                return f"{whole} {unit} {rest} s" if whole < 10 and rest else f"{whole} {unit}"
            below, below_length = _UNITS[index + 1]
            return f"{whole} {unit} {rest // below_length} {below}" if rest >= below_length else f"{whole} {unit}"
    raise AssertionError("unreachable")


def number(value: float | None, digits: int = 3) -> str:
    """``12345.6`` becomes ``12,346``, ``0.000123`` becomes ``1.23e-04``; nothing becomes a dash."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}" if abs(value) >= 1e-3 else f"{value:.{digits - 1}e}"


def ago(at: float | None) -> str | Markup:
    """A time that the browser shows as ``3 min ago``, or as ``in 3 min``; to ten seconds.

    An expected end moves a little all the time: a part of a page shall not count as changed for that.
    """
    return _time(None if at is None else 10 * round(at / 10), "ago")


def clock(at: float | None) -> str | Markup:
    """A time that the browser shows as its own clock does."""
    return _time(at, "clock")


def _time(at: float | None, kind: str) -> str | Markup:
    if at is None:
        return "–"
    moment = datetime.fromtimestamp(at, timezone.utc)
    return Markup('<time datetime="{}" data-as="{}">{}</time>').format(
        moment.isoformat(timespec="seconds"), kind, moment.strftime("%Y-%m-%d %H:%M UTC")
    )


def stream(name: str) -> str:
    """``h2d`` becomes ``host to GPU``."""
    return STREAM_WORDS.get(name, name)


def state_tone(state: str) -> str:
    """Which of five colours stands for a state of a job."""
    if state in ("RUNNING", "SUCCEEDED"):
        return "good"
    if state in ("FAILED", "REJECTED"):
        return "bad"
    if state in ("RECOVERING", "STOPPING", "PAUSING"):
        return "warn"
    return "busy" if state == "STARTING" else "calm"
