"""From a policy, a model and a machine to a timeline, and to the few numbers that a plan promises."""

from __future__ import annotations

from ...jobs.model_facts import ModelFacts
from ...jobs.policy import Policy, Predicted, Program, lower
from ...jobs.timeline import Timeline
from ..costs import host_bytes, host_traffic, layer_forwards, program_seconds, state_bytes
from ..hardware import HardwareProfile
from .run import period, run


def simulate(policy: Policy, facts: ModelFacts, profile: HardwareProfile) -> Timeline:
    """The predicted timeline of one optimizer step. Raises ProgramError for a policy made for other facts."""
    return _run(lower(policy, facts), facts, profile)


def predict(policy: Policy, facts: ModelFacts, profile: HardwareProfile, program: Program | None = None) -> Predicted:
    """What one optimizer step should take and use. ``program`` saves lowering the policy again.

    ``peak_gpu_bytes`` is the bound that holds whatever the speed of any link, so a plan that respects it cannot run out
    of memory; ``host_bytes_per_parameter`` counts the model's state alone. Raises ProgramError as `simulate`.
    """
    program = program or lower(policy, facts)
    timeline = _run(program, facts, profile)
    on_host = host_bytes(facts, policy, program, pinned_limit_bytes=profile.pinned_limit_bytes)
    step_s = timeline.step_s
    tokens = facts.tokens * policy.accumulation
    return Predicted(
        step_s=step_s,
        tokens_per_s=tokens / step_s,
        tflops_6n=6 * facts.parameters * tokens / step_s / 1e12,
        compute_units=layer_forwards(program, facts, profile),
        peak_gpu_bytes=program.peak_bytes("gpu"),
        peak_host_bytes=sum(on_host.values()),
        nvme_bytes=program.peak_bytes("nvme"),
        host_bytes_per_parameter=sum(state_bytes(facts, policy).values()) / facts.parameters,
        exposed_s=timeline.exposed_s,
    )


def step_seconds(program: Program, facts: ModelFacts, profile: HardwareProfile) -> float:
    """The step time that `simulate` gives, without its timeline."""
    seconds = program_seconds(program, facts, profile)
    return max(period(program, seconds), host_seconds(program, facts, profile))


def host_seconds(program: Program, facts: ModelFacts, profile: HardwareProfile) -> float:
    """Seconds in which host memory can serve all that a step reads from it and writes to it."""
    return host_traffic(program, facts, profile) / profile.host_bytes_s


def _run(program: Program, facts: ModelFacts, profile: HardwareProfile) -> Timeline:
    seconds = program_seconds(program, facts, profile)
    return run(program, seconds, at_least_s=host_seconds(program, facts, profile))
