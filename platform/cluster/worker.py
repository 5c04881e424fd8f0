"""What runs inside the training process that Ray Train starts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ...jobs.errors import LazytrainError
from ..logs import quiet_libraries, write_trace
from .port import Tracking, TrainingOrder

STOP_FILE = "stop"
"""A file of this name in the run's directory asks the training to flush, save and leave."""
TRACES = "errors"
"""Directory below the run's where the traces of unexpected errors go."""


def run_order(config: dict[str, Any]) -> Any:
    """Train as ``config["order"]`` says; gives the Result, or our own error as a value.

    An error of ours is final: as a value it does not make Ray start the worker again, which is for processes that died.
    """
    import torch

    from ...jobs.train import train

    quiet_libraries()
    if not torch.cuda.is_available():
        # Ray sets it to cuda:0 for a worker with a GPU, also where the GPU is an emulated one.
        os.environ.pop("ACCELERATE_TORCH_DEVICE", None)
    order: TrainingOrder = config["order"]
    try:
        return train(
            order.spec,
            policy=order.policy,
            device=order.device,
            run_dir=order.run_dir,
            tracker=_tracker(order.tracking, order.run_dir),
            stop=(order.run_dir / STOP_FILE).exists,
        )
    except LazytrainError as error:
        return error
    except Exception as error:
        write_trace(error, order.run_dir / TRACES)
        raise


def _tracker(tracking: Tracking | None, run_dir: Path) -> Any:
    if tracking is None:
        return None
    from ...jobs.tracking import MLflowTracker

    return MLflowTracker(
        uri=tracking.uri,
        experiment=tracking.experiment,
        run_name=tracking.run_name,
        params=dict(tracking.params),
        tags=dict(tracking.tags),
        run_dir=run_dir,
    )
