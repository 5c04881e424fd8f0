"""Axolotl: one mapping with a list of data sets. Keys as in its configuration reference."""

from __future__ import annotations

from typing import Any, Final

from . import common
from .draft import Conversion, Draft, is_off

REASONS: Final = {
    **common.REASONS,
    "lora_r": common.UNUSED,
    "lora_alpha": common.UNUSED,
    "lora_dropout": common.UNUSED,
    "lora_target_linear": common.UNUSED,
    "lora_target_modules": common.UNUSED,
    "wandb_project": common.TRACKED,
    "wandb_entity": common.TRACKED,
    "wandb_name": common.TRACKED,
    "pad_to_sequence_len": "batches are padded to their longest row",
    "dataset_prepared_path": "data.cache is the folder for tokenized rows, under other names",
    "model_type": "the model's configuration says its class",
    "tokenizer_type": "the model's folder says its tokenizer",
    "special_tokens": "the tokenizer's own special tokens are used",
    "tf32": "products are in bfloat16",
    "eval_sample_packing": "evaluation packs as training does",
    "dataset_processes": "rows are tokenized with all cores",
}
FORMATS: Final = {"alpaca": "alpaca", "sharegpt": "sharegpt", "chat_template": "messages", "completion": "text"}
FILES: Final = (".json", ".jsonl", ".parquet", ".gz")


def is_axolotl(values: dict[str, Any]) -> bool:
    """Whether the file looks like one."""
    return "base_model" in values and "datasets" in values


def convert(draft: Draft) -> Conversion:
    """What has a counterpart is mapped, the rest noted. Raises InputError for reinforcement learning other than dpo."""
    draft.move("model.path", "base_model")
    draft.move("model.trust_remote_code", "trust_remote_code")
    _attention(draft)
    common.half_precision(draft)
    for key in ("load_in_8bit", "load_in_4bit"):
        if draft.take(key):
            draft.note("weights are trained exactly, from float32 masters", key)
    _adapters(draft)
    _data(draft)
    if kind := draft.take("rl"):
        beta = draft.take("rl_beta", default=draft.take("dpo_beta"))
        common.preference(draft, kind, None, beta, "rl")
    _train(draft)
    draft.move("output.dir", "output_dir")
    common.save_steps(draft, "save_steps")
    draft.move("output.keep", "save_total_limit")
    return draft.finish("Axolotl", REASONS)


def _adapters(draft: Draft) -> None:
    kind = draft.take("adapter")
    if kind in ("lora", "qlora"):
        targets = None if draft.take("lora_target_linear") else draft.take("lora_target_modules")
        chosen = [targets] if isinstance(targets, str) else targets
        common.lora(draft, rank="lora_r", alpha="lora_alpha", dropout="lora_dropout", targets=chosen)
    elif kind:
        draft.note(common.LORA, "adapter")


def _attention(draft: Draft) -> None:
    common.choice(draft, "model.attention", common.ATTENTION, "attn_implementation")
    flags = {"flash_attention": "flash_attention_2", "sdp_attention": "sdpa", "eager_attention": "eager"}
    for key, attention in flags.items():
        if draft.take(key):
            draft.put("model.attention", attention)


def _data(draft: Draft) -> None:
    for name, key in (("train", "datasets"), ("eval", "test_datasets")):
        listed = draft.take(key)
        draft.put(f"data.{name}", _sources(draft, key, listed) if isinstance(listed, list) and listed else None)
    size = draft.take("val_set_size")
    if isinstance(size, int | float) and 0 <= size < 1:
        draft.put("data.split", {"train": round(1 - size, 12), "eval": size})
    elif size:
        draft.note("data.split takes shares of the rows, not a number of them", "val_set_size")
    draft.move("data.max_length", "sequence_len")
    draft.move("data.packing", "sample_packing")
    name = draft.take("chat_template")
    if name != "tokenizer_default":
        common.template(draft, "chat_template")
    common.prompt_loss(draft, "train_on_inputs")


def _sources(draft: Draft, key: str, listed: list[Any]) -> list[dict[str, Any]]:
    sources = []
    for index, entry in enumerate(listed):
        if isinstance(entry, dict) and entry.get("path"):
            sources.append(_source(draft, key, index, entry))
        else:
            draft.note("is no data set: it has no path", key, index)
    return sources


def _source(draft: Draft, key: str, index: int, entry: dict[str, Any]) -> dict[str, Any]:
    path, kind = str(entry.get("path", "")), str(entry.get("type", ""))
    local = "ds_type" in entry or path.endswith(FILES) or path.startswith((".", "/"))
    source: dict[str, Any] = {"path": path if local else f"hf://{path}"}
    if kind in FORMATS:
        source["format"] = FORMATS[kind]
    elif kind:
        draft.note("the format is told from the first row", key, index, "type")
    if kind == "completion" and "field" in entry:
        source["columns"] = {"text": entry["field"]}
    if not local:
        source |= {ours: entry[theirs] for theirs, ours in (("split", "part"), ("name", "name")) if theirs in entry}
    done = {"path", "type", "ds_type", "split", "name"} | ({"field"} if kind == "completion" else set())
    for name in entry:
        if name not in done and not is_off(entry[name]):
            draft.note("has no counterpart; data.train[].columns renames keys of the rows", key, index, name)
    return source


def _train(draft: Draft) -> None:
    common.epochs(draft, "num_epochs")
    common.max_steps(draft, "max_steps")
    common.batch(draft, ("micro_batch_size",), ("gradient_accumulation_steps",))
    draft.move("train.learning_rate", "learning_rate")
    common.choice(draft, "train.schedule", common.SCHEDULES, "lr_scheduler")
    common.warmup(draft, "warmup_ratio", "warmup_steps")
    draft.move("train.weight_decay", "weight_decay")
    common.clipping(draft, "max_grad_norm")
    draft.move("train.seed", "seed")
    draft.move("train.patience", "early_stopping_patience")
    common.optimizer(draft, "optimizer")
    common.adam(draft, ("adam_beta1",), ("adam_beta2",), ("adam_epsilon",))
