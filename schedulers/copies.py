"""What the GPUs of a node reach when they copy: each alone, and all of them at once."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import ConfigDict, Field

from ..jobs.frozen import Frozen

Rate = Annotated[float, Field(ge=1, le=1e24)]
"""Per second. Beyond these a number is a slip, and times made from it would not be finite."""


class CopyRates(Frozen):
    """Bytes per second between the host's memory and one GPU, measured in every company that its copies can have."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)

    gpu: str
    """Its identity as the driver gives it, or its number where there is no driver."""
    pcie_root: str = ""
    """Root port that it hangs on; empty where nobody knows."""
    h2d_bytes_s: Rate
    """To the GPU, while nothing else copies."""
    d2h_bytes_s: Rate
    both_h2d_bytes_s: Rate
    """To the GPU, while it also copies to the host and the node's other GPUs are idle."""
    both_d2h_bytes_s: Rate
    all_h2d_bytes_s: Rate
    """To the GPU, while every GPU of the node copies in this direction."""
    all_d2h_bytes_s: Rate
    all_both_h2d_bytes_s: Rate
    """To the GPU, while every GPU of the node copies in both directions."""
    all_both_d2h_bytes_s: Rate


@dataclass(frozen=True, slots=True)
class SharedLinks:
    """Bandwidths that the copies of a node's GPUs share, bytes per second; infinite where nobody has measured."""

    h2d_bytes_s: float = math.inf
    """From the host's memory to all GPUs together."""
    d2h_bytes_s: float = math.inf
    both_bytes_s: float = math.inf
    """In both directions together."""
    root_bytes_s: float = math.inf
    """Through one PCIe root, in each direction."""


def shared_links(copies: Sequence[CopyRates], *, h2d_bytes_s: float, d2h_bytes_s: float) -> SharedLinks:
    """What GPUs share that plans give ``h2d_bytes_s`` and ``d2h_bytes_s`` to when each is alone.

    It is what all of them reached at once, and never less than what the plan of a single one counts on. A root gives at
    least what its fastest GPU has alone: where memory was short while all copied, it may give more than was seen. The
    root is the one that gives least.
    """
    if not copies:
        return SharedLinks(root_bytes_s=min(h2d_bytes_s, d2h_bytes_s))
    by_root: dict[str, list[CopyRates]] = defaultdict(list)
    for each in copies:
        by_root[each.pcie_root].append(each)
    return SharedLinks(
        h2d_bytes_s=max(h2d_bytes_s, sum(each.all_h2d_bytes_s for each in copies)),
        d2h_bytes_s=max(d2h_bytes_s, sum(each.all_d2h_bytes_s for each in copies)),
        both_bytes_s=max(
            h2d_bytes_s + d2h_bytes_s, sum(each.all_both_h2d_bytes_s + each.all_both_d2h_bytes_s for each in copies)
        ),
        root_bytes_s=min(_root(under, h2d_bytes_s, d2h_bytes_s) for under in by_root.values()),
    )


def _root(under: Sequence[CopyRates], h2d_bytes_s: float, d2h_bytes_s: float) -> float:
    there = max(h2d_bytes_s, max(each.h2d_bytes_s for each in under), sum(each.all_h2d_bytes_s for each in under))
    back = max(d2h_bytes_s, max(each.d2h_bytes_s for each in under), sum(each.all_d2h_bytes_s for each in under))
    return min(there, back)
