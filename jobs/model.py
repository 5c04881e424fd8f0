"""Load a model and its tokenizer from a folder in Hugging Face layout (or a hub id), strictly."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from .errors import ModelError
from .spec import Model


def load_model(section: Model) -> tuple[PreTrainedModel, Any]:
    """The causal language model in the dtype that streams, on the CPU, and its tokenizer.

    Raises ModelError when something is missing, when weights do not fit the configuration, when the model wants to run
    code of its own and may not, or when the tokenizer has ids that the embedding lacks.
    """
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            section.path,
            dtype=getattr(torch, section.dtype),
            attn_implementation=section.attention,
            trust_remote_code=section.trust_remote_code,
            output_loading_info=True,
        )
        tokenizer = AutoTokenizer.from_pretrained(section.path, trust_remote_code=section.trust_remote_code)
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise ModelError(
            f"cannot load the model {section.path}: {str(error).splitlines()[0]}",
            hint="model.path is a folder with config.json, safetensors and a tokenizer, or a model id on the hub",
        ) from error
    _check_weights(section.path, loading)
    _check_vocabulary(model, tokenizer)
    return model, tokenizer


def _check_weights(path: str, loading: dict[str, Any]) -> None:
    for problem, names in (
        ("misses", loading.get("missing_keys")),
        ("has unexpected", loading.get("unexpected_keys")),
        ("has wrongly shaped", loading.get("mismatched_keys")),
    ):
        if names:
            listed = ", ".join(sorted(map(str, names))[:3])
            raise ModelError(
                f"the model {path} {problem} weights: {listed}{' ...' if len(names) > 3 else ''}",
                hint="the weights and config.json are not of the same model",
            )


def _check_vocabulary(model: PreTrainedModel, tokenizer: Any) -> None:
    rows, ids = model.get_input_embeddings().weight.shape[0], len(tokenizer)
    if ids > rows:
        raise ModelError(
            f"the tokenizer has {ids:,} tokens, the model's embedding only {rows:,} rows",
            hint="resize the model's embeddings to the tokenizer and save it first",
        )
