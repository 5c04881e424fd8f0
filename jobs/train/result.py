"""What a run came to."""

from __future__ import annotations

from ..frozen import Frozen


class Result(Frozen):
    """What a run came to."""

    status: str
    """``done``, or ``stopped`` when it was asked to stop before the end (it can be resumed)."""
    steps: int
    loss: float | None
    """Loss of the last step; None before the first, and where it was not finite."""
    exact_match_before: float | None
    exact_match: float | None
    """None without evaluation rows, or when the run was stopped."""
    tokens_per_s: float
    """Tokens that are no padding per second, over this process's steps."""
    step_s: float
    """Median seconds of a step, over this process's steps."""
    predicted_step_s: float | None
    peak_gpu_bytes: int
    host_bytes: int
    run_dir: str
    best_step: int | None = None
    """Step with the lowest evaluation loss, of which a checkpoint is kept; None without evaluation rows."""
    best_eval_loss: float | None = None
    notes: tuple[str, ...] = ()
    """What a person should know of it: rows longer than the model is for, and another batch or policy than before a
    checkpoint."""
