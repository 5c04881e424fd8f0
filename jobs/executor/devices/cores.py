"""The cores of the NUMA node whose memory the buffers lie in: the optimizer's threads belong there."""

from __future__ import annotations

import logging
import os
from pathlib import Path

log = logging.getLogger(__name__)


def stay_on(node: int | None, root: Path = Path("/sys")) -> set[int]:
    """Keep this thread, and those that it will start, on the cores of ``node``; returns the cores it then has.

    Only cores that the process was given count. It keeps all of these when ``node`` is None or has none of them.
    """
    if not hasattr(os, "sched_setaffinity"):
        return set()
    given = os.sched_getaffinity(0)
    near = given & cores_of(node, root) if node is not None else set()
    if not near or near == given:
        return given
    os.sched_setaffinity(0, near)
    log.info("NUMA: threads stay on the %d cores of node %d, of %d given", len(near), node, len(given))
    return near


def cores_of(node: int, root: Path = Path("/sys")) -> set[int]:
    """Numbers of the cores of a node; empty where the kernel does not say."""
    try:
        text = (root / f"devices/system/node/node{node}/cpulist").read_text(encoding="ascii").strip()
    except OSError:
        return set()
    return set(numbers(text))


def numbers(text: str) -> list[int]:
    """What a list of the kernel such as ``0-3,8`` names."""
    named: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        named += range(int(first), int(last or first) + 1)
    return named
