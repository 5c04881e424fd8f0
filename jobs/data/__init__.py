"""Files of conversations to tokens with a loss mask to batches."""

from .batch import IGNORED, Batch
from .check import check
from .packing import packing_problem
from .prepare import Prepared, prepare
from .render import render_prompt, stop_ids
from .report import Refusal, Report
from .rows import Rows, batches, collate, order, pad_id, worst_batch

__all__ = [
    "IGNORED",
    "Batch",
    "Prepared",
    "Refusal",
    "Report",
    "Rows",
    "batches",
    "check",
    "collate",
    "order",
    "packing_problem",
    "pad_id",
    "prepare",
    "render_prompt",
    "stop_ids",
    "worst_batch",
]
