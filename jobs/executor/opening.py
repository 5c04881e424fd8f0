"""`stream`: the same Hugging Face model, with its weights on the host and its layers carried through one device."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from ..errors import ProgramError
from ..introspect import model_facts
from ..model_facts import ModelFacts
from ..policy import Policy
from ..structure import LOOSE, own_parameters, path_of
from . import failures
from .at_rest import check_parameters
from .buffers import Buffers
from .devices import Device, Emulated, open_device
from .engine import Engine
from .kernels import apply_liger, compile_layers
from .patches import Patches, inner_model, is_streamed
from .stores import HostUnit, Optimizer
from .stores.nvme import NvmeFile
from .streamed import Streamed

log = logging.getLogger(__name__)


def stream(
    model: nn.Module,
    policy: Policy,
    *,
    device: str | Emulated = "auto",
    optimizer: Optimizer | None = None,
    facts: ModelFacts | None = None,
    nvme_directory: str | Path | None = None,
    compile: bool | str = False,
    liger: bool = False,
    debug: bool = False,
) -> Streamed:
    """Take the model's weights over and stream its layers through ``device`` as ``policy`` says.

    ``streamed.model`` is the same object: ``model(**batch).loss.backward()`` and ``model.generate(...)`` work.
    The model may be one of ``transformers`` or of ``peft``. Parameters that are frozen now are streamed, and do not
    learn. Weights stream in the model's dtype (float32 or bfloat16). ``nvme_directory`` is where everything with a home
    on NVMe goes (the system's temporary directory by default). Raises ProgramError if the policy was made for another
    model or batch or a parameter has a hook on its gradient, HardwareError if it wants GPUDirect Storage where there is
    none, ModelError for what is no model of ``transformers``, OutOfMemory if the device has no room for the weight
    slots, or the host for the weights: the model is then as it was.

    Between their uses parameters have no memory; they are read and written all the same, under ``torch.no_grad()``, as
    those of a plain model (`at_rest`).

    ``compile`` compiles the layers (True: by torch's default backend; or a backend's name), ``liger`` gives them
    Liger's fused kernels; both change results by rounding, and `kernels` says what they cost and when they are refused.

    ``debug`` proves the waits of each program before it runs, watches that they are kept, fills memory that nobody may
    read any more with NaN, and raises InvariantBroken with the invariant's name (`policy.hazards.INVARIANTS`).
    """
    inner = inner_model(model)
    if is_streamed(inner):
        raise ProgramError("the model is streamed already", hint="close() that streaming first")
    check_parameters(inner)
    facts = facts or model_facts(
        inner,
        micro_batch=policy.micro_batch,
        sequence_length=policy.sequence_length,
        dtype="float32" if next(model.parameters()).dtype == torch.float32 else "bfloat16",
    )
    policy.check(facts)
    _say_what_is_converted(inner, facts)
    opened = open_device(device)
    patches = Patches()
    if liger:
        apply_liger(inner, opened.torch_device)
    if compile:
        compile_layers(inner, facts, policy, "inductor" if compile is True else compile, patches)
    directory = Path(nvme_directory or tempfile.gettempdir())
    states = NvmeFile(directory) if optimizer is not None and policy.optimizer_home == "nvme" else None
    units: list[HostUnit] = []
    try:
        units += _host_units(inner, facts, policy, optimizer, opened, states)
        for unit, known in zip(units, facts.units, strict=True):
            if not known.shares_weights_with:
                unit.weights.streamed = opened.adopt(unit.weights.streamed)
        engine = Engine(facts, policy, units, opened, optimizer, directory, debug=debug)
    except BaseException as error:
        _give_back(units, opened, states, patches)
        raise failures.in_compute(error) from error.__cause__
    return Streamed(model, engine, opened, optimizer, states, patches)


def _say_what_is_converted(model: PreTrainedModel, facts: ModelFacts) -> None:
    others = [name for name, p in model.named_parameters() if p.dtype != getattr(torch, facts.dtype)]
    if others:
        log.warning(
            "%d parameters (%s, ...) stream and compute in %s like the rest, which is not their dtype",
            *(len(others), others[0], facts.dtype),
        )


def _give_back(units: list[HostUnit], device: Device, states: NvmeFile | None, patches: Patches) -> None:
    patches.undo()
    for unit in units:
        unit.bind(unit.weights.streamed)
    device.close()
    if states is not None:
        states.close()


def _host_units(
    model: PreTrainedModel,
    facts: ModelFacts,
    policy: Policy,
    optimizer: Optimizer | None,
    device: Device,
    states: NvmeFile | None,
) -> list[HostUnit]:
    """The model's weights, taken over unit by unit; optimizer state that belongs on NVMe goes there at once."""
    dtype = getattr(torch, facts.dtype)
    parked = {facts.layers[layer.index].name for layer in policy.layers if layer.optimizer_home == "nvme"}
    units: dict[str, HostUnit] = {}
    loose = {name: model.get_parameter(name) for name in facts.loose}
    own = {
        unit.name: loose if unit.name == LOOSE else own_parameters(model.get_submodule(path_of(unit.name)), loose)
        for unit in facts.units
    }
    for unit in facts.units:
        owner = units.get(unit.shares_weights_with)
        path = "" if unit.name == LOOSE else path_of(unit.name)
        units[unit.name] = HostUnit(unit.name, path, own[unit.name], dtype, optimizer, owner)
        if path:
            units[unit.name].buffers = Buffers(model.get_submodule(path))
        if states is not None and unit.name in parked and unit.gradient_bytes:
            units[unit.name].park(states)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device.torch_device)
    return list(units.values())
