"""What planning has to know of a job and only torch and transformers can say: its rows' lengths, its model's facts.

They are asked in this process where they are installed. A server goes without: there the same object is asked in an
actor on a node that trains.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from ...jobs.errors import InputError
from ...jobs.frozen import Frozen
from ...jobs.model_facts import ModelFacts
from ..known_facts import KnownFacts
from ..models import ModelSource, facts_of, find_model, load_tokenizer, model_of, shape_of
from ..settings import Settings

if TYPE_CHECKING:
    from ...jobs.data import Prepared
    from ...jobs.spec import JobSpec

DType = Literal["float32", "bfloat16"]


class RowFigures(Frozen):
    """What a plan depends on of a job's tokenized rows."""

    train: int
    """Rows to train on."""
    longest: int
    """Tokens of the longest of them."""
    refused: int
    """Rows of the files that cannot be used."""

    @classmethod
    def of(cls, data: Prepared) -> RowFigures:
        """Those of rows that are prepared."""
        return cls(train=len(data.train), longest=data.train.longest, refused=data.report.refused)


class Measuring(Protocol):
    """Raises DataError and ModelError for what is wrong with rows and model, Unreachable when nobody can be asked."""

    def rows(self, spec: JobSpec, cache: str) -> RowFigures:
        """Tokenize the job's rows, which are kept in the folder ``cache``."""

    def facts(self, model: JobSpec | str, *, batch: int, length: int, dtype: DType) -> ModelFacts:
        """Facts of a job's model, or of the one that `find_model` finds, at ``batch`` rows of ``length`` tokens."""


class Here:
    """Measures in the process that it is in. Facts of configurations are kept in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._known = KnownFacts(folder)
        self._last: tuple[JobSpec, ModelSource] | None = None

    def rows(self, spec: JobSpec, cache: str) -> RowFigures:
        """As in `Measuring`."""
        from ...jobs.data import prepare

        self._last = None  # a job is looked at anew: its model's files may have changed
        return RowFigures.of(prepare(spec.data, load_tokenizer(spec), cache=cache))

    def facts(self, model: JobSpec | str, *, batch: int, length: int, dtype: DType) -> ModelFacts:
        """As in `Measuring`."""
        if isinstance(model, str):
            return facts_of(find_model(model), batch=batch, length=length, dtype=dtype, known=self._known)
        spec = model

        def measure() -> ModelFacts:
            return facts_of(self._model_of(spec), batch=batch, length=length, dtype=dtype)

        shape = shape_of(find_model(spec.model.path, trust_remote_code=spec.model.trust_remote_code))
        if shape is None:
            return measure()
        if spec.lora is not None or spec.train.freeze:
            shape |= spec.model_dump(mode="json", include={"lora": True, "train": {"freeze"}})
        return self._known.of(shape, measure, batch=batch, length=length, dtype=dtype)

    def _model_of(self, spec: JobSpec) -> ModelSource:
        """The model of a job; one is remembered, because a plan asks for its facts at many batches."""
        if self._last is None or self._last[0] != spec:
            self._last = spec, model_of(spec)
        return self._last[1]


class OnNode:
    """Has a `Here` measure on a node of the Ray cluster that ``settings.ray_address`` names."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        from ..cluster.elsewhere import Elsewhere  # brings Ray

        self._there = Elsewhere(settings, settings.ray_address, Here, folder)

    def rows(self, spec: JobSpec, cache: str) -> RowFigures:
        """As in `Measuring`; ``cache`` is a folder that the node sees too."""
        found: RowFigures = self._there.ask("rows", spec, cache)
        return found

    def facts(self, model: JobSpec | str, *, batch: int, length: int, dtype: DType) -> ModelFacts:
        """As in `Measuring`."""
        found: ModelFacts = self._there.ask("facts", model, batch=batch, length=length, dtype=dtype)
        return found


@cache
def measuring_of(settings: Settings) -> Measuring:
    """Whoever can measure for this process. Raises InputError when nobody can."""
    folder = settings.facts_dir
    if installed("torch") and installed("transformers"):
        return Here(folder)
    if settings.ray_address:
        return OnNode(settings, folder)
    raise InputError(
        "torch and transformers are not installed here, so no model can be measured to plan for it",
        hint="pip install lazytrain, or name a Ray cluster whose nodes have them: LAZYTRAIN_RAY_ADDRESS=HOST:PORT",
    )


def installed(package: str) -> bool:
    """Whether it could be imported, without doing so."""
    return find_spec(package) is not None
