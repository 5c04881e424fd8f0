"""What torch and transformers import wherever it is installed, though no facts depend on it: a quarter of the seconds.

For a process that only measures models, none of which brings code of its own, and ends: there nothing is compiled, no
process talks to another, and these packages are not there. Where a model's code does want one of them it fails, and
whoever began the process measures it in the ordinary way (`beside`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, Final

_SPARED: Final = ("scipy", "accelerate")
"""Losses of image models, and loading weights onto several devices."""
_COMPILER, _SHARED = "torch._dynamo", "torch.distributed.tensor"


def spare_imports() -> None:
    """Have torch and transformers do without, once they are imported, which neither may have been before."""
    for name in _SPARED:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # which makes its import fail
    sys.meta_path.insert(0, _Before({"transformers": _spare_of_torch, "transformers.models": _list_models_once}))


class _Before(MetaPathFinder):
    """Does something just before a module is imported, if it ever is."""

    def __init__(self, todo: Mapping[str, Callable[[], None]]) -> None:
        self._todo = dict(todo)

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> None:
        """As a finder that finds nothing itself."""
        if fullname in self._todo:
            self._todo.pop(fullname)()


def _spare_of_torch() -> None:
    """The compiler, whose marks leave functions as they are here, and tensors that several processes share.

    Torch itself asks for the class of those: no tensor is one.
    """
    import torch
    import torch.distributed

    torch.distributed.is_available = lambda: False
    _put(_SHARED, DTensor=type("DTensor", (torch.Tensor,), {}))
    compiler = _put(_COMPILER, allow_in_graph=_unmarked, assume_constant_result=_unmarked, disable=_unmarked)
    compiler.__path__ = [str(Path(torch.__file__).parent / "_dynamo")]  # its parts are the real ones


def _put(name: str, **has: Any) -> ModuleType:
    """Put a module there that has this and nothing else."""
    module = ModuleType(name)
    vars(module).update(has)
    sys.modules[name] = module
    return module


def _unmarked(function: Any = None, *_: object, **__: object) -> Any:
    return _unmarked if function is None else function


def _list_models_once() -> None:
    """What transformers reads from the files of all models to know their names, it reads twice; once will do."""
    import transformers
    from transformers.utils import import_utils

    folder = Path(transformers.__file__).parent / "models"
    read = import_utils.define_import_structure
    listed = read(folder, prefix="models")  # remembered since transformers was imported
    names = {
        needed: {name.removeprefix("models."): what for name, what in modules.items() if name.startswith("models.")}
        for needed, modules in listed.items()
    }

    def known(path: str, prefix: str | None = None) -> Any:
        return names if Path(path) == folder / "__init__.py" and prefix is None else read(path, prefix)

    import_utils.define_import_structure = known
