"""The profile of a whole node: one of its GPUs and its host measured in full, and the copies of all GPUs at once."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import ray
import ray.exceptions

from ...jobs.errors import DeviceBusy
from ...schedulers.copies import CopyRates
from ...schedulers.hardware import MEASUREMENT, HardwareProfile
from ..inspection import Device
from .profiling import Profiler

if TYPE_CHECKING:
    from ..probe.copies import Way

_COMPANY: Final[tuple[tuple[str, tuple[Way, ...]], ...]] = (("", ("h2d",)), ("", ("d2h",)), ("both_", ("h2d", "d2h")))
"""In which directions a GPU copies at a time, and how the fields of `CopyRates` begin that hold its rates then."""
_START_S: Final = 60.0
"""Longest wait for the actors of the other GPUs, and for any one copy."""


class NodeProfiler(Profiler):
    """The profiler of one GPU that leads those of the others: they meet here before and after they copy together.

    Whoever waits for the others takes a thread: it needs one for each GPU and one for the call that measures.
    """

    def __init__(self, gpus: int) -> None:
        super().__init__()
        self._meeting = threading.Barrier(gpus, timeout=_START_S)

    def meet(self) -> None:
        """Returns when every GPU's profiler has called it. Raises BrokenBarrierError when one does not."""
        self._meeting.wait()

    def measure_node(
        self, base: HardwareProfile | None, nvme_dir: Path | None, reserve_bytes: int, others: Sequence[Any]
    ) -> HardwareProfile:
        """The profile, with the copies of this GPU and of the ``others``, whose actors these are.

        ``base`` as in `probe.measure`. Its links are those of the slowest GPU. Raises DeviceBusy when a GPU is in use
        by something else, or cannot be had within a minute.
        """
        devices = [self.device(), *_answers([other.device.remote() for other in others])]
        _refuse_busy(devices)
        profile = self.measure(base, nvme_dir, reserve_bytes)
        if profile.device == "cpu":  # there is no link to copy over
            return profile.model_copy(update={"measurement": MEASUREMENT})
        copies = self._copies(base, devices, others)
        return profile.model_copy(
            update={
                "copies": tuple(copies),
                "driver": next((device.driver for device in devices if device is not None), ""),
                "measurement": MEASUREMENT,
                "h2d_bytes_s": min(profile.h2d_bytes_s, *(each.h2d_bytes_s for each in copies)),
                "d2h_bytes_s": min(profile.d2h_bytes_s, *(each.d2h_bytes_s for each in copies)),
            }
        )

    def _copies(
        self, base: HardwareProfile | None, devices: Sequence[Device | None], others: Sequence[Any]
    ) -> list[CopyRates]:
        found: list[dict[str, float]] = [{} for _ in devices]
        for name, ways in _COMPANY:
            alone = [self.copy(base, ways), *(_answers([other.copy.remote(base, ways)])[0] for other in others)]
            _note(found, name, ways, alone)
        for name, ways in _COMPANY:
            _note(found, f"all_{name}", ways, self._all_copy(base, ways, others))
        return [
            CopyRates(
                gpu=device.id if device is not None else str(number),
                pcie_root=device.pcie_root if device is not None else "",
                **rates,
            )
            for number, (device, rates) in enumerate(zip(devices, found, strict=True))
        ]

    def _all_copy(self, base: HardwareProfile | None, ways: Sequence[Way], others: Sequence[Any]) -> list[list[float]]:
        here = ray.get_runtime_context().current_actor
        asked = [other.copy_with.remote(base, ways, here) for other in others]
        return [self.copy(base, ways, self.meet), *_answers(asked)]


def _note(found: Sequence[dict[str, float]], name: str, ways: Sequence[Way], rates: Sequence[Sequence[float]]) -> None:
    """Write each GPU's rates into its fields."""
    for fields, of_gpu in zip(found, rates, strict=True):
        fields.update({f"{name}{way}_bytes_s": rate for way, rate in zip(ways, of_gpu, strict=True)})


def _refuse_busy(devices: Sequence[Device | None]) -> None:
    for device in devices:
        if device is not None and device.busy:
            raise DeviceBusy(
                f"GPU {device.index} is not measured while it is busy: {device.busy}",
                hint="the node is measured when nothing else uses its GPUs",
            )


def _answers(asked: Sequence[Any]) -> list[Any]:
    try:
        return list(ray.get(list(asked), timeout=_START_S))
    except ray.exceptions.GetTimeoutError as error:
        raise DeviceBusy(
            f"not all GPUs of the node could be had within {_START_S:g} s",
            hint="the node is measured when nothing else uses its GPUs",
        ) from error
