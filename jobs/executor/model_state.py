"""``state_dict`` and ``load_state_dict`` of a streamed model, whose parameters have no memory between their uses.

While torch reads or writes a unit's parameters they are bound to its weights on the host. So everything that is built
on these two methods works: ``save_pretrained``, the checkpoints of trainers, adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..errors import ProgramError
from .homes import Keeper
from .stores import HostUnit


class ModelState:
    """Hooks on the modules of the units, until `remove`."""

    def __init__(self, model: nn.Module, units: Sequence[HostUnit], keeper: Keeper) -> None:
        self._device, self._flush, self._change = keeper.device, keeper.flush, keeper.change
        self._masters: dict[str, torch.Tensor] = {}
        self._handles: list[Any] = []
        for path, unit in {unit.path: unit for unit in reversed(units)}.items():
            module = model.get_submodule(path)
            self._handles += [
                module.register_state_dict_pre_hook(partial(self._show, unit)),
                module.register_state_dict_post_hook(partial(self._hide, unit)),
                module.register_load_state_dict_pre_hook(partial(self._open, unit)),
                module.register_load_state_dict_post_hook(partial(self._take, unit)),
            ]

    def remove(self) -> None:
        """Let torch see the parameters as they are."""
        for handle in self._handles:
            handle.remove()

    def _show(self, unit: HostUnit, *_: Any) -> None:
        self._flush()
        unit.bind(unit.weights.streamed)

    def _hide(self, unit: HostUnit, *_: Any) -> None:
        unit.unbind(self._device)

    def _open(
        self, unit: HostUnit, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, *_: Any
    ) -> None:
        if not any(key.startswith(prefix) for key in state):
            return
        if metadata.get("assign_to_params_buffers"):
            raise ProgramError("a streamed model cannot be given other tensors", hint="load with assign=False")
        self._change()
        self._masters[unit.name] = unit.weights.master()
        unit.bind(self._masters[unit.name])

    def _take(self, unit: HostUnit, *_: Any) -> None:
        master = self._masters.pop(unit.name, None)
        if master is not None:
            unit.weights.load_master(master)
            unit.unbind(self._device)
            unit.note_versions()
