"""Facts made by hand, with round numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lazytrain.jobs.model_facts import ModelFacts, UnitFacts

WEIGHTS, BOUNDARY = 1000, 100


def unit(name: str, kind: str, **changes: object) -> UnitFacts:
    values = {
        "name": name, "kind": kind, "variety": kind, "parameters": 250, "weight_bytes": WEIGHTS, "forward_flops": 1e6,
        "output_bytes": BOUNDARY, "saved_bytes": 500, "saved_matmul_bytes": 200, "forward_workspace_bytes": 300,
        "backward_workspace_bytes": 800,
    }  # fmt: skip
    return UnitFacts.model_validate(values | changes)


@pytest.fixture(scope="session")
def make_facts() -> Callable[..., ModelFacts]:
    def make(layers: int, *, before: int = 1, after: int = 1, tied: bool = False) -> ModelFacts:
        return ModelFacts(
            architecture="Toy", dtype="float32", micro_batch=2, sequence_length=8, hidden_size=4, vocabulary=10,
            parameters=250 * (layers + before + after + (not tied)), side_bytes=10,
            before=tuple(unit(f"embed{i}", "before") for i in range(before)),
            layers=tuple(unit(f"layers.{i}", "layer") for i in range(layers)),
            after=tuple(unit(f"norm{i}", "after") for i in range(after)),
            head=unit("lm_head", "head", output_bytes=0, shares_weights_with="embed0" if tied else ""),
        )  # fmt: skip

    return make
