"""What operations cost: the seconds of each one on a machine, and the bytes of the model's state on the host."""

from __future__ import annotations

from typing import Final

from ..jobs.model_facts import ModelFacts, UnitFacts
from ..jobs.pinning import decide_pinning
from ..jobs.policy import MASTER_BYTES, STATE_BYTES, Op, Parked, Policy, Program, lower
from ..jobs.policy.artifact import Home
from ..jobs.policy.program import Internals
from .hardware import HardwareProfile

BACKWARD_FORWARDS: Final = 2.0
"""Backward costs two forwards: one product for the gradient of the input, one for that of the weights."""
REFORWARD: Final[dict[Internals, float]] = {"none": 1.0, "matmuls": 0.13, "all": 0.0}
"""Forwards that backward repeats, by what is kept; 0.13 for the element-wise rest was measured on a Llama layer."""

_LINKS: Final = {
    "load": "h2d_bytes_s",
    "reload": "h2d_bytes_s",
    "swap_in": "h2d_bytes_s",
    "offload": "d2h_bytes_s",
    "swap_out": "d2h_bytes_s",
    "gradient": "d2h_bytes_s",
    "write": "nvme_write_bytes_s",
    "read": "nvme_read_bytes_s",
    "read_state": "nvme_read_bytes_s",
    "write_state": "nvme_write_bytes_s",
    "read_gradient": "nvme_read_bytes_s",
    "write_gradient": "nvme_write_bytes_s",
}
HOST_PASSES: Final = {"accumulate": 3, "norm": 1}
"""How often a host operation touches its gradient's bytes: adding reads two and writes one, the norm reads."""


def op_seconds(op: Op, facts: ModelFacts, profile: HardwareProfile) -> float:
    """Seconds that ``op`` takes alone on its stream."""
    if op.kind in _LINKS:
        rate: float = getattr(profile, _LINKS[op.kind])
        return op.bytes / rate
    if op.kind == "update":
        return facts.units[op.unit].trainable_parameters / profile.update_parameters_s
    if op.kind in HOST_PASSES:
        return HOST_PASSES[op.kind] * op.bytes / profile.host_bytes_s
    if op.kind == "clip":
        return 0.0
    return _forwards(op, facts.units[op.unit]) * forward_seconds(facts.units[op.unit], facts, profile) + (
        profile.operation_overhead_s
    )


def forward_seconds(unit: UnitFacts, facts: ModelFacts, profile: HardwareProfile) -> float:
    """Seconds of one forward of ``unit`` on one micro-batch."""
    return unit.forward_flops / profile.flops(facts.dtype)


def layer_forwards(program: Program, facts: ModelFacts) -> float:
    """Layer compute of one micro-batch in units of one forward: 3 keeps everything, 4 checkpoints every layer."""
    layers = range(len(facts.before), len(facts.before) + len(facts.layers))
    work = sum(
        _forwards(op, facts.units[op.unit]) * facts.units[op.unit].forward_flops
        for op in program.ops
        if op.stream == "compute" and op.unit in layers and op.micro == 0
    )
    return work / sum(layer.forward_flops for layer in facts.layers)


def host_bytes(
    facts: ModelFacts, policy: Policy, program: Program | None = None, *, pinned_limit_bytes: int | None = None
) -> dict[str, int]:
    """Bytes on the host by purpose; the sum is what a job needs beside the Python process itself.

    ``weights`` is what streams to the GPU, ``master`` what the exact float32 weights need beyond it. With bfloat16 the
    state is 2 + 2 + 2.03 + 2 = 8.03 bytes per parameter. ``program`` saves lowering the policy again.
    Where not all that the links reach can be pinned, ``staging`` includes the rings of pinned slabs.
    """
    program = program or lower(policy, facts)
    state, on_host = state_bytes(facts, policy), program.peak_bytes("host")
    staging = _static_host_bytes(program)
    rings = decide_pinning(state["weights"] + state["gradients"] + on_host, pinned_limit_bytes).ring_bytes
    return {**state, "activations": on_host - staging, "staging": staging + rings}


def state_bytes(facts: ModelFacts, policy: Policy | None = None) -> dict[str, int]:
    """Bytes of the model's state on the host; without a ``policy``, with none of it on NVMe."""
    parked = Parked.of(policy, facts) if policy else Parked({}, frozenset())
    learning = [unit.gradient_bytes // facts.element_bytes for unit in facts.units]
    with_state = facts.trainable_parameters - sum(learning[unit] for unit in parked.state)
    with_gradient = facts.trainable_parameters - sum(learning[unit] for unit in parked.gradients)
    return {
        "weights": facts.parameters * facts.element_bytes,
        "master": with_state * (MASTER_BYTES - facts.element_bytes),
        "optimizer_state": round(with_state * STATE_BYTES),
        "gradients": with_gradient * facts.element_bytes,
    }


def staging_bytes(facts: ModelFacts, home: Home, accumulation: int = 1) -> int:
    """Host buffers through which copies pass when boundaries live in ``home``."""
    homes: list[Home] = [home if i else "gpu" for i in range(len(facts.layers))]
    program = lower(Policy.from_homes(facts, [*homes, "gpu"], accumulation=accumulation), facts)
    return _static_host_bytes(program)


def _static_host_bytes(program: Program) -> int:
    return sum(buffer.bytes for buffer in program.buffers if buffer.tier == "host" and not buffer.acquired_by)


def _forwards(op: Op, unit: UnitFacts) -> float:
    """Compute of an operation in units of the unit's forward."""
    if op.kind == "loss":
        return 1 + backward_forwards(unit)  # the chunked head makes its gradients at once
    if op.kind == "backward":
        return 0.0 if unit.kind == "head" else REFORWARD[op.internals] + backward_forwards(unit)
    return 1.0


def backward_forwards(unit: UnitFacts) -> float:
    """Compute of a unit's gradients in units of its forward: one for its input, one for its weights that learn."""
    return BACKWARD_FORWARDS - unit.frozen_parameters / unit.parameters
