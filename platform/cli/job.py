"""What ``train`` and ``tune`` do alike: read the job, measure the machine, plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ...jobs.data import Prepared, prepare
from ...jobs.executor import Emulated
from ...jobs.model_facts import ModelFacts
from ...jobs.spec import JobSpec
from ...schedulers.hardware import HardwareProfile
from ...schedulers.planner import Plan
from ..known_facts import KnownFacts
from ..models import facts_of, load_tokenizer, model_of
from ..planning import Limits, device_kind, emulated, make_plan, predicted_batch
from ..probe import measure
from ..settings import Settings

LARGEST_BATCH = 256
"""Where a search of the batch ends when nobody gives a limit."""


@dataclass
class Job:
    """A job file with its data, and the machine it is to run on."""

    spec: JobSpec
    data: Prepared
    device: str | Emulated
    profile: HardwareProfile
    limits: Limits
    known: KnownFacts
    """Facts of configurations that were measured before: a search of the batch asks for those of many batches."""

    @classmethod
    def open(cls, spec: JobSpec, device: str, settings: Settings) -> Job:
        """Read the data and measure this machine. Raises the typed errors of what is wrong with either."""
        kind, base = device_kind(device)
        data = prepare(spec.data, load_tokenizer(spec))
        nvme = Path(spec.plan.nvme) if spec.plan.nvme else settings.nvme_dir
        if nvme is not None:
            nvme.mkdir(parents=True, exist_ok=True)
            spec = spec.model_copy(update={"plan": spec.plan.model_copy(update={"nvme": str(nvme)})})
        profile = measure(base, nvme_dir=nvme, host_reserve_bytes=int(settings.host_reserve)).profile
        limits, known = Limits.of(spec), KnownFacts(settings.facts_dir)
        if kind != "emulated":
            return cls(spec, data, kind, profile, limits, known)
        gpu = emulated(profile)
        if limits.gpu_memory is not None:
            gpu = replace(gpu, memory_bytes=int(limits.gpu_memory))
        return cls(spec, data, gpu, profile, limits, known)

    @property
    def length(self) -> int:
        """Tokens of the longest training row."""
        return self.data.train.longest

    @property
    def largest_batch(self) -> int:
        """Upper end of a search."""
        return min(LARGEST_BATCH, len(self.data.train))

    def plan_batch(self, source: Any, batch: int) -> tuple[ModelFacts, Plan]:
        """Facts and plan at ``batch`` rows."""
        facts = facts_of(source, batch=batch, length=self.length, dtype=self.spec.model.dtype, known=self.known)
        return facts, make_plan(facts, self.profile, self.limits)

    def planner(self) -> Any:
        """`plan_batch` for this job's model."""
        return partial(self.plan_batch, model_of(self.spec))

    def plan(self) -> Plan:
        """The plan of the job file's batch; for ``auto``, of the batch with the best prediction."""
        plan_batch = self.planner()
        batch = self.spec.train.batch
        if batch != "auto":
            answer: Plan = plan_batch(batch)[1]
            return answer
        return predicted_batch(lambda rows: plan_batch(rows)[1], low=1, high=self.largest_batch)


def open_device_of(text: str) -> str | Emulated:
    """The device that ``--device`` names, as the executor takes it."""
    kind, base = device_kind(text)
    return kind if base is None else emulated(base)
