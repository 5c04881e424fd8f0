"""Weights that stay on the device give the same tokens and move nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lazytrain.jobs.errors import OutOfMemory
from lazytrain.jobs.executor import Emulated, resident, stream
from lazytrain.jobs.optim import HybridAdamW
from lazytrain.jobs.policy import Policy


def step(streamed: Any, batch: dict[str, torch.Tensor]) -> float:
    loss = streamed.model(**batch).loss
    loss.backward()
    streamed.step()
    return float(loss.item())


@pytest.mark.parametrize("device", ["cpu", Emulated(memory_bytes=1 << 26)], ids=["cpu", "emulated"])
def test_same_tokens_and_no_transfer(
    family: str,
    device: Any,
    make_model: Callable[..., Any],
    facts_of: Callable[..., Any],
    make_batch: Callable[..., Any],
) -> None:
    facts = facts_of(family)
    policy = Policy.from_homes(facts, ["host"] * len(facts.layers) + ["gpu"])
    ids = torch.randint(3, 50, (2, 5), generator=torch.Generator().manual_seed(1))
    with stream(make_model(family), policy, device=device, facts=facts, optimizer=HybridAdamW(lr=1e-2)) as streamed:
        step(streamed, make_batch())
        streamed.model.eval()
        ask = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}
        with torch.no_grad():
            carried = streamed.model.generate(**ask)
            moved = dict(streamed.moved_bytes())
            with resident(streamed):
                held = streamed.model.generate(**ask)
            assert dict(streamed.moved_bytes()) == moved
            again = streamed.model.generate(**ask)
        assert torch.equal(carried, held) and torch.equal(carried, again)
        assert dict(streamed.moved_bytes()) != moved
        streamed.model.train()
        step(streamed, make_batch())  # training goes on


def test_no_room_changes_nothing(make_model: Callable[..., Any], facts_of: Callable[..., Any], make_batch: Any) -> None:
    facts = facts_of("qwen3")
    policy = Policy.from_homes(facts, ["host"] * len(facts.layers) + ["gpu"])
    with stream(make_model("qwen3"), policy, device=Emulated(memory_bytes=1 << 18), facts=facts) as streamed:
        batch = make_batch()
        with torch.no_grad():
            before = streamed.model(**batch).loss.item()
            with pytest.raises(OutOfMemory), resident(streamed):
                raise AssertionError("there is no room")
            assert streamed.model(**batch).loss.item() == before
