"""`train`: one job from its directory's claim to its result record."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import chain
from pathlib import Path

from ..executor import Emulated, stream
from ..policy import Policy
from ..provenance import Provenance
from ..run_directory import RunDirectory, save_record
from ..spec import JobSpec
from ..tracking import LocalTracker, Tracker
from .ending import telling_the_end
from .export import write_model
from .loop import Loop, Progress
from .lost import reconcile_beside
from .pausing import Pause
from .preflight import rehearse
from .result import Result
from .saving import Saver, check_complete
from .setup import OnPoint, Setup, set_up
from .stopping import StopRequested, watching


def train(
    spec: JobSpec,
    *,
    policy: Policy | None = None,
    device: str | Emulated = "auto",
    run_dir: str | Path | None = None,
    tracker: Tracker | None = None,
    stop: Callable[[], bool] | None = None,
    pause: Pause | None = None,
    progress: Progress | None = None,
    on_point: OnPoint = lambda _: None,
) -> Result:
    """Run the job to its end, or from its last checkpoint on.

    Without a ``policy`` every boundary waits on the host. ``stop`` is asked at every layer and after every step,
    ``pause`` after every step;
    ``progress`` gets every report that goes to the tracker. ``on_point`` is called with a name wherever a process may
    be killed in a test: ``claimed``, ``loaded``, ``prepared``, ``rehearsed``, ``resumed``, ``forward``, ``backward``,
    ``step``, ``stepped``, ``evaluating``, ``saving``, those of `CheckpointStore`, ``exporting``, ``exported``,
    ``result``.

    Raises the typed errors of `errors`; InputError and its kin before the first step, and DoesNotFit where the disk has
    no room for the checkpoints.
    """
    directory = RunDirectory(Path(run_dir or spec.output.dir))
    with directory.claimed(spec), telling_the_end(directory, lambda: tracker or LocalTracker(directory.path)) as ending:
        on_point("claimed")
        reconcile_beside(directory.path)
        setup = set_up(spec, policy, directory, on_point)
        rehearse(setup)
        on_point("rehearsed")
        save_record(directory.provenance, Provenance.here())
        for path in (directory.spec, directory.policy, directory.provenance):
            ending.tracker.artifact(path)
        asked, report = stop or (lambda: False), progress or (lambda _: None)
        ending.result = _run(setup, device, ending.tracker, asked, pause or Pause(), report, on_point)
    return ending.result


def _run(
    setup: Setup,
    device: str | Emulated,
    tracker: Tracker,
    stop: Callable[[], bool],
    pause: Pause,
    progress: Progress,
    on_point: OnPoint,
) -> Result:
    with stream(
        setup.model,
        setup.policy,
        device=device,
        optimizer=setup.optimizer(),
        facts=setup.facts,
        nvme_directory=setup.spec.plan.nvme,
    ) as streamed:
        check_complete(streamed, base_is_kept=setup.base is not None)
        saver = Saver(setup.store, streamed)
        try:
            loop = Loop(setup, streamed, saver, tracker, stop, pause, progress, on_point)
            with watching(streamed, stop):
                return _trained(loop, tracker, on_point)
        finally:
            saver.close()


def _trained(loop: Loop, tracker: Tracker, on_point: OnPoint) -> Result:
    try:
        loop.run()
        after = _exact_match(loop)
    except StopRequested:
        loop.streamed.abandon()
        loop.save()
        loop.saver.wait()
        return _result(loop, "stopped", None)
    _export(loop, on_point)
    result = _result(loop, "done", after)
    directory = loop.setup.directory
    save_record(directory.result, result)
    tracker.artifact(directory.result)
    on_point("result")
    return result


def _exact_match(loop: Loop) -> float | None:
    if not loop.evaluation.generates:
        return None
    rate = loop.evaluation.exact_match(loop.setup.directory.verdicts).rate
    loop.report({"exact_match": rate})
    return rate


def _export(loop: Loop, on_point: OnPoint) -> None:
    """The trained model as a plain Hugging Face folder, or its adapters as one of peft."""
    on_point("exporting")
    setup, streamed = loop.setup, loop.streamed
    parts = chain((weights for _, weights in streamed.named_weights()), [streamed.rest()])
    write_model(setup.directory.model, setup.spec, setup.model, setup.tokenizer, parts)
    on_point("exported")


def _result(loop: Loop, status: str, after: float | None) -> Result:
    best = loop.state.best
    predicted = loop.setup.policy.predicted
    return Result(
        status=status,
        steps=loop.step,
        loss=loop.state.loss if math.isfinite(loop.state.loss) else None,
        exact_match_before=loop.state.exact_match_before,
        exact_match=after,
        tokens_per_s=loop.pace.tokens_per_s,
        step_s=loop.pace.step_s,
        predicted_step_s=predicted.step_s if predicted else None,
        peak_gpu_bytes=loop.streamed.device.peak_bytes,
        host_bytes=sum(loop.streamed.host_bytes().values()),
        run_dir=str(loop.setup.directory.path),
        best_step=best[0] if best else None,
        best_eval_loss=best[1] if best else None,
        notes=tuple(loop.setup.notes),
    )
