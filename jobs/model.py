"""A model and its tokenizer from a folder in Hugging Face layout (or a hub id), strictly; and a description of them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Mxfp4Config, PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save
from transformers.initialization import no_init_weights

from .errors import ModelError
from .fake_model import is_expanded
from .foreign import FOREIGN, words_of
from .spec import Model

log = logging.getLogger(__name__)
_FINITE_CHUNK = 1 << 18


def load_model(section: Model) -> tuple[PreTrainedModel, Any]:
    """The causal language model in the dtype that streams, on the CPU, and its tokenizer.

    Weights are mapped and converted one by one. Raises ModelError when some are missing, left over, of another shape or
    not finite, or share memory that the model does not tie, when the model wants to run code of its own and may not, or
    when the tokenizer has ids that the embedding lacks.
    """
    try:
        config = AutoConfig.from_pretrained(section.path, trust_remote_code=section.trust_remote_code)
        expanded = is_expanded(config)
        with _one_by_one():
            model, loading = AutoModelForCausalLM.from_pretrained(
                section.path,
                dtype=getattr(torch, section.dtype),
                attn_implementation=section.attention,
                trust_remote_code=section.trust_remote_code,
                ignore_mismatched_sizes=True,  # so that they are reported, and refused below by name
                output_loading_info=True,
                **({"quantization_config": Mxfp4Config(dequantize=True)} if expanded else {}),
            )
        tokenizer = AutoTokenizer.from_pretrained(section.path, trust_remote_code=section.trust_remote_code)
    except FOREIGN as error:
        raise _cannot_load(section.path, error) from error
    if expanded:
        log.warning("%s is published in 4 bits: it is trained, and saved, in %s", section.path, section.dtype)
    _check_weights(section.path, loading)
    _check_aliases(section.path, model)
    _check_finite(section.path, model)
    _check_vocabulary(model, tokenizer)
    return model, tokenizer


def empty_model(section: Model, folder: Path, *, device: str = "cpu") -> tuple[PreTrainedModel, Any]:
    """The model that `describe_model` described in ``folder``, with weights that hold nothing yet, and its tokenizer.

    On the device ``meta`` it has shapes only. Raises ModelError when the description is not there or damaged.
    """
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=section.trust_remote_code)
        with no_init_weights(), torch.device(device):
            model = AutoModelForCausalLM.from_config(
                config,
                dtype=getattr(torch, section.dtype),
                attn_implementation=section.attention,
                trust_remote_code=section.trust_remote_code,
            )
        model.tie_weights()  # which making a model does only where it initialises weights
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=section.trust_remote_code)
    except FOREIGN as error:
        raise _cannot_load(str(folder), error) from error
    return model, tokenizer


def describe_model(model: PreTrainedModel, tokenizer: Any, folder: Path) -> None:
    """Write all of a Hugging Face folder but the weights: configurations, tokenizer, code of the model's own."""
    folder.mkdir(parents=True, exist_ok=True)
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    if model.is_remote_code():
        custom_object_save(model, folder, config=model.config)
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextmanager
def _one_by_one() -> Iterator[None]:
    """Keep transformers from converting weights ahead of those that it has put in place: each would be there twice."""
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _cannot_load(path: str, error: Exception) -> ModelError:
    return ModelError(
        f"cannot load the model {path}: {words_of(error)}",
        hint="model.path is a folder with config.json, safetensors and a tokenizer, or a model id on the hub",
    )


def _check_weights(path: str, loading: dict[str, Any]) -> None:
    for problem, names in (
        ("misses", loading.get("missing_keys")),
        ("has unexpected", loading.get("unexpected_keys")),
        ("has wrongly shaped", [_mismatch(key) for key in loading.get("mismatched_keys") or ()]),
    ):
        if names:
            listed = ", ".join(sorted(map(str, names))[:3])
            raise ModelError(
                f"the model {path} {problem} weights: {listed}{' ...' if len(names) > 3 else ''}",
                hint="the weights and config.json are not of the same model",
            )


def _mismatch(key: Any) -> str:
    """Name with the shape that the file has and the one that the configuration asks for."""
    if not isinstance(key, tuple):
        return str(key)
    name, *shapes = key
    return f"{name} ({' instead of '.join(str(tuple(shape)) for shape in shapes)})"


def _check_aliases(path: str, model: PreTrainedModel) -> None:
    """Two parameters in the same memory would each get an update, and a checkpoint would hold one of them."""
    places = sorted((p.data_ptr(), p.nbytes, name) for name, p in model.named_parameters() if p.nbytes)
    for (start, nbytes, first), (following, _, second) in pairwise(places):
        if following < start + nbytes:
            raise ModelError(
                f"the model {path} has two weights in the same memory that it does not tie: {first} and {second}",
                hint="set tie_word_embeddings in config.json if they are one, or save the model again if they are not",
            )


def _check_finite(path: str, model: PreTrainedModel) -> None:
    for name, parameter in model.named_parameters():
        flat = parameter.detach().reshape(-1)
        for start in range(0, flat.numel(), _FINITE_CHUNK):
            if not flat[start : start + _FINITE_CHUNK].abs().amax().isfinite():  # propagates NaN
                raise ModelError(
                    f"the model {path} has weights that are not finite: {name}",
                    hint="the file is damaged, or its values do not fit model.dtype",
                )


def _check_vocabulary(model: PreTrainedModel, tokenizer: Any) -> None:
    """Ids need not follow each other without gaps, so the highest counts and not their number."""
    rows = model.get_input_embeddings().weight.shape[0]
    token, highest = max(tokenizer.get_vocab().items(), key=lambda entry: entry[1], default=("", -1))
    if highest >= rows:
        raise ModelError(
            f"the tokenizer's token {token!r} has the id {highest:,}, the model's embedding only {rows:,} rows",
            hint="resize the model's embeddings to the tokenizer and save it first",
        )
