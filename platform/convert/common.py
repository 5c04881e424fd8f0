"""What the files of several trainers have in common."""

from __future__ import annotations

import math
from typing import Any, Final

from ...jobs.errors import InputError
from .draft import NO_COUNT, Draft

ATTENTION: Final = {
    "fa2": "flash_attention_2",
    "flash_attention_2": "flash_attention_2",
    "sdpa": "sdpa",
    "eager": "eager",
    "disabled": "eager",
}
SCHEDULES: Final = {
    "cosine": "cosine",
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "warmup_stable_decay": "wsd",
}
ADAMW: Final = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw", "deepspeed_adam")
TEMPLATES: Final = ("chatml", "alpaca", "vicuna")
LORA: Final = "adapters are plain LoRA: the section lora, or all parameters without it"
UNUSED: Final = "all parameters are trained: only adapters need it"
PLANNED: Final = "what is kept, moved or computed again is decided by the planner, see lazytrain plan"
TRACKED: Final = "every run is logged to MLflow"
REASONS: Final = {
    "deepspeed": PLANNED,
    "fsdp": PLANNED,
    "fsdp_config": PLANNED,
    "gradient_checkpointing": PLANNED,
    "use_reentrant_gc": PLANNED,
    "ddp_timeout": "a job trains on one GPU",
    "report_to": TRACKED,
    "logging_steps": "every step is logged",
    "plot_loss": TRACKED,
    "eval_steps": "evaluate.every says it as a share of an epoch",
    "eval_strategy": "evaluate.every says how often, as a share of an epoch",
    "evals_per_epoch": "evaluate.every says it as a share of an epoch",
    "saves_per_epoch": "output.save_every counts steps",
    "resume_from_checkpoint": "a job goes on from its newest checkpoint by itself",
    "overwrite_output_dir": "a folder that belongs to another job is never overwritten",
    "group_by_length": "rows of like length share a batch whenever rows are not packed",
}


def batch(draft: Draft, rows: tuple[str, ...], steps: tuple[str, ...]) -> None:
    """Rows of an optimizer step: those of a micro-batch on one GPU, times the micro-batches; a pair counts as two."""
    counts = [draft.count(*rows), draft.count(*steps)]
    if counts[0] is None:
        return
    total = counts[0] * (counts[1] or 1)
    pairs = draft.job.get("train", {}).get("objective") == "dpo"
    draft.put("train.batch", 2 * total if pairs else total)
    said = f"{2 * total} counts the sequences, two for a pair," if pairs else f"{total} counts the rows"
    draft.note(f"train.batch {said} of a step on one GPU; times the GPUs if there were several", *rows)


def preference(draft: Draft, stage: Any, loss: Any, beta: Any, key: str) -> None:
    """The objective dpo with its own loss. Raises InputError for another stage, which stood at ``key``, or loss."""
    if stage == "dpo" and loss in (None, "sigmoid"):
        draft.put("train.objective", "dpo")
        draft.put("train.dpo", None if beta is None else {"beta": beta})
        return
    named = f"{stage} with the loss {loss}" if stage == "dpo" else str(stage)
    raise InputError(
        f"{key} {named} has no counterpart: a job is supervised fine-tuning, or dpo with the loss sigmoid",
        hint="convert files of one of these",
    )


def choice(draft: Draft, name: str, known: dict[str, str], *location: str | int) -> None:
    """Translate one word; one that is not known becomes a note."""
    word = draft.take(*location)
    if word is None:
        return
    if str(word) in known:
        draft.put(name, known[str(word)])
    else:
        draft.note(f"{name} knows {', '.join(sorted(set(known.values())))}; its default is used", *location)


def optimizer(draft: Draft, *location: str | int) -> None:
    """AdamW in float32, or with 8-bit moments; anything else becomes a note."""
    word = draft.take(*location)
    if word is None:
        return
    if str(word) in ADAMW:
        draft.put("optimizer.name", "adamw")
    elif "adamw" in str(word) and "8bit" in str(word):
        draft.put("optimizer.name", "hybrid8bit")
    else:
        draft.note("the optimizers are hybrid8bit (AdamW with 8-bit moments, used here) and adamw", *location)


def adam(draft: Draft, beta1: tuple[str, ...], beta2: tuple[str, ...], eps: tuple[str, ...]) -> None:
    """Decay rates and epsilon."""
    first, second = draft.take(*beta1), draft.take(*beta2)
    if first is not None or second is not None:
        draft.put("optimizer.betas", [0.9 if first is None else first, 0.999 if second is None else second])
    draft.move("optimizer.eps", *eps)


def warmup(draft: Draft, ratio: str, steps: str) -> None:
    """A number of steps wins over a share, as in transformers."""
    count, share = draft.take(steps), draft.take(ratio)
    draft.put("train.warmup", count if count else share)


def epochs(draft: Draft, *location: str | int) -> None:
    """Whole epochs; a fraction is rounded up and noted."""
    value = draft.take(*location)
    if value is None:
        return
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e9:
        draft.note(NO_COUNT, *location)
        return
    whole = max(1, math.ceil(value))
    draft.put("train.epochs", whole)
    if whole != value:
        draft.note(f"epochs are whole: {whole}; train.max_steps ends training within one", *location)


def clipping(draft: Draft, *location: str | int) -> None:
    """0 turns clipping off there, null does here."""
    value = draft.take(*location)
    if value is not None:
        draft.job.setdefault("train", {})["max_grad_norm"] = value or None


def lora(draft: Draft, *, rank: str, alpha: str, dropout: str, targets: list[str] | None) -> None:
    """Adapters, of rank 8 and an alpha of twice the rank unless the file says it; None targets all linear modules."""
    size = draft.take(rank, default=8)
    draft.put("lora.rank", size)
    draft.put("lora.alpha", draft.take(alpha, default=2 * size if isinstance(size, int) else None))
    draft.move("lora.dropout", dropout)
    draft.put("lora.target_modules", targets)


def max_steps(draft: Draft, *location: str | int) -> None:
    """Only a positive number means something."""
    if draft.document.get(location) in (-1, 0):
        draft.take(*location)  # no limit
    else:
        draft.put("train.max_steps", draft.count(*location))


def save_steps(draft: Draft, *location: str | int) -> None:
    """A number of steps; a share of them has no counterpart."""
    draft.put("output.save_every", draft.count(*location))


def template(draft: Draft, *location: str | int) -> None:
    """Few names mean the same; else the tokenizer's own template is right for the model."""
    name = draft.take(*location)
    if name in TEMPLATES:
        draft.put("data.chat_template", name)
    elif name is not None:
        draft.note("the tokenizer's own template is used; data.chat_template takes a file with another", *location)


def half_precision(draft: Draft) -> None:
    """bfloat16, whatever was said."""
    if draft.take("bf16"):
        draft.put("model.dtype", "bfloat16")
    if draft.take("fp16"):
        draft.put("model.dtype", "bfloat16")
        draft.note("half precision is bfloat16", "fp16")


def prompt_loss(draft: Draft, *location: str | int) -> None:
    """The loss is on the assistant's tokens."""
    if draft.take(*location):
        draft.note("the loss is on the assistant's tokens only", *location)
