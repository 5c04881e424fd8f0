"""Facts of models that were measured before, kept in files: planning for them again needs neither torch nor seconds."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..jobs import model_facts
from ..jobs.frozen import digest
from ..jobs.model_facts import ModelFacts


class KnownFacts:
    """One file in ``directory`` for each configuration and batch shape, as this code measured it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def of(
        self, config: Mapping[str, Any], measure: Callable[[], ModelFacts], *, batch: int, length: int, dtype: str
    ) -> ModelFacts:
        """The facts that are kept, or else those that ``measure`` finds, which are kept from now on."""
        path = self._directory / f"{digest(dict(config), batch, length, dtype, _measured_by())}.json"
        try:
            return ModelFacts.model_validate_json(path.read_bytes())
        except (OSError, ValidationError):  # not there, or written by halves
            facts = measure()
        with suppress(OSError):  # a home that cannot be written to costs time, no more
            self._keep(path, facts)
        return facts

    def _keep(self, path: Path, facts: ModelFacts) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        written = path.with_suffix(f".{os.getpid()}")
        try:
            written.write_text(facts.model_dump_json(), encoding="utf-8")
            written.replace(path)
        finally:
            written.unlink(missing_ok=True)  # half a file, where the disk is full


@cache
def _measured_by() -> list[str]:
    """What facts depend on beside the model: this code and the libraries that it measures."""
    sources = sorted(Path(str(model_facts.__file__)).parent.glob("*.py"))
    code = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    return [code, version("torch"), version("transformers")]
