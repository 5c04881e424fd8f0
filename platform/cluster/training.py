"""One Ray Train run with one worker, followed from here through the metric log that the worker writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray.exceptions
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
from ray.train.torch import TorchConfig, TorchTrainer

from ...jobs.errors import LazytrainError
from ...jobs.train import Result
from .background import Background
from .failures import translate
from .inventory import list_nodes, require, selector
from .port import OnMetrics, TrainingOrder
from .progress import LineTail
from .worker import STOP_FILE, TRACES, run_order

METRICS_FILE = "metrics.jsonl"
_POLL_S = 0.2


def run_training(
    order: TrainingOrder,
    on_metrics: OnMetrics,
    *,
    cpus: int,
    stop_timeout_s: float,
    fit: Callable[[], Any] | None = None,
) -> Result:
    """Train to the end and give the result; ``on_metrics`` sees every record of the metric log in this thread.

    On Ctrl-C the worker is asked to flush and save, for at most ``stop_timeout_s``, and KeyboardInterrupt goes on up.
    Raises the worker's own error, or LazytrainError when the process died more than ``order.retries`` times.
    """
    if fit is None:
        require(list_nodes(), {"CPU": float(cpus), "GPU": 1.0}, order.kind)
    order.run_dir.mkdir(parents=True, exist_ok=True)
    (order.run_dir / STOP_FILE).unlink(missing_ok=True)
    tail = LineTail(order.run_dir / METRICS_FILE)
    call: Background[Any] = Background(fit or _trainer(order, cpus).fit, "ray-train")
    try:
        ended = call.follow(
            lambda: _pass_on(tail, on_metrics),
            every_s=_POLL_S,
            stop=(order.run_dir / STOP_FILE).touch,
            patience_s=stop_timeout_s,
        )
    except (TrainingFailedError, ray.exceptions.RayError) as error:
        raise translate(error, order.run_dir / TRACES) from error
    return _result(ended)


def _trainer(order: TrainingOrder, cpus: int) -> TorchTrainer:
    return TorchTrainer(
        run_order,
        train_loop_config={"order": order},
        # The default for a GPU is nccl, which a torch without CUDA does not have; one worker needs neither.
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(
            num_workers=1,
            use_gpu=True,
            resources_per_worker={"CPU": cpus, "GPU": 1},
            label_selector=selector(order.kind),
        ),
        run_config=RunConfig(
            name=order.job_id,
            storage_path=str(order.run_dir / "ray"),
            failure_config=FailureConfig(max_failures=order.retries, controller_failure_limit=1),
            checkpoint_config=CheckpointConfig(num_to_keep=1),
        ),
    )


def _pass_on(tail: LineTail, on_metrics: OnMetrics) -> None:
    for record in tail.records():
        on_metrics(record)


def _result(ended: Any) -> Result:
    value = getattr(ended, "return_value", ended)
    if isinstance(value, LazytrainError):
        raise value
    if value is None:
        raise LazytrainError("the training process ended without a result")
    result: Result = value
    return result
