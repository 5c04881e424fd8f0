"""What a planned job asks of the node that it shares with others: memory, and bytes per second on every link."""

from __future__ import annotations

from typing import Final

from ..jobs.errors import InputError
from ..jobs.frozen import Frozen
from ..jobs.model_facts import ModelFacts
from ..jobs.policy import Op, Policy, Predicted, lower
from .costs import HOST_PASSES
from .hardware import BYTES_PER_UPDATE

_LINKS: Final = ("h2d", "d2h", "nvme_read", "nvme_write")


class Demand(Frozen):
    """A job's speed on a node that it has to itself, and what it uses of the node at that speed."""

    tokens_per_s: float
    host_bytes: int
    nvme_bytes: int
    dram_bytes_s: float
    """Host memory traffic: every byte that a link brings or takes, and all that the optimizer reads and writes."""
    h2d_bytes_s: float
    d2h_bytes_s: float
    nvme_read_bytes_s: float
    nvme_write_bytes_s: float


def demand(policy: Policy, facts: ModelFacts, predicted: Predicted | None = None) -> Demand:
    """The demand of ``policy``; ``predicted`` replaces the prediction that the policy carries.

    Rates are the bytes of one step over its predicted seconds. Raises InputError for a policy without a prediction,
    ProgramError for a policy made for other facts.
    """
    promise = predicted or policy.predicted
    if promise is None:
        raise InputError("the policy carries no prediction", hint="take one that plan() has answered")
    ops = lower(policy, facts).ops
    moved = {link: sum(op.bytes for op in ops if op.stream == link) for link in _LINKS}
    dram = sum(moved.values()) + sum(_host_traffic(op, facts) for op in ops)
    return Demand(
        tokens_per_s=promise.tokens_per_s,
        host_bytes=promise.peak_host_bytes,
        nvme_bytes=promise.nvme_bytes,
        dram_bytes_s=dram / promise.step_s,
        **{f"{link}_bytes_s": moved[link] / promise.step_s for link in _LINKS},
    )


def _host_traffic(op: Op, facts: ModelFacts) -> int:
    """Bytes that the CPU itself reads and writes for an operation."""
    if op.kind == "update":
        return facts.units[op.unit].parameters * BYTES_PER_UPDATE
    return HOST_PASSES.get(op.kind, 0) * op.bytes
