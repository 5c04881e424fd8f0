"""Models and machines made by hand, so that the schedulers are tested without torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from lazytrain.jobs.model_facts import ModelFacts, UnitFacts
from lazytrain.schedulers.hardware import HardwareProfile

MIB = 1 << 20


def _unit(name: str, kind: str, **sizes: Any) -> UnitFacts:
    fields: dict[str, Any] = {
        "variety": kind,
        "parameters": 1000,
        "weight_bytes": 2000,
        "forward_flops": 0.0,
        "output_bytes": 0,
        "saved_bytes": 0,
        "saved_matmul_bytes": 0,
        "forward_workspace_bytes": 0,
        "backward_workspace_bytes": 0,
    }
    return UnitFacts(name=name, kind=kind, **(fields | sizes))


def _facts(
    layers: int = 4,
    *,
    boundary: int = MIB,
    parameters: int = MIB,
    flops: float | list[float] = 1e9,
    workspace: int = 0,
    tied: bool = False,
    micro_batch: int = 2,
    sequence_length: int = 16,
) -> ModelFacts:
    """A chain of equal bfloat16 layers (unless ``flops`` lists one value per layer) between an embedding and a head."""
    rates = flops if isinstance(flops, list) else [flops] * layers
    chain = tuple(
        _unit(
            f"model.layers.{i}",
            "layer",
            parameters=parameters,
            weight_bytes=2 * parameters,
            forward_flops=rates[i],
            output_bytes=boundary,
            saved_bytes=20 * boundary,
            saved_matmul_bytes=10 * boundary,
            forward_workspace_bytes=workspace // 4,
            backward_workspace_bytes=workspace,
        )
        for i in range(layers)
    )
    edge = {"parameters": 2 * parameters, "weight_bytes": 4 * parameters}
    head = {**edge, "shares_weights_with": "model.embed" if tied else ""}
    return ModelFacts(
        architecture="ByHandForCausalLM",
        dtype="bfloat16",
        micro_batch=micro_batch,
        sequence_length=sequence_length,
        hidden_size=64,
        vocabulary=1000,
        parameters=layers * parameters + (2 if tied else 4) * parameters + 1000,
        side_bytes=4096,
        before=(_unit("model.embed", "before", output_bytes=boundary, **edge),),
        layers=chain,
        after=(_unit("model.norm", "after", output_bytes=boundary),),
        head=_unit("lm_head", "head", forward_flops=rates[0], **head),
    )


def _profile(**changes: Any) -> HardwareProfile:
    """A machine whose rates are round numbers: 1e12 operations and 1e9 bytes per second, everywhere."""
    fields: dict[str, Any] = {
        "name": "round",
        "kind": "round",
        "device": "emulated",
        "gpu_memory_bytes": 1 << 30,
        "matmul_flops": {"bfloat16": 1e12, "float32": 1e12},
        "efficiency": 1.0,
        "h2d_bytes_s": 1e9,
        "d2h_bytes_s": 1e9,
        "host_memory_bytes": 4 << 30,
        "host_bytes_s": 1e10,
        "update_parameters_s": 1e9,
        "nvme_bytes": 0,
        "nvme_read_bytes_s": 1e9,
        "nvme_write_bytes_s": 1e9,
    }
    return HardwareProfile(**(fields | changes))


@pytest.fixture(scope="session")
def make_facts() -> Callable[..., ModelFacts]:
    return _facts


@pytest.fixture(scope="session")
def make_profile() -> Callable[..., HardwareProfile]:
    return _profile


CTRL_C = """
import os, signal, sys
try:
    os.kill(os.getpid(), signal.SIGINT)
    signal.pause()
except KeyboardInterrupt:
    sys.exit(7)
"""


@pytest.fixture(scope="session")
def hears_ctrl_c() -> Callable[..., bool]:
    """Whether Ctrl-C is a KeyboardInterrupt after this code has run, in a process of its own."""

    def hears(code: str, *arguments: str) -> bool:
        return subprocess.run([sys.executable, "-c", code + CTRL_C, *arguments], timeout=60).returncode == 7

    return hears
