"""What a job trains: the configuration that a name means, the model without weights, its tokenizer, its facts.

Torch and transformers are imported where they are used, because planning for a model whose facts are known starts
without.
"""

from __future__ import annotations

import gc
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ..jobs.errors import ModelError
from ..jobs.model_facts import ModelFacts
from ..schedulers.hardware import known_models, model_config, what_is_at
from .known_facts import KnownFacts

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from ..jobs.spec import JobSpec

_ORIGIN = ("_name_or_path", "transformers_version")
"""Entries of a configuration that say where it is from."""
_MOST_CONFIG_BYTES = 1 << 24
"""Of a configuration file: no model's comes near, a file of weights is larger."""
_HUB_SECONDS = 10.0
_HUB_ID = re.compile(r"\w[\w.-]{0,95}(/\w[\w.-]{0,95})?", re.ASCII)
ModelSource: TypeAlias = "PretrainedConfig | PreTrainedModel | dict[str, Any]"


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
