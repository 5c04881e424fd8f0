"""What a streamed model is made of: modules, parameters, and which of them learn. It must stay so."""

from __future__ import annotations

from operator import is_

import torch
from torch import nn

from ..errors import ProgramError


class Makeup:
    """Remembers it, and finds at each forward what was changed."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._held = [(path, held) for path, module in model.named_modules() for held in _Held.of(module)]
        self._learning = self._learns_now()

    def check(self) -> None:
        """Raise ProgramError where a parameter or a module is not the one that it was."""
        for path, held in self._held:
            name = held.changed()
            if name is not None:
                raise ProgramError(
                    f"since stream(), {path}{'.' if path else ''}{name} of the model was replaced or removed",
                    hint="replace, tie, prune and parametrize before stream(), or close() the streaming first; values "
                    "can be written: under torch.no_grad(), or with load_state_dict()",
                )

    def check_learning(self) -> None:
        """Raise ProgramError where other parameters learn than did."""
        now = self._learns_now()
        if now != self._learning:
            raise ProgramError(
                f"since stream(), {len(now - self._learning)} parameters of the model were added or began to learn, "
                f"and {len(self._learning - now)} were removed or frozen",
                hint="freeze parameters and add adapters before stream()",
            )

    def _learns_now(self) -> frozenset[int]:
        with torch._C.DisableTorchFunctionSubclass():  # parameters at rest are many, and slow to ask one by one
            return frozenset(id(parameter) for parameter in self._model.parameters() if parameter.requires_grad)


class _Held:
    """What one module held under each name, parameters or modules."""

    def __init__(self, held: dict[str, object]) -> None:
        self._now, self._were = held, dict(held)
        self._values = tuple(held.values())

    @classmethod
    def of(cls, module: nn.Module) -> list[_Held]:
        return [cls(held) for held in (module._parameters, module._modules) if held]  # type: ignore[arg-type]

    def changed(self) -> str | None:
        """The first name under which something else is held now; what was added counts for nothing."""
        if len(self._now) >= len(self._values) and all(map(is_, self._now.values(), self._values)):
            return None  # asked at every forward, of every module
        return next((name for name, was in self._were.items() if self._now.get(name) is not was), None)
