"""From a job file to a plan: find the model's shape, take its facts at a batch, ask the planner.

Torch and transformers are imported where they are used, because planning for a model whose facts are known starts
without, and so is the solver, which a node that measures models for a server does not have.
"""

from __future__ import annotations

import gc
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ..jobs.errors import DoesNotFit, HardwareError, InputError, ModelError
from ..jobs.model_facts import ModelFacts
from ..jobs.optimizer_bytes import DEFAULT_OPTIMIZER, OptimizerOptions
from ..jobs.policy import Policy
from ..jobs.units import MOST_SOLVE_S, format_bytes, format_needed
from ..schedulers.batch_search import BatchSearch, Probe
from ..schedulers.hardware import HardwareProfile, hardware, known_models, model_config, what_is_at
from ..schedulers.simulator import simulate
from .known_facts import KnownFacts

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from ..jobs.executor.devices import Emulated
    from ..jobs.spec import JobSpec
    from ..schedulers.planner import Plan

_ORIGIN = ("_name_or_path", "transformers_version")
"""Entries of a configuration that say where it is from."""
_MOST_CONFIG_BYTES = 1 << 24
"""Of a configuration file: no model's comes near, a file of weights is larger."""
_HUB_SECONDS = 10.0
_HUB_ID = re.compile(r"\w[\w.-]{0,95}(/\w[\w.-]{0,95})?", re.ASCII)
_SPARED = ("scipy", "accelerate")
"""Losses of image models, and loading weights onto several devices: a third of a second."""
PLAIN_BYTES_PER_PARAMETER = 16
"""Mixed-precision AdamW without offloading: bf16 weight and gradient, float32 master, m and v."""

ModelSource: TypeAlias = "PretrainedConfig | PreTrainedModel | dict[str, Any]"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the planner may use; None means what the profile offers. Raises InputError for an impossible time."""

    planner: str = "full"
    gpu_memory: str | int | None = None
    host_memory: str | int | None = None
    nvme: str | int | None = None
    solve_seconds: float = 20.0
    optimizer: OptimizerOptions = DEFAULT_OPTIMIZER

    def __post_init__(self) -> None:
        if not 0 < self.solve_seconds <= MOST_SOLVE_S:
            raise InputError(
                f"the solver cannot have {self.solve_seconds:g} seconds",
                hint=f"give it some, and not more than {MOST_SOLVE_S:,.0f}",
            )

    @classmethod
    def of(cls, spec: JobSpec) -> Limits:
        """The limits that the job file states."""
        section = spec.plan
        return cls(
            planner=section.planner,
            gpu_memory=None if section.gpu_memory == "auto" else section.gpu_memory,
            host_memory=None if section.host_memory == "auto" else section.host_memory,
            nvme=None if section.nvme else 0,
            solve_seconds=section.solve_seconds,
            optimizer=OptimizerOptions.model_validate(spec.optimizer.arguments()),
        )

    def override(self, **given: Any) -> Limits:
        """These limits with every given value that is not None in place of its own."""
        return replace(self, **{name: value for name, value in given.items() if value is not None})


def find_model(name: str, *, trust_remote_code: bool = False) -> PretrainedConfig | dict[str, Any]:
    """The configuration of a model: a shape known by name, a configuration file, an HF directory or a hub id."""
    if name.lower() in known_models():
        return model_config(name)
    path = what_is_at(name)
    if path is not None and path.is_file():
        return _config_file(path)
    hint = f"give a directory, a config.json, a hub id, or one of {', '.join(known_models())}"
    if path is None and not _HUB_ID.fullmatch(name):
        raise ModelError(f"no model configuration at {name[:80]!r}: there is no such file or folder", hint=hint)
    if path is None:
        _ask_hub(name, hint)
    with uncollected():
        from transformers import AutoConfig

    from ..jobs.foreign import FOREIGN, words_of

    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except FOREIGN as error:
        if "trust_remote_code" in str(error):
            raise ModelError(
                f"the model {name} brings code of its own, which is not run unasked",
                hint="if you trust it, name a job file that says model.trust_remote_code: true",
            ) from error
        raise ModelError(f"no model configuration at {name}: {words_of(error)}", hint=hint) from error
    return config


def model_of(spec: JobSpec) -> ModelSource:
    """What the job trains, without weights: its configuration, or the model on ``meta`` with what is frozen.

    Raises ModelError, also for names that the model lacks.
    """
    source = find_model(spec.model.path, trust_remote_code=spec.model.trust_remote_code)
    if spec.lora is None and not spec.train.freeze:
        return source
    import torch

    from ..jobs.fake_model import meta_model
    from ..jobs.learning import select_learning

    return select_learning(meta_model(source, getattr(torch, spec.model.dtype)), spec)


def load_tokenizer(spec: JobSpec) -> Any:
    """The tokenizer of the job's model. Raises ModelError when there is none."""
    from transformers import AutoTokenizer

    from ..jobs.foreign import FOREIGN, words_of

    try:
        return AutoTokenizer.from_pretrained(spec.model.path, trust_remote_code=spec.model.trust_remote_code)
    except FOREIGN as error:
        raise ModelError(
            f"no tokenizer at {spec.model.path}: {words_of(error)}",
            hint="model.path is a folder with config.json, safetensors and a tokenizer, or a hub id",
        ) from error


