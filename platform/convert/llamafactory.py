"""LLaMA-Factory: one flat mapping, data sets named in a ``dataset_info.json``.

Keys as documented in its examples and in its argument classes (hparams).
"""

from __future__ import annotations

from typing import Any, Final

from . import common
from .draft import Conversion, Draft

REASONS: Final = {
    **common.REASONS,
    "do_train": "lazytrain train trains",
    "do_eval": "evaluate says what is measured",
    "lora_rank": common.UNUSED,
    "lora_alpha": common.UNUSED,
    "lora_dropout": common.UNUSED,
    "lora_target": common.UNUSED,
    "overwrite_cache": "tokenized rows are kept under the digest of all they depend on",
    "preprocessing_num_workers": "rows are tokenized with all cores",
    "dataloader_num_workers": "batches are read from tokenized files, without worker processes",
    "save_only_model": "checkpoints hold all that is needed to go on; lazytrain export writes the model alone",
    "max_samples": "all rows are used; a source's weight uses a part of them",
    "per_device_eval_batch_size": "evaluation takes the batch of training",
    "quantization_bit": "weights are trained exactly, from float32 masters",
}


def is_llamafactory(values: dict[str, Any]) -> bool:
    """Whether the file looks like one."""
    return "model_name_or_path" in values and bool({"dataset", "stage", "finetuning_type", "template"} & set(values))


def convert(draft: Draft) -> Conversion:
    """Raises InputError for a stage that is neither supervised fine-tuning nor dpo."""
    draft.move("model.path", "model_name_or_path")
    draft.move("model.trust_remote_code", "trust_remote_code")
    if draft.take("flash_attn") != "auto":
        common.choice(draft, "model.attention", common.ATTENTION, "flash_attn")
    common.half_precision(draft)
    draft.take("pure_bf16")
    _adapters(draft)
    _data(draft)
    stage = draft.take("stage", default="sft")
    if stage not in ("sft", "pt"):
        common.preference(draft, stage, draft.take("pref_loss"), draft.take("pref_beta"), "stage")
    _train(draft)
    draft.move("output.dir", "output_dir")
    common.save_steps(draft, "save_steps")
    draft.move("output.keep", "save_total_limit")
    return draft.finish("LLaMA-Factory", REASONS)


def _adapters(draft: Draft) -> None:
    kind = draft.take("finetuning_type", default="lora")
    if kind == "lora":
        targets = _names(draft.take("lora_target", default="all"))
        chosen = None if targets == ["all"] else targets
        common.lora(draft, rank="lora_rank", alpha="lora_alpha", dropout="lora_dropout", targets=chosen)
    elif kind != "full":
        draft.note(common.LORA, "finetuning_type")


def _data(draft: Draft) -> None:
    folder = draft.take("dataset_dir", default="data")
    for name, key in (("train", "dataset"), ("eval", "eval_dataset")):
        sources = [_source(folder, entry) for entry in _names(draft.take(key))]
        draft.put(f"data.{name}", sources or None)
    if draft.take("streaming"):
        draft.note("tokenized rows are kept in a mapped file, which takes no memory to speak of", "streaming")
    size = draft.take("val_size")
    if isinstance(size, float) and 0 < size < 1:
        draft.put("data.split", {"train": round(1 - size, 12), "eval": size})
    elif size:
        draft.note("data.split takes shares of the rows, not a number of them", "val_size")
    draft.move("data.max_length", "cutoff_len")
    packing = [draft.take(key) for key in ("packing", "neat_packing")]
    draft.put("data.packing", any(packing) if any(value is not None for value in packing) else None)
    common.template(draft, "template")
    common.prompt_loss(draft, "train_on_prompt")
    if draft.take("mask_history"):
        draft.note("every assistant turn carries the loss, not the last alone", "mask_history")


def _source(folder: Any, entry: str) -> dict[str, Any]:
    """``ONLINE`` stands for the hub there."""
    return {"path": f"hf://{entry}"} if folder == "ONLINE" else {"path": folder, "name": entry}


def _names(value: Any) -> list[str]:
    parts = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else []
    return [str(part).strip() for part in parts if str(part).strip()]


def _train(draft: Draft) -> None:
    common.epochs(draft, "num_train_epochs")
    common.max_steps(draft, "max_steps")
    common.batch(draft, ("per_device_train_batch_size",), ("gradient_accumulation_steps",))
    draft.move("train.learning_rate", "learning_rate")
    common.choice(draft, "train.schedule", common.SCHEDULES, "lr_scheduler_type")
    common.warmup(draft, "warmup_ratio", "warmup_steps")
    draft.move("train.weight_decay", "weight_decay")
    common.clipping(draft, "max_grad_norm")
    draft.move("train.seed", "seed")
    common.optimizer(draft, "optim")
    common.adam(draft, ("adam_beta1",), ("adam_beta2",), ("adam_epsilon",))
