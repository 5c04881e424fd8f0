"""The files that ``--html`` and ``--out`` write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ...jobs.errors import InputError
from ...jobs.units import format_bytes
from .tables import homes_line, seconds

if TYPE_CHECKING:
    from ...jobs.model_facts import ModelFacts
    from ...jobs.policy import Policy
    from ...schedulers.hardware import HardwareProfile


def write_page(path: Path, policy: Policy, facts: ModelFacts, profile: HardwareProfile) -> None:
    """Draw a policy and its predicted step into one HTML file. Raises InputError where it cannot be written."""
    from ...schedulers.drawing import page
    from ...schedulers.simulator import predict, simulate

    predicted = predict(policy, facts, profile)
    figures = {
        "step": seconds(predicted.step_s),
        "tokens per second": f"{predicted.tokens_per_s:,.0f}",
        "TFLOPS (6N)": f"{predicted.tflops_6n:.4g}",
        "forwards of compute": f"{predicted.compute_units:.2f}",
        "peak GPU memory": format_bytes(predicted.peak_gpu_bytes),
        "peak host memory": format_bytes(predicted.peak_host_bytes),
        "compute waits for links": seconds(sum(predicted.exposed_s.values())),
        "homes": homes_line(policy),
    }
    if policy.certificate and policy.certificate.gap is not None:
        figures["proof"] = f"no policy is faster by more than {policy.certificate.gap:.2%}"
    rows = f"{facts.micro_batch} x {facts.sequence_length} tokens"
    title = f"{facts.architecture}, {facts.parameters / 1e9:.3g} B parameters, {rows} on {profile.name}"
    write_text(path, page(title, policy, simulate(policy, facts, profile), figures))


def write_text(path: Path, text: str) -> None:
    """Write the file. Raises InputError where it cannot be written."""
    with writing(path):
        path.write_text(text, encoding="utf-8")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What the system says of a file that cannot be written is an InputError."""
    try:
        yield
    except OSError as error:
        raise _unwritable(path, error.strerror or str(error)) from error


def check_places(*paths: Path | None) -> None:
    """Look where files are to be written before the work for them is done. Raises InputError where that cannot be."""
    for path in paths:
        if path is not None and path.is_dir():
            raise _unwritable(path, "it is a folder")
        if path is not None and not path.parent.is_dir():
            raise _unwritable(path, "its folder does not exist")


def _unwritable(path: Path, why: str) -> InputError:
    return InputError(f"cannot write {path}: {why}", hint="name a file in a folder that you may write to")
