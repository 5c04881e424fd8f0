"""Which of a model's parameters learn: all, those that no pattern freezes, or the adapters that a job puts in."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase

from transformers import PreTrainedModel

from .adapters import add_adapters
from .errors import ModelError
from .spec import JobSpec


def select_learning(model: PreTrainedModel, spec: JobSpec) -> PreTrainedModel:
    """Put the job's adapters into ``model`` and freeze what is not to learn, in place; return it.

    Raises ModelError for names that the model lacks, and where nothing would be left to learn.
    """
    add_adapters(model, spec.lora, seed=spec.train.seed)
    freeze(model, spec.train.freeze)
    return model


def freeze(model: PreTrainedModel, patterns: Sequence[str]) -> None:
    """Freeze the parameters that any pattern means: names of parameters or modules, with ``*``, ``?`` and ``[]``.

    A tied parameter is frozen by either of its names. Raises ModelError for a pattern that means no parameter, and when
    all are frozen.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        meant = [parameter for name, parameter in named.items() if _means(pattern, name)]
        if not meant:
            raise _unknown(model, pattern, list(named))
        for parameter in meant:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in named.values()):
        raise ModelError(
            f"train.freeze leaves no parameter of {type(model).__name__} to learn",
            hint=f"it has {len(named)} parameters, and {', '.join(patterns)} means all of them",
        )


def _means(pattern: str, name: str) -> bool:
    """Whether the pattern is of the parameter itself or of a module that it is in."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def _unknown(model: PreTrainedModel, pattern: str, names: list[str]) -> ModelError:
    parts = {".".join(parts[:end]) for name in names for parts in [name.split(".")] for end in range(1, len(parts) + 1)}
    near = difflib.get_close_matches(pattern, sorted(parts), n=3, cutoff=0.5)
    return ModelError(
        f"train.freeze: {type(model).__name__} has no parameter or module {pattern!r}",
        hint=f"did you mean {' or '.join(near or names[:3])}? *{pattern.strip('*')}* means every name with it inside",
    )
