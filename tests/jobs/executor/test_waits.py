"""On a GPU, asking for a value makes the host wait for all that the GPU was given: no step of ours may ask for one."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lazytrain.jobs.executor import stream
from lazytrain.jobs.optim import HybridAdamW
from lazytrain.jobs.policy import LayerPolicy, Policy

ASKING = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}
"""A number for Python (``item()``, ``bool()``), and a size that depends on values."""


class Asked(TorchDispatchMode):
    """What was asked for after the first unit had run."""

    def __init__(self) -> None:
        super().__init__()
        self.under_way = False
        self.found: list[object] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.under_way |= func is torch.ops.aten.mm.default
        if self.under_way and func in ASKING:
            self.found.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("loss", ["mean", "of the step"])
def test_nothing_is_asked_of_the_device_between_the_first_layer_and_the_end_of_backward(
    loss, make_model, facts_of, make_batch
):
    facts = facts_of("llama")
    policy = Policy.from_homes(facts, ["host", "gpu", "recompute", "host", "gpu", "gpu"])
    layers = tuple(LayerPolicy(index=i, internals="matmuls" if i > 3 else "none") for i in range(5))
    policy = policy.model_copy(update={"layers": layers})
    with stream(make_model("llama"), policy, device="cpu", facts=facts, optimizer=HybridAdamW(lr=1e-3)) as streamed:
        for micro in range(2):
            with Asked() as asked:
                batch = make_batch(micro)
                count = {} if loss == "mean" else {"num_items_in_batch": torch.tensor(40)}
                (streamed.model(**batch, **count).loss / 2).backward()
            assert asked.under_way
            assert not asked.found
            streamed.step()
