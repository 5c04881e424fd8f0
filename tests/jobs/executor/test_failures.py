"""Whatever fails in a step, the weights stay as they were, the error says what to do, and the next step works."""

from __future__ import annotations

import errno
import os

import pytest
import torch

from lazytrain.jobs.errors import LazytrainError, OutOfMemory, StepFailed, StorageError
from lazytrain.jobs.executor import Emulated, stream
from lazytrain.jobs.executor.stores.nvme import NvmeFile
from lazytrain.jobs.executor.transfers import Transfers
from lazytrain.jobs.optim import HybridAdamW
from lazytrain.jobs.policy import Policy

HOMES = ["nvme", "host", "nvme", "host", "nvme", "gpu"]


@pytest.fixture
def streamed(make_model, facts_of, make_batch, monkeypatch):
    facts, device = facts_of("llama"), Emulated(memory_bytes=1 << 30)
    optimizer = HybridAdamW(lr=1e-2, max_grad_norm=1.0)
    policy = Policy.from_homes(facts, HOMES, accumulation=2)
    with stream(make_model("llama"), policy, device=device, optimizer=optimizer, facts=facts) as opened:
        step(opened, make_batch)
        yield opened
        monkeypatch.undo()


def step(streamed, make_batch):
    for micro in range(2):
        streamed.model(**make_batch(micro)).loss.backward()
    return streamed.step()


def states(streamed):
    return {name: {k: t.clone() for k, t in state.items()} for name, state in streamed.unit_states()}


def failing_once(error):
    """A function that wraps pieces of work, of which the fifth raises."""
    calls = iter(range(10**6))

    def wrap(work):
        chosen = next(calls) == 4

        def worked(*args):
            if chosen:
                raise error
            return work(*args)

        return worked

    return wrap


def fail_disk(direction, number):
    def fail(monkeypatch):
        wrap, original = failing_once(OSError(number, os.strerror(number))), getattr(NvmeFile, direction)
        monkeypatch.setattr(NvmeFile, direction, lambda self, offset, data: wrap(original)(self, offset, data))

    return fail


def fail_work(kind, error):
    def fail(monkeypatch):
        wrap, prepare = failing_once(error), getattr(Transfers, f"_{kind}")

        def prepared(self, op):
            work, nbytes = prepare(self, op)
            return wrap(work), nbytes

        monkeypatch.setattr(Transfers, f"_{kind}", prepared)

    return fail


NO_HOST_MEMORY = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes.")
FAILURES = {
    "disk full": (fail_disk("_write", errno.ENOSPC), OutOfMemory, {"tier": "nvme"}),
    "disk broken": (fail_disk("_read", errno.EIO), StorageError, {"tier": "nvme"}),
    "gradient copy": (fail_work("gradient", ValueError("odd")), StepFailed, {"stream": "d2h"}),
    "weights copy": (fail_work("load", ZeroDivisionError("odd")), StepFailed, {"stream": "h2d"}),
    "norm": (fail_work("norm", ValueError("odd")), StepFailed, {"stream": "cpu"}),
    "host memory": (fail_work("accumulate", NO_HOST_MEMORY), OutOfMemory, {"tier": "host", "requested_bytes": 4096}),
    "no pages left": (
        fail_work("offload", MemoryError("tried to allocate 8192 bytes of host memory: Cannot allocate memory")),
        OutOfMemory,
        {"tier": "host", "requested_bytes": 8192},
    ),
    "pinning refused": (
        fail_work("gradient", RuntimeError("CUDA error: cudaHostRegister failed: out of memory")),
        OutOfMemory,
        {"tier": "host"},
    ),
    "a library's device memory": (
        fail_work("load", RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")),
        OutOfMemory,
        {"tier": "gpu"},
    ),
    "device memory": (
        fail_work("reload", torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has")),
        OutOfMemory,
        {"tier": "gpu", "requested_bytes": 2 << 20},
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", FAILURES)
def test_a_failure_ends_the_step_and_nothing_else(what, streamed, make_batch, monkeypatch):
    fail, kind, fields = FAILURES[what]
    before = states(streamed)
    with monkeypatch.context() as patched:
        fail(patched)
        with pytest.raises(LazytrainError) as caught:
            step(streamed, make_batch)
    assert type(caught.value) is kind
    assert {name: getattr(caught.value, name) for name in fields} == fields
    assert caught.value.hint
    after = states(streamed)
    assert all(torch.equal(t, after[unit][name]) for unit, state in before.items() for name, t in state.items())
    assert step(streamed, make_batch).step == 2


def test_an_allocation_that_fails_in_the_models_own_code_gets_its_tier(streamed, make_batch):
    def fail(*args):
        raise NO_HOST_MEMORY

    handle = streamed.model.model.layers[2].mlp.register_forward_pre_hook(fail)
    with pytest.raises(OutOfMemory) as caught:
        step(streamed, make_batch)
    handle.remove()
    assert caught.value.tier == "host"
    assert step(streamed, make_batch).step == 2


def test_the_models_own_errors_stay_what_they_are(streamed, make_batch):
    def fail(*args):
        raise KeyError("the model's")

    handle = streamed.model.model.layers[2].mlp.register_forward_pre_hook(fail)
    with pytest.raises(KeyError):
        step(streamed, make_batch)
    handle.remove()
    assert step(streamed, make_batch).step == 2


def test_host_memory_that_the_links_reach_runs_out_with_its_tier(make_model, facts_of, make_batch):
    """A step that needs more pinned memory than there is ends typed; a smaller one goes on from the same weights."""
    facts, gpu = facts_of("llama"), 1 << 30
    policy = Policy.from_homes(facts, HOMES, accumulation=1)
    weights = sum(unit.weight_bytes for unit in facts.units if not unit.shares_weights_with)
    room = Emulated(memory_bytes=gpu, host_memory_bytes=weights + facts.boundary_bytes[1])
    model, optimizer = make_model("llama"), HybridAdamW(lr=1e-2)
    with stream(model, policy, device=room, optimizer=optimizer, facts=facts) as opened:
        before = states(opened)
        with pytest.raises(OutOfMemory) as caught:
            opened.model(**make_batch(0)).loss.backward()
        assert caught.value.tier == "host"
        assert caught.value.requested_bytes > 0
        assert caught.value.budget_bytes == room.host_memory_bytes
        assert "plan.host_memory" in caught.value.hint
        after = states(opened)
        assert all(torch.equal(t, after[unit][name]) for unit, state in before.items() for name, t in state.items())
        opened.device._host.budget_bytes = None
        opened.model(**make_batch(0)).loss.backward()
        assert opened.step().step == 1


@pytest.mark.parametrize("room", [{"memory_bytes": 1000}, {"memory_bytes": 1 << 30, "host_memory_bytes": 1000}])
def test_a_device_without_room_for_the_weights_leaves_the_model_as_it_was(room, make_model, facts_of, make_batch):
    model, facts = make_model("llama"), facts_of("llama")
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(OutOfMemory) as caught:
        stream(model, Policy.from_homes(facts, HOMES), device=Emulated(**room), facts=facts)
    assert caught.value.tier == ("host" if "host_memory_bytes" in room else "gpu")
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())
    model(**make_batch(0)).loss.backward()
