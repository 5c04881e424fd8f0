"""What operations cost: the seconds of each one on a machine, and the bytes of the model's state on the host."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import Final

from ..jobs.model_facts import ModelFacts, UnitFacts
from ..jobs.optimizer_bytes import DEFAULT_OPTIMIZER, OptimizerOptions
from ..jobs.pinning import decide_pinning
from ..jobs.policy import DIRECT, Op, Parked, Policy, Program, lower
from ..jobs.policy.artifact import Home
from ..jobs.policy.lowering import GRADIENT_STAGING, NVME_STAGING
from .hardware import BYTES_PER_UPDATE, HardwareProfile

LINK_RATES: Final = {
    "h2d": "h2d_bytes_s",
    "d2h": "d2h_bytes_s",
    "nvme_write": "nvme_write_bytes_s",
    "nvme_read": "nvme_read_bytes_s",
}
"""The field of the profile that says how fast each link is."""
HOST_PASSES: Final = {"accumulate": 3, "norm": 1}
"""How often a host operation touches its gradient's bytes: adding reads two and writes one, the norm reads."""


def op_seconds(op: Op, facts: ModelFacts, profile: HardwareProfile) -> float:
    """Seconds that ``op`` takes alone on its stream."""
    return _seconds(op, facts.units, facts, profile)


def program_seconds(program: Program, facts: ModelFacts, profile: HardwareProfile) -> list[float]:
    """Seconds that each operation takes alone on its stream."""
    units = facts.units
    return [_seconds(op, units, facts, profile) for op in program.ops]


def _seconds(op: Op, units: tuple[UnitFacts, ...], facts: ModelFacts, profile: HardwareProfile) -> float:
    if op.stream in LINK_RATES:
        rate: float = getattr(profile, LINK_RATES[op.stream])
        return op.bytes / rate
    if op.kind == "update":
        return units[op.unit].trainable_parameters / profile.update_parameters_s
    if op.kind in HOST_PASSES:
        return HOST_PASSES[op.kind] * op.bytes / profile.host_bytes_s
    if op.kind == "clip":
        return 0.0
    unit = units[op.unit]
    return _forwards(op, unit, profile) * forward_seconds(unit, facts, profile) + profile.operation_overhead_s


def host_traffic(program: Program, facts: ModelFacts, profile: HardwareProfile) -> float:
    """Bytes that a step reads from and writes to host memory."""
    units = facts.units
    updated = sum(units[op.unit].trainable_parameters for op in program.ops if op.kind == "update")
    passed = sum(HOST_PASSES[op.kind] * op.bytes for op in program.ops if op.kind in HOST_PASSES)
    moved = sum(op.bytes for op in program.ops if op.stream in LINK_RATES and op.kind not in DIRECT)
    return updated * update_traffic(profile) + passed + moved


def update_traffic(profile: HardwareProfile) -> float:
    """Bytes of host memory that one parameter's update touches; fewer where it was measured faster than they allow."""
    return min(BYTES_PER_UPDATE, profile.host_bytes_s / profile.update_parameters_s)


def forward_seconds(unit: UnitFacts, facts: ModelFacts, profile: HardwareProfile) -> float:
    """Seconds of one forward of ``unit`` on one micro-batch."""
    products = unit.forward_flops - unit.attention_flops
    return products / profile.flops(facts.dtype) + unit.attention_flops / profile.attention(facts.dtype)