def _ask_hub(name: str, hint: str) -> None:
    """Ask once whether the hub answers at all, where transformers would try for half a minute. Raises ModelError."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError

    from ..jobs.foreign import words_of

    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=_HUB_SECONDS)
    except HfHubHTTPError:
        return  # it answers; what it has to say transformers puts into words
    except Exception as error:  # whatever the hub's client raises where nobody answers
        raise ModelError(
            f"no model configuration at {name}: it is no file or folder, and the hub does not answer "
            f"({words_of(error)[:120]})",
            hint=hint,
        ) from error


def _config_file(path: Path) -> dict[str, Any]:
    hint = "give the config.json of a model in Hugging Face's layout, or the folder that it is in"
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_CONFIG_BYTES + 1)
        if len(text) > _MOST_CONFIG_BYTES:
            raise ValueError(f"it has more than {_MOST_CONFIG_BYTES:,} bytes")
        config = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not a model configuration: {error}", hint=hint) from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelError(f"{path} is not a model configuration: it has no model_type that is a word", hint=hint)
    return config


def facts_of(
    source: ModelSource,
    *,
    batch: int,
    length: int,
    dtype: Literal["float32", "bfloat16"] = "bfloat16",
    known: KnownFacts | None = None,
) -> ModelFacts:
    """Facts of the model at ``batch`` rows of ``length`` tokens. Raises ModelError.

    Those of a configuration are taken from ``known`` and kept there, unless code that comes with the model decides.
    """

    def measure() -> ModelFacts:
        with uncollected():
            from ..jobs.introspect import model_facts

        return model_facts(source, micro_batch=batch, sequence_length=length, dtype=dtype)

    shape = None if known is None else shape_of(source)
    if known is None or shape is None:
        return measure()
    return known.of(shape, measure, batch=batch, length=length, dtype=dtype)


@contextmanager
def uncollected() -> Iterator[None]:
    """Import without looking for garbage: a fifth of the seconds that torch and transformers take, for modules stay."""
    enabled, known = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
        if len(sys.modules) > known:  # otherwise only garbage would stay for good
            gc.freeze()
    finally:
        if enabled:
            gc.enable()


def import_solver() -> None:
    """Import what `make_plan` needs, ahead of it."""
    from ..schedulers import planner  # noqa: F401


def spare_imports() -> None:
    """Have transformers do without what it imports wherever that is installed, though no facts depend on it.

    For a process that only measures models, none of which brings code of its own: these packages are not there for it.
    """
    for name in _SPARED:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # which makes its import fail


def shape_of(source: ModelSource) -> dict[str, Any] | None:
    """What facts depend on of a configuration, as JSON values; None for a model, and where code of its own decides."""
    if isinstance(source, dict):
        config = json.loads(json.dumps(source), parse_constant=str)
    else:
        from transformers import PretrainedConfig

        if not isinstance(source, PretrainedConfig):
            return None
        config = json.loads(source.to_json_string(use_diff=False), parse_constant=str)
    return None if "auto_map" in config else {name: value for name, value in config.items() if name not in _ORIGIN}


def make_plan(
    facts: ModelFacts,
    profile: HardwareProfile,
    limits: Limits,
    *,
    facts_at: Callable[[int], ModelFacts] | None = None,
) -> Plan:
    """The planner's answer; a plan that does not fit is an answer too.

    With ``facts_at`` it says whether a smaller micro-batch would fit.
    """
    from ..schedulers.planner import plan

    return plan(
        facts,
        profile,
        planner=limits.planner,
        gpu_memory=limits.gpu_memory,
        host_memory=limits.host_memory,
        nvme=limits.nvme,
        solve_seconds=limits.solve_seconds,
        optimizer=limits.optimizer,
        facts_at=facts_at,
    )


def feasible_policy(answer: Plan) -> Policy:
    """The policy of a feasible plan. Raises DoesNotFit with the reasons otherwise."""
    if answer.policy is None:
        raise does_not_fit(answer)
    return answer.policy


def does_not_fit(answer: Plan) -> DoesNotFit:
    """The reasons of an infeasible plan as an error."""
    reasons = tuple(reason.model_dump(mode="json") for reason in answer.reasons)
    short = "; ".join(
        f"{r.resource} needs {format_needed(r.needed_bytes)}, has {format_bytes(r.available_bytes)}"
        for r in answer.reasons
    )
    hint = answer.reasons[0].hint if answer.reasons else ""
    if answer.changes:
        hint = "; or ".join(change.words for change in answer.changes)
    return DoesNotFit(f"no plan fits: {short}", reasons=reasons, hint=hint)


def device_kind(text: str) -> tuple[str, HardwareProfile | None]:
    """What ``--device`` names: ``cpu`` or ``cuda``, or ``emulated`` with the profile of the GPU to emulate.

    ``auto`` is the GPU if there is one. Raises HardwareError for anything else.
    """
    import torch

    if text == "auto":
        return ("cuda" if torch.cuda.is_available() else "cpu"), None
    if text in ("cpu", "cuda"):
        return text, None
    kind, _, gpu = text.partition(":")
    if kind == "emulated" and gpu:
        return "emulated", hardware(gpu).model_copy(update={"device": "emulated"})
    raise HardwareError(
        f"no device is called {text!r}", hint="use auto, cpu, cuda or emulated:GPU, as in emulated:H800"
    )


def emulated(profile: HardwareProfile) -> Emulated:
    """The emulated device with the memory and the links of ``profile``."""
    from ..jobs.executor.devices import Emulated

    return Emulated(**emulated_fields(profile))


def emulated_fields(profile: HardwareProfile) -> dict[str, Any]:
    """Fields of `emulated`, also where torch is not installed."""
    return {
        "memory_bytes": profile.gpu_budget_bytes,
        "h2d_bytes_s": profile.h2d_bytes_s,
        "d2h_bytes_s": profile.d2h_bytes_s,
        "nvme_read_bytes_s": profile.nvme_read_bytes_s,
        "nvme_write_bytes_s": profile.nvme_write_bytes_s,
    }


def plain_training_bytes(facts: ModelFacts) -> int:
    """GPU bytes of training the model without streaming: all states, and all that autograd keeps."""
    kept = sum(unit.saved_bytes for unit in facts.units)
    return facts.parameters * PLAIN_BYTES_PER_PARAMETER + kept + facts.side_bytes + facts.head.backward_workspace_bytes


def predicted_batch(plan_batch: Callable[[int], Plan], *, low: int, high: int) -> Plan:
    """The plan of the batch with the most predicted tokens/s; nothing is run. Raises DoesNotFit when none fits."""
    search = BatchSearch(low, high, "throughput")
    plans: dict[int, Plan] = {}
    while (batch := search.ask()) is not None:
        answer = plans[batch] = plan_batch(batch)
        speed = answer.predicted.tokens_per_s if answer.predicted else 0.0
        search.tell(
            batch, Probe(answer.feasible, speed, reason="" if answer.feasible else does_not_fit(answer).message)
        )
    return plans[search.best.batch]


@dataclass(frozen=True)
class Observation:
    """A step that was run: by which policy, and how long it took."""

    facts: ModelFacts
    policy: Policy
    step_s: float


def calibrate(profile: HardwareProfile, observations: Sequence[Observation]) -> HardwareProfile:
    """``profile`` with the speed of compute at which predicted step times come closest to the measured ones.

    One factor scales the matrix rate and divides the overhead of operations. The square of log(predicted / measured) is
    minimised by golden-section search; predicted time falls with the factor, so there is one minimum. Without
    observations the profile is returned as it is.
    """
    if not observations:
        return profile

    def miss(log_factor: float) -> float:
        tried = _faster(profile, math.exp(log_factor))
        return sum(math.log(simulate(o.policy, o.facts, tried).step_s / o.step_s) ** 2 for o in observations)

    return _faster(profile, math.exp(golden_section(miss, math.log(1e-4), math.log(1e2))))


def _faster(profile: HardwareProfile, factor: float) -> HardwareProfile:
    """The profile of a device that computes ``factor`` times as fast.

    Layers cannot reach more than the matrix rate; beyond that the rate was measured too low, because something else
    ran at the time, and is corrected.
    """
    share = profile.efficiency * factor
    return profile.model_copy(
        update={
            "efficiency": min(1.0, share),
            **profile.faster(max(1.0, share)),
            "operation_overhead_s": profile.operation_overhead_s / factor,
        }
    )


def golden_section(function: Callable[[float], float], low: float, high: float, *, steps: int = 30) -> float:
    """Where a function with one minimum in [low, high] has it."""
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(steps):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        if function(left) <= function(right):
            high = right
        else:
            low = left
    return (low + high) / 2
