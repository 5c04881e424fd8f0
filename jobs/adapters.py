"""LoRA adapters inside a model's layers, made, saved and loaded with ``peft`` (imported only where a job asks for it).

The model stays the class of ``transformers`` that it was: adapters are put into its modules in place, and its own
weights are frozen. So everything that takes a model takes one with adapters.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from .checkpoint.files import write_tensors
from .errors import InputError, ModelError
from .foreign import FOREIGN, words_of
from .model import load_model
from .spec import Lora, Model

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NAME = "default"
"""What ``peft`` calls a model's only adapter."""
_PREFIX = "base_model.model."
"""What ``peft`` puts before the names of the model's modules in a file."""
_SAMPLE = 4096
"""Elements of each tensor that `weights_digest` looks at."""


def add_adapters(model: PreTrainedModel, lora: Lora | None, *, seed: int) -> PreTrainedModel:
    """Put adapters into ``model`` in place, freeze all else, and return it; without ``lora`` it stays as it was.

    Adapters have the model's dtype and device, and the same seed gives the same ones; they change nothing at first.
    Raises ModelError for target modules that the model lacks, InputError without ``peft``.
    """
    if lora is None:
        return model
    peft = _peft()
    _check_targets(model, lora)
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules),
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _inject(peft, model, config)


def save_adapters(model: PreTrainedModel, parts: Iterable[Mapping[str, torch.Tensor]], base: str, folder: Path) -> None:
    """Write what ``peft.PeftModel.from_pretrained`` loads, from weights of the model with adapters by full name.

    ``base`` is the folder or hub id of the weights without adapters. Weights that are no adapters' are left out.
    """
    found: dict[str, torch.Tensor] = {}
    for weights in parts:
        found |= {_PREFIX + name.replace(f".{_NAME}", ""): t for name, t in weights.items() if _is_adapter(name)}
    config: Any = model.peft_config[_NAME]
    before = config.base_model_name_or_path, config.inference_mode
    config.base_model_name_or_path, config.inference_mode = base, True
    try:
        config.save_pretrained(folder)
    finally:
        config.base_model_name_or_path, config.inference_mode = before
    write_tensors(folder / WEIGHTS, found)


def is_adapter_folder(path: str | Path) -> bool:
    """Whether a folder holds adapters rather than a model."""
    return (Path(path) / CONFIG).is_file()


def load_with_adapters(section: Model) -> tuple[PreTrainedModel, Any]:
    """The model of ``section.path``, or the one that the adapters there are for, with them; and its tokenizer.

    Raises ModelError for adapters of another model or of another kind than LoRA, InputError without ``peft``.
    """
    folder = Path(section.path)
    if not is_adapter_folder(folder):
        return load_model(section)
    peft = _peft()
    try:
        config = peft.PeftConfig.from_pretrained(folder)
        saved = safetensors.torch.load_file(folder / WEIGHTS) if (folder / WEIGHTS).is_file() else None
    except FOREIGN as error:
        raise ModelError(
            f"cannot load the adapters in {folder}: {words_of(error)}", hint="export or copy them again"
        ) from error
    if config.peft_type != peft.PeftType.LORA or saved is None:
        raise ModelError(f"{folder} holds no LoRA adapters in safetensors", hint=f"it needs {CONFIG} and {WEIGHTS}")
    if not config.base_model_name_or_path:
        raise ModelError(
            f"{folder / CONFIG} does not say which model the adapters are for",
            hint="write its folder or hub id there as base_model_name_or_path",
        )
    model, tokenizer = load_model(section.model_copy(update={"path": config.base_model_name_or_path}))
    _inject(peft, model, config)
    loaded = peft.set_peft_model_state_dict(model, saved)
    wrong = [*loaded.unexpected_keys, *(name for name in loaded.missing_keys if _is_adapter(name))]
    if wrong:
        raise ModelError(
            f"the adapters in {folder} are not of {config.base_model_name_or_path}: {', '.join(wrong[:3])}",
            hint=f"base_model_name_or_path in {CONFIG} names the model that they were trained on",
        )
    if (folder / "tokenizer_config.json").is_file():
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=section.trust_remote_code)
    return model, tokenizer


def weights_digest(model: PreTrainedModel) -> str:
    """Tells models with other weights apart: names, shapes, dtypes and an even sample of the elements of each tensor.

    It reads at most 4,096 elements of a tensor, so that it costs nothing; training, merging or converting a model
    changes it, a single damaged element may not.
    """
    found = hashlib.sha256()
    for name, parameter in model.named_parameters():
        flat = parameter.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // _SAMPLE)].contiguous()
        found.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
        found.update(sample.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def _peft() -> Any:
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise InputError(
            f"LoRA needs the package peft, which is not installed ({error})",
            hint="pip install 'lazytrain[lora]', or remove the section lora",
        ) from error


def _inject(peft: Any, model: PreTrainedModel, config: Any) -> PreTrainedModel:
    try:
        peft.inject_adapter_in_model(config, model, adapter_name=_NAME)
    except FOREIGN as error:
        raise ModelError(
            f"{type(model).__name__} cannot have these adapters: {words_of(error)}",
            hint="change lora.target_modules",
        ) from error
    return model


def _is_adapter(name: str) -> bool:
    return ".lora_" in name


def _check_targets(model: PreTrainedModel, lora: Lora) -> None:
    """Every target must name a module that can have an adapter, and none one that shares its weights."""
    if isinstance(lora.target_modules, str):
        return
    able = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Embedding | Conv1D)}
    for target in lora.target_modules:
        meant = [module for name, module in able.items() if name == target or name.endswith(f".{target}")]
        if not meant:
            raise _unknown(model, target, sorted({name.rpartition(".")[2] for name in able}))
        if model.config.get_text_config().tie_word_embeddings and any(_is_tied(model, module) for module in meant):
            raise ModelError(
                f"lora.target_modules: {target} shares its weights with another module of {type(model).__name__}",
                hint="leave it out: an adapter of a tied embedding or head would belong to both",
            )


def _is_tied(model: PreTrainedModel, module: nn.Module) -> bool:
    return module in (model.get_input_embeddings(), model.get_output_embeddings())


def _unknown(model: PreTrainedModel, target: str, known: list[str]) -> ModelError:
    near = difflib.get_close_matches(target.rpartition(".")[2], known, n=3, cutoff=0.5)
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    return ModelError(
        f"lora.target_modules: {type(model).__name__} has no module {target!r} that can have an adapter",
        hint=f"{meant}It has {', '.join(known)}",
    )
