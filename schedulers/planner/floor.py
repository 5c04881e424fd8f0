"""What counts take at least, in closed form: it spares the local search most of its simulations."""

from __future__ import annotations

from dataclasses import dataclass

from ...jobs.policy import lower
from ..baselines import keep_all
from ..costs import REFORWARD, forward_seconds, op_seconds
from .choices import Kept, sorts_of
from .counts import Counts
from .search import Question


@dataclass(frozen=True)
class Floor:
    """Least step time and GPU memory of any policy with given counts, one micro-batch at least of each."""

    edge_s: float
    """Before the first compute operation and after the last."""
    compute_s: float
    """Compute when nothing is kept and nothing recomputed."""
    forward_s: float
    """Forward of the fastest layer, for all micro-batches."""
    spared_s: dict[tuple[int, Kept], float]
    """Compute that a layer of a sort spares by what it keeps."""
    size: dict[tuple[int, Kept], int]
    boundary_bytes: int
    fixed_bytes: int
    """GPU memory at the loss beside boundaries, internals, slots and residents."""
    slot_bytes: int
    lightest_bytes: int
    layers: int
    budget_bytes: int

    @classmethod
    def of(cls, question: Question) -> Floor:
        """The floor of a question."""
        facts, profile, number = question.facts, question.profile, question.accumulation
        sorts = sorts_of(facts)
        program = lower(keep_all(facts, accumulation=number), facts)
        compute = [op for op in program.ops if op.stream == "compute"]
        first = [op for op in program.ops if op.kind == "load"][:1]
        last = [op for op in program.ops if op.kind == "gradient" and op.unit == 0][-1:]
        forward_s = [number * forward_seconds(layer, facts, profile) for layer in facts.layers]
        size = {(s, k): layer.kept_bytes(k) for s, layer in zip(sorts, facts.layers, strict=True) for k in _KEPT}
        return cls(
            edge_s=sum(op_seconds(op, facts, profile) for op in (*first, *last)),
            compute_s=sum(op_seconds(op, facts, profile) for op in compute) + sum(forward_s),
            forward_s=min(forward_s),
            spared_s={(s, k): (1 - REFORWARD[k]) * f for s, f in zip(sorts, forward_s, strict=True) for k in _KEPT},
            size=size,
            boundary_bytes=min(facts.boundary_bytes),
            fixed_bytes=facts.side_bytes + facts.head.backward_workspace_bytes + facts.head.weight_bytes,
            slot_bytes=max(layer.weight_bytes for layer in facts.layers),
            lightest_bytes=min(layer.weight_bytes for layer in facts.layers),
            layers=len(facts.layers),
            budget_bytes=question.budgets.gpu_bytes,
        )

    def seconds(self, counts: Counts) -> float:
        """No policy with these counts takes less."""
        spared = sum(number * self.spared_s[key[:2]] for key, number in counts.kept.items())
        again = self.forward_s * sum((length - 1) * number for length, number in counts.blocks.items())
        return self.edge_s + self.compute_s - spared + again

    def missing_bytes(self, counts: Counts) -> int:
        """GPU memory by which all policies with these counts pass the budget at the loss; negative if they need not."""
        marks = self.layers - sum((length - 1) * number for length, number in counts.blocks.items())
        kept = sum(number * self.size[key[:2]] for key, number in counts.kept.items() if key[2] == "gpu")
        held = (marks - counts.away + 3) * self.boundary_bytes + kept
        slots = counts.weight_slots * self.slot_bytes + counts.resident * self.lightest_bytes
        return self.fixed_bytes + held + slots - self.budget_bytes


_KEPT: tuple[Kept, ...] = ("matmuls", "all")