def layer_forwards(program: Program, facts: ModelFacts, profile: HardwareProfile) -> float:
    """Layer compute of one micro-batch in units of one forward: 3 keeps everything, 4 checkpoints every layer.

    To the digit only where a backward takes two forwards on the machine.
    """
    layers = range(len(facts.before), len(facts.before) + len(facts.layers))
    work = sum(
        _forwards(op, facts.units[op.unit], profile) * facts.units[op.unit].forward_flops
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
    program = program or lowered(policy, facts)
    state, on_host = state_bytes(facts, policy), program.peak_bytes("host")
    staging = _static_host_bytes(program)
    rings = decide_pinning(state["weights"] + state["gradients"] + on_host, pinned_limit_bytes).ring_bytes
    return {**state, "activations": on_host - staging, "staging": staging + rings}


def state_bytes(
    facts: ModelFacts,
    policy: Policy | None = None,
    *,
    accumulation: int = 1,
    optimizer: OptimizerOptions = DEFAULT_OPTIMIZER,
) -> dict[str, int]:
    """Bytes of the model's state on the host.

    Micro-batches, the optimizer's options and what is on NVMe are the policy's; without one, ``accumulation`` and
    ``optimizer`` say the first two and nothing is on NVMe. A gradient to which more than one micro-batch or layer
    contributes is summed up in float32.
    """
    if policy is not None:
        accumulation, optimizer = policy.accumulation, policy.optimizer
    parked = Parked.of(policy, facts) if policy else Parked({}, frozenset())
    each = optimizer.bytes_per_parameter(facts.element_bytes)
    learning = [unit.gradient_bytes // facts.element_bytes for unit in facts.units]
    with_state = facts.trainable_parameters - sum(learning[unit] for unit in parked.state)
    more = sum(
        learning[number] * (optimizer.bytes_per_parameter(unit=unit.name)["optimizer_state"] - each["optimizer_state"])
        for number, unit in enumerate(facts.units)
        if number not in parked.state and not unit.shares_weights_with
    )
    gradients = gradient_bytes(facts, accumulation)
    return {
        "weights": facts.parameters * facts.element_bytes,
        "master": round(with_state * each["master"]),
        "optimizer_state": round(with_state * each["optimizer_state"] + more),
        "gradients": sum(size for unit, size in gradients.items() if unit not in parked.gradients),
    }


def gradient_bytes(facts: ModelFacts, accumulation: int = 1) -> dict[int, int]:
    """Bytes of each unit's gradient on the host, by index of the unit; one that shares another's weights has none."""
    contributors = Counter(unit.shares_weights_with or unit.name for unit in facts.units if unit.gradient_bytes)
    return {
        number: unit.trainable_parameters * (facts.element_bytes if contributors[unit.name] * accumulation == 1 else 4)
        for number, unit in enumerate(facts.units)
        if unit.gradient_bytes and not unit.shares_weights_with
    }


def staging_bytes(facts: ModelFacts, home: Home, accumulation: int = 1) -> int:
    """Host buffers through which copies pass when boundaries live in ``home``: those that `lower` holds all along.

    Every contribution to a gradient but the first is added to what is there, and passes through a buffer.
    """
    boundaries = max(facts.boundary_bytes[1:-1], default=0) if home == "nvme" else 0
    owners = Counter(unit.shares_weights_with or unit.name for unit in facts.units if unit.gradient_bytes)
    added = [
        unit.gradient_bytes
        for unit in facts.units
        if unit.gradient_bytes and owners[unit.shares_weights_with or unit.name] * accumulation > 1
    ]
    return NVME_STAGING * boundaries + GRADIENT_STAGING * max(added, default=0)


def lowered(policy: Policy, facts: ModelFacts) -> Program:
    """As `lower`; the last programs are kept, for a planner asks for the same ones again and again.

    Raises ProgramError for a policy made for other facts.
    """
    return _lowered(policy.model_copy(update={"predicted": None, "certificate": None}), facts)


@lru_cache(maxsize=32)
def _lowered(policy: Policy, facts: ModelFacts) -> Program:
    return lower(policy, facts)


def _static_host_bytes(program: Program) -> int:
    return sum(buffer.bytes for buffer in program.buffers if buffer.tier == "host" and not buffer.acquired_by)


def _forwards(op: Op, unit: UnitFacts, profile: HardwareProfile) -> float:
    """Compute of an operation in units of the unit's forward."""
    if op.kind == "loss":
        return 1 + backward_forwards(unit, profile)  # the chunked head makes its gradients at once
    if op.kind == "backward":
        return 0.0 if unit.kind == "head" else profile.reforward(op.internals) + backward_forwards(unit, profile)
    return 1.0


def backward_forwards(unit: UnitFacts, profile: HardwareProfile) -> float:
    """Compute of a unit's gradients in units of its forward: half of it is for the weights, as far as they learn.

    A unit without parameters has only its input's gradient to make.
    """
    learning = unit.trainable_parameters / unit.parameters if unit.parameters else 0.0
    return profile.backward_forwards * (0.5 + 0.5 * learning)
