"""MegaTrain: sections model, dataset, training, optimizer, memory, logging. Keys as its YAML loader reads them."""

from __future__ import annotations

from typing import Any, Final

from . import common
from .draft import Conversion, Draft

RULE: Final = f"{common.PLANNED}; plan.planner: megatrain follows its rule, with the best interval"
REASONS: Final = {
    **common.REASONS,
    "model.device": "the queue decides where a job runs",
    "model.devices": "a job trains on one GPU; the queue decides on which",
    "memory.checkpoint_interval": RULE,
    "memory.num_grad_slabs": common.PLANNED,
    "logging.log_interval": "every step is logged",
    "logging.enable_timing": "every operation's time is in the timeline of the run",
    "dataset.system_prompt": "a system turn belongs into the rows",
    "dataset.num_workers": "batches are read from tokenized files, without worker processes",
}


def is_megatrain(values: dict[str, Any]) -> bool:
    """Whether the file looks like one."""
    model = values.get("model")
    return isinstance(model, dict) and "name" in model and bool({"training", "dataset", "memory"} & set(values))


def convert(draft: Draft) -> Conversion:
    """What has a counterpart is mapped, the rest noted."""
    draft.move("model.path", "model", "name")
    dtype = draft.take("model", "dtype")
    if dtype in ("bfloat16", "float32"):
        draft.put("model.dtype", dtype)
    elif dtype is not None:
        draft.note("half precision is bfloat16", "model", "dtype")
    common.choice(draft, "model.attention", common.ATTENTION, "model", "attn_implementation")
    draft.move("model.trust_remote_code", "model", "trust_remote_code")
    _data(draft)
    _train(draft)
    return draft.finish("MegaTrain", REASONS)


def _data(draft: Draft) -> None:
    path, name = draft.take("dataset", "path"), draft.take("dataset", "name")
    folder = draft.take("dataset", "dataset_dir", default="data")
    query, response = draft.take("dataset", "query_field"), draft.take("dataset", "response_field")
    source: dict[str, Any] | None = {"path": path} if path else {"path": folder, "name": name} if name else None
    if source is not None and path and (query or response):
        source |= {
            "format": "query/response",
            "columns": {"query": query or "query", "response": response or "response"},
        }
    draft.put("data.train", [source] if source else None)
    draft.put("data.split", {"train": 1.0, "eval": 0.0} if source else None)
    draft.move("data.max_length", "dataset", "max_seq_len")
    common.prompt_loss(draft, "dataset", "train_on_prompt")


def _train(draft: Draft) -> None:
    common.batch(draft, ("training", "batch_size"), ("training", "gradient_accumulation_steps"))
    common.max_steps(draft, "training", "num_steps")
    draft.move("train.learning_rate", "training", "learning_rate")
    draft.move("train.weight_decay", "training", "weight_decay")
    common.clipping(draft, "training", "max_grad_norm")
    draft.move("train.seed", "training", "seed")
    common.optimizer(draft, "optimizer", "type")
    common.adam(draft, ("optimizer", "beta1"), ("optimizer", "beta2"), ("optimizer", "eps"))
