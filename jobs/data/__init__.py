"""Files of conversations to tokens with a loss mask to batches."""

from .prepare import Prepared, prepare
from .render import render_prompt, stop_ids
from .report import Refusal, Report
from .rows import IGNORED, Batch, Rows, batches, collate, pad_id, worst_batch

__all__ = [
    "IGNORED",
    "Batch",
    "Prepared",
    "Refusal",
    "Report",
    "Rows",
    "batches",
    "collate",
    "pad_id",
    "prepare",
    "render_prompt",
    "stop_ids",
    "worst_batch",
]
