"""Facts of the models that the benchmarks plan for, measured once per batch and kept on disk between runs."""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path

from lazytrain.jobs import fake_model, introspect, measuring, replay
from lazytrain.jobs.model_facts import ModelFacts
from lazytrain.schedulers.hardware import model_config

LENGTH = 1024


def facts(model: str, batch: int, length: int = LENGTH) -> ModelFacts:
    """Facts of ``model`` at ``batch`` rows of ``length`` tokens in bfloat16."""
    key = json.dumps([model_config(model), batch, length, _source()], sort_keys=True)
    kept = Path(tempfile.gettempdir()) / "lazytrain-facts" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
    if kept.is_file():
        return ModelFacts.model_validate_json(kept.read_text(encoding="utf-8"))
    made = introspect.model_facts(model_config(model), micro_batch=batch, sequence_length=length)
    kept.parent.mkdir(exist_ok=True)
    kept.write_text(made.model_dump_json(), encoding="utf-8")
    return made


def _source() -> str:
    """Facts measured by other code are not those of this one."""
    text = "".join(
        Path(str(module.__file__)).read_text(encoding="utf-8") for module in (introspect, measuring, fake_model, replay)
    )
    return hashlib.sha256(text.encode()).hexdigest()
