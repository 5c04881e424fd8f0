"""Another policy for a run whose machine is not as fast as its profile says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...jobs.policy import Policy
from ...jobs.spec import JobSpec
from ...jobs.timeline import Timeline
from ...schedulers.hardware import HardwareProfile
from ...schedulers.replan import Calibration, Measured, replan
from ..planning import Limits
from .measuring import Measuring


def plan_for_drift(asked: Mapping[str, Any], measuring: Measuring) -> dict[str, Any]:
    """How far off the run's prediction was, and what a new policy would gain on the machine as it was measured.

    ``asked`` holds the job's ``spec``, the ``policy`` that runs, the ``profile`` for which it was made, ``gpu_bytes``,
    the device memory that the run has (None: all of it), and the path of the ``steps`` that it has recorded. The new
    policy takes no more memory of the node than the old one. The answer's ``words`` say what was measured, and are
    empty where nothing has drifted; ``policy`` is None where no other is worth a switch, or could be switched to
    without a restart. ``calibration`` has the fields of `Calibration` and its words as ``sentence``.
    """
    spec, policy = JobSpec.model_validate(asked["spec"]), Policy.model_validate(asked["policy"])
    profile = HardwareProfile.model_validate(asked["profile"])
    shape = (policy.micro_batch, policy.sequence_length)
    facts = measuring.facts(spec, batch=shape[0], length=shape[1], dtype=spec.model.dtype)
    steps = [Timeline.from_dict(step) for step in json.loads(Path(asked["steps"]).read_bytes())["steps"]]
    measured = Measured.of(steps, policy, facts, profile)
    calibration = Calibration.of(steps, policy, facts, measured.calibrated(profile))
    answer: dict[str, Any] = {"words": "", "policy": None, "tokens_per_s": 0.0, "calibration": None}
    if calibration is not None:
        answer["calibration"] = {**asdict(calibration), "sentence": calibration.words}
    found = replan(policy, facts, profile, measured, **limits_of(spec, policy, asked["gpu_bytes"]))
    if found is None:
        return answer
    answer["words"] = found.words
    new = found.answer.policy if found.answer is not None else None
    if new is None or new.homes_of_state != policy.homes_of_state:
        return answer
    rate = new.micro_batch * new.sequence_length * new.accumulation / found.new_step_s
    return {**answer, "policy": new.model_dump(mode="json", by_alias=True), "tokens_per_s": rate}


def limits_of(spec: JobSpec, policy: Policy, gpu_bytes: int | None) -> dict[str, Any]:
    """Options of `plan` with which another policy takes no more memory of the node than this one."""
    limits, taken = Limits.of(spec), policy.predicted
    return {
        "planner": limits.planner,
        "solve_seconds": limits.solve_seconds,
        "optimizer": limits.optimizer,
        "gpu_memory": gpu_bytes,
        "host_memory": taken.peak_host_bytes if taken else None,
        "nvme": taken.nvme_bytes if taken else None,
    }
