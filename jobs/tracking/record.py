"""``mlflow_run.json``: which MLflow run this directory belongs to and how far it has been told."""

from __future__ import annotations

import json
import logging
import os
import re
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import InputError

log = logging.getLogger(__name__)

JOB_ID = "lazytrain.job_id"
RECORD_FILE = "mlflow_run.json"
LOST = "lazytrain.lost_attempt"
"""Tag, with a number behind it, of an attempt that was killed."""
_JOB_ID = re.compile(r"[\w.:-]{1,200}")


@dataclass(slots=True)
class RunRecord:
    """All that is needed to forward a run directory to MLflow, by this process or a later one."""

    path: Path
    uri: str
    experiment: str
    run_name: str
    job_id: str
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    attempt: int = 1
    described: int = 0
    """The last attempt whose params and tags were sent."""
    run_id: str | None = None
    offset: int = 0
    """Bytes of the metric log that were sent."""
    step: int = -1
    """Highest step that was sent."""
    artifacts: list[str] = field(default_factory=list)
    """Files still to be sent; relative to the run directory where they lie in it."""
    status: str | None = None
    """How this attempt ended, until MLflow has been told."""
    ended: bool = False
    """Whether this attempt said how it ended; one that was killed never does."""

    @classmethod
    def load(cls, path: Path) -> RunRecord:
        """Read it; fields that another version wrote and this one does not know are ignored."""
        stored = json.loads(path.read_text())
        known = cls.__dataclass_fields__.keys() - {"path"}
        return cls(path=path, **{name: value for name, value in stored.items() if name in known})

    @classmethod
    def open(
        cls, path: Path, *, uri: str, experiment: str, run_name: str, params: Mapping[str, Any], tags: Mapping[str, str]
    ) -> RunRecord:
        """A new attempt of the run recorded at ``path``, or a new run: the first one, or in another store."""
        record = cls._found(path)
        if record is None or (record.uri, record.experiment) != (uri, experiment):
            record = cls(path, uri, experiment, run_name, job_id=uuid.uuid4().hex)
        else:
            lost = {} if record.ended else {f"{LOST}{record.attempt}": "its process ended without a word"}
            tags = {**lost, **tags}
            record.attempt += 1
        record.job_id = tags.get(JOB_ID, record.job_id)
        if not _JOB_ID.fullmatch(record.job_id):
            raise InputError(f"job id {record.job_id!r} is not usable", hint="use letters, digits and . _ : -")
        record.params = flat(params)
        record.tags = {name: str(value) for name, value in tags.items()}
        record.status, record.ended = None, False
        record.save()
        return record

    @classmethod
    def _found(cls, path: Path) -> RunRecord | None:
        """The record, unless there is none; a damaged one counts as none, since the run can be found by its tag."""
        try:
            return cls.load(path)
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, AttributeError) as error:
            log.warning("%s is damaged and begun anew: %s", path, error)
            return None

    def end(self, status: str) -> None:
        """This attempt has ended; MLflow is to be told."""
        self.status, self.ended = status, True
        self.save()

    def save(self) -> None:
        """Replace the file at once: a reader sees the old record or the new one."""
        fields = asdict(self)
        del fields["path"]
        partial = self.path.with_name(self.path.name + ".partial")
        with partial.open("w", encoding="utf-8") as file:
            file.write(json.dumps(fields, indent=1))
            file.flush()
            os.fsync(file.fileno())  # or a power cut leaves an empty file under the right name
        partial.replace(self.path)


def flat(params: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested mappings as dotted names; other values as text, lists as JSON."""
    found: dict[str, str] = {}
    for name, value in params.items():
        if isinstance(value, Mapping):
            found.update(flat(value, f"{prefix}{name}."))
        else:
            found[prefix + str(name)] = json.dumps(value) if isinstance(value, (list, tuple)) else str(value)
    return found
