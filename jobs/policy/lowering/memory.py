"""What is held on each tier beside what a transfer brings or takes: outputs, their gradients, slots and staging."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from ..parked import RING, blocks
from .boundaries import NVME_STAGING
from .draft import Compute, Draft
from .gradients import GRADIENT_STAGING, Gradients


def hold_results(draft: Draft, compute: Compute) -> None:
    """Hold what a compute operation leaves for others."""
    unit, micro = compute.unit, compute.micro
    if compute.kind == "forward" and unit < draft.head:
        _hold_output(draft, compute)
    elif compute.kind == "recompute":
        backward = draft.id("backward", unit + 1, micro)
        draft.hold(f"output.{compute.id}", "gpu", draft.boundary_bytes(unit + 1), compute.id, backward)
    if compute.kind == "backward" and unit == draft.first + draft.layers - 1:
        _hold_sums(draft, compute)
    if _makes_gradient(draft, compute):
        is_layer = unit < draft.first + draft.layers
        size = draft.boundary_bytes(unit) if is_layer else draft.units[unit - 1].output_bytes
        reader = draft.id("backward", unit - 1 if unit > draft.first else 0, micro)
        draft.hold(f"gradient_out.{compute.id}", "gpu", size, compute.id, reader if draft.first else compute.id)


def _hold_sums(draft: Draft, compute: Compute) -> None:
    """What is added up is there after the first term, the last layer's, which is in the memory that its backward needs.

    Before the layers nothing is certain about when the sums go.
    """
    following = draft.computes[draft.position[compute.id] + 1] if compute.id != draft.computes[-1].id else compute
    draft.hold(
        f"sums.{compute.id}", "gpu", draft.facts.summed_bytes, following.id, draft.id("backward", 0, compute.micro)
    )


def _makes_gradient(draft: Draft, compute: Compute) -> bool:
    """Whether the operation leaves the gradient of its input, for the backward of the unit before."""
    if compute.unit == draft.head:
        return compute.kind == ("loss" if draft.facts.loss == "chunks" else "backward")
    return compute.kind == "backward" and compute.unit >= draft.first


def _hold_output(draft: Draft, compute: Compute) -> None:
    """An output lives until the next unit has read it and, where it stays on the GPU, run backward from it."""
    unit, micro, size = compute.unit, compute.micro, draft.units[compute.unit].output_bytes
    held_by_model: list[str] = []
    if unit < draft.first:
        draft.hold(f"output.{compute.id}", "gpu", size, compute.id, draft.id("forward", draft.first, micro))
        if unit < draft.first - 1:
            return  # the model adds the embeddings up to boundary 0
        held_by_model = [draft.id("forward", draft.head - 1, micro)] if draft.facts.input_stays else []
    reader = unit + 1
    size = draft.boundary_bytes(reader) if draft.home(reader) else size
    keeps = not draft.evaluates(compute)
    released = [draft.id("loss" if keeps and reader == draft.head else "forward", reader, micro)]
    home = draft.home(reader) or "gpu"
    if keeps and home == "gpu":
        released = [draft.id("backward", reader, micro)]
    elif keeps and home != "recompute":
        released.append(draft.id(draft.leaves_by(reader), reader, micro))
    draft.hold(f"boundary.{compute.id}", "gpu", size, compute.id, *released, *held_by_model)


def hold_static(draft: Draft, resident: Collection[int], gradients: Gradients) -> None:
    """Hold what is there all along: weight slots, what lies beside the units, staging buffers, what is parked."""
    largest = max(layer.weight_bytes for layer in draft.facts.layers)
    sizes = [largest] * draft.policy.weight_slots + [draft.units[unit].weight_bytes for unit in resident]
    for slot, size in enumerate(sizes):
        draft.hold(f"slot.{slot}", "gpu", size)
    draft.hold("side", "gpu", draft.facts.side_bytes - draft.facts.summed_bytes)
    moved: dict[str, int] = defaultdict(int)
    for op in draft.transfers:
        moved[op.kind] = max(moved[op.kind], op.bytes)
    for name, kind, count in (("nvme", "write", NVME_STAGING), ("gradient", "accumulate", GRADIENT_STAGING)):
        for slot in range(count):
            draft.hold(f"{name}_staging.{slot}", "host", moved[kind])
    _hold_parked(draft, gradients)


def _hold_parked(draft: Draft, gradients: Gradients) -> None:
    parked = {unit: gradients.host_bytes(unit) for unit in draft.parked.gradients}
    for name, sizes in (("state", draft.parked.state), ("gradient", parked)):
        for slot in range(min(RING, len(sizes))):
            draft.hold(f"{name}_ring.{slot}", "host", max(sizes.values()))
        for unit, size in sorted(sizes.items()):
            draft.hold(f"{name}_home.{draft.labels[unit]}", "nvme", blocks(size))
