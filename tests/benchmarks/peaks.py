"""What a step really takes of the device, beside what its program says: for tests and `families.py`."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import torch
from transformers import PreTrainedModel

from lazytrain.jobs.executor import stream
from lazytrain.jobs.model_facts import Internals, ModelFacts
from lazytrain.jobs.policy import LayerPolicy, Policy, Program


def peak_over_time(program: Program) -> int:
    """Most device bytes when operations run one after the other, in the order of the program."""
    change = [0] * (len(program.ops) + 1)
    for buffer in program.buffers:
        if buffer.tier == "gpu":
            change[program.index[buffer.acquired_by] if buffer.acquired_by else 0] += buffer.bytes
            if buffer.released_by:
                change[max(program.index[name] for name in buffer.released_by) + 1] -= buffer.bytes
    held = itertools.accumulate(change)
    return max(size + op.workspace_bytes for size, op in zip(held, program.ops, strict=False))


def padded_batch(model: PreTrainedModel, rows: int, length: int, vocabulary: int) -> dict[str, torch.Tensor]:
    """Every token supervised, one of them padding, each row with positions of its own: what facts allow for."""
    ids = torch.randint(4, vocabulary, (rows, length), generator=torch.Generator().manual_seed(rows))
    mask = torch.ones_like(ids)
    mask[0, -1] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}
    if "position_ids" in inspect.signature(model.forward).parameters:
        batch["position_ids"] = torch.arange(length).repeat(rows, 1)
    return batch


def peak_in_turn(model: PreTrainedModel, policy: Policy, facts: ModelFacts, batch: dict[str, torch.Tensor]) -> int:
    """Most device bytes where every transfer has ended before compute goes on."""
    with stream(model, policy, device="cpu", facts=facts) as streamed:
        streamed.device.reset_peak()
        with streamed.device.counting():  # what autograd does between the units too
            batch = {name: tensor.clone() for name, tensor in batch.items()}  # it lies on the device
            for _ in range(2 * policy.accumulation):
                loss = streamed.model(**batch).loss  # held while backward runs, as by most trainers
                loss.backward()
        streamed.gradients()
        return streamed.device.peak_bytes


def policies(facts: ModelFacts) -> dict[str, Policy]:
    """One that keeps only boundaries, one that keeps products, one that keeps all, and one of every sort of home."""
    return {
        "boundaries": _policy(facts, ("gpu",), ("none",)),
        "matmuls": _policy(facts, ("gpu", "host"), ("matmuls",)),
        "all": _policy(facts, ("gpu", "host"), ("all",)),
        "mixed": _policy(facts, ("host", "recompute", "gpu", "nvme"), ("none", "matmuls", "none", "all")),
    }


def _policy(facts: ModelFacts, homes: tuple[Any, ...], internals: tuple[Internals, ...]) -> Policy:
    """Homes and internals by turns."""
    count = len(facts.layers)
    policy = Policy.from_homes(facts, [*(homes[i % len(homes)] for i in range(count)), "gpu"])
    layers = tuple(
        LayerPolicy(
            index=i,
            internals="none" if policy.homes[i + 1] == "recompute" else internals[i % len(internals)],
            internals_home=("gpu", "host")[i % 2],
        )
        for i in range(count)
    )
    return policy.model_copy(update={"layers": layers})
