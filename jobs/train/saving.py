"""Checkpoints beside training: a thread writes the units one by one while the next step runs.

What is saved is the state after the step at which the save was asked for. Each unit is written straight from its
memory, which its next update does not touch before that; so a save costs no second copy of anything, and training waits
only where the disk is slower than a step. Of optimizer state that is on NVMe, one unit's at a time is read for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ..checkpoint import CheckpointStore
from ..errors import ModelError
from ..executor import Streamed
from ..executor.devices import Event
from ..executor.stores import UnitOptimizer
from .gate import Gate

log = logging.getLogger(__name__)

REST = "(rest)"
"""Name of the unit of a checkpoint that holds what no unit of the model does: buffers, and parts that no text uses."""

Units = Sequence[tuple[str, UnitOptimizer, Event]]
Weights = Mapping[str, torch.Tensor]


class Saver:
    """Saves the state of a streamed model; one save at a time."""

    def __init__(self, store: CheckpointStore, streamed: Streamed) -> None:
        self._store, self._streamed = store, streamed
        self._gate = Gate()
        streamed.before_update(self._gate.wait)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._waited_s = 0.0

    def save(self, step: int, trainer: Mapping[str, Any], *, score: float | None = None) -> None:
        """Begin to save the state after this step. Raises what went wrong with the save before."""
        self.wait()
        started = time.perf_counter()
        units, rest = self._streamed.unit_weights(), self._streamed.rest()
        self._gate.hold((name for name, _, _ in units), self._streamed.steps)
        self._thread = threading.Thread(
            target=self._write, args=(step, units, rest, trainer, score), name="lazytrain-save", daemon=True
        )
        self._thread.start()
        self._waited_s += time.perf_counter() - started

    def check(self) -> None:
        """Raise what went wrong with a save that has ended; wait for nothing."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Return when nothing is being saved any more; raise what went wrong."""
        started = time.perf_counter()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._waited_s += time.perf_counter() - started
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        """Return when nothing is being saved; after another failure, one of a save is only logged."""
        try:
            self.wait()
        except Exception as error:  # the run is ending for a reason of its own already
            log.error("the last checkpoint was not saved: %s", error)

    @property
    def stall_s(self) -> float:
        """Seconds for which training has waited for saves: for one to end, and of updates for their units."""
        return self._waited_s + self._gate.waited_s

    def _write(self, step: int, units: Units, rest: Weights, trainer: Mapping[str, Any], score: float | None) -> None:
        try:
            self._store.save(step, self._states(units, rest), trainer, score=score)
        except BaseException as error:  # raised again in the thread that trains
            self._error = error
        finally:
            self._gate.release_all()

    def _states(self, units: Units, rest: Weights) -> Iterator[tuple[str, Weights]]:
        for name, weights, updated in units:
            updated.wait()
            yield name, weights.state()
            self._gate.release(name)  # its file is written
        if rest:
            yield REST, rest


def check_complete(streamed: Streamed, *, base_is_kept: bool = False) -> None:
    """Raise ModelError when a checkpoint would lack anything of the model: to be known before the first step.

    With ``base_is_kept``, what is frozen is read again from where it came, and only what learns is to be saved.
    """
    saved = {name for unit in streamed.layouts().values() for name, _, _ in unit} | streamed.rest().keys()
    named: dict[int, list[str]] = defaultdict(list)
    for name, parameter in streamed.model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad or not base_is_kept:
            named[id(parameter)].append(name)  # tied weights have several names, of which one is enough
    lost = [names[0] for names in named.values() if saved.isdisjoint(names)]
    if lost:
        raise ModelError(
            f"{type(streamed.model).__name__} has weights that would not be saved: {', '.join(lost[:3])}",
            hint="this architecture cannot be trained here",
        )
