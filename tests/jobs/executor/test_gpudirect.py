"""Boundaries that go from GPU memory to NVMe and back with no stop on the host, as far as one sees without either.

`fake_kvikio` stands for the library: it moves the bytes late, and tells the outcome only to who waits.
"""

from __future__ import annotations

import sys

import pytest
import torch

from lazytrain.jobs.errors import HardwareError, OutOfMemory, StorageError
from lazytrain.jobs.executor import Emulated, stream
from lazytrain.jobs.executor.devices import CpuDevice, EmulatedDevice
from lazytrain.jobs.executor.stores.gpudirect import GpuDirectFile, gpudirect_problem, problem_here
from lazytrain.jobs.executor.stores.scratch import ALIGNMENT
from lazytrain.jobs.optim import HybridAdamW
from lazytrain.jobs.policy import Policy
from lazytrain.jobs.policy.artifact import LayerPolicy

HOMES = ["nvme", "host", "nvme", "recompute", "nvme", "gpu"]


@pytest.fixture
def policy(facts_of):
    made = Policy.from_homes(facts_of("qwen3"), HOMES, accumulation=2)
    layers = tuple(LayerPolicy(index=i, resident=i == 1) for i in range(5))
    return made.model_copy(update={"layers": layers, "direct_nvme": True})


def train(make_model, facts_of, make_batch, policy, steps=3, **options):
    """Losses and gradient norms of a few steps, weights after them, and what was moved and held."""
    optimizer, seen = HybridAdamW(lr=1e-2, max_grad_norm=0.5), []
    device = Emulated(memory_bytes=1 << 30)
    torch.manual_seed(0)
    with stream(
        make_model("qwen3"), policy, device=device, optimizer=optimizer, facts=facts_of("qwen3"), debug=True, **options
    ) as streamed:
        for step in range(steps):
            for micro in range(2):
                loss = streamed.model(**make_batch(2 * step + micro)).loss
                loss.backward()
                seen.append(loss.item())
            seen.append(streamed.step().grad_norm)
        moved, held, weights = streamed.moved_bytes(), streamed.host_bytes()["activations"], streamed.state_dict()
    return seen, weights, moved, held


def test_every_bit_is_that_of_the_way_by_the_host_and_the_host_holds_and_moves_less(
    make_model, facts_of, make_batch, policy, gpudirect, tmp_path
):
    by_host = policy.model_copy(update={"direct_nvme": False})
    wanted, weights, moved, held = train(make_model, facts_of, make_batch, by_host, nvme_directory=tmp_path)
    assert not gpudirect.requests
    got, direct_weights, direct_moved, direct_held = train(
        make_model, facts_of, make_batch, policy, nvme_directory=tmp_path
    )
    assert got == wanted
    assert all(torch.equal(direct_weights[name], tensor) for name, tensor in weights.items())
    boundary = facts_of("qwen3").boundary_bytes[0]
    times = 3 * 2 * HOMES.count("nvme")  # steps, micro-batches
    assert sum(size for way, _, size in gpudirect.requests if way == "write" and size) >= times * boundary
    assert direct_moved["nvme_write"] == moved["nvme_write"] == times * boundary
    assert direct_moved["nvme_read"] == moved["nvme_read"] == times * boundary
    assert moved["d2h"] - direct_moved["d2h"] == moved["h2d"] - direct_moved["h2d"] == times * boundary
    assert held - direct_held == 2 * boundary  # the staging buffers
    assert list(tmp_path.iterdir()) == []


def test_evaluation_and_another_order_of_the_step(make_model, facts_of, make_batch, policy, gpudirect):
    facts, device = facts_of("qwen3"), Emulated(memory_bytes=1 << 30)
    grads = []
    for made in (policy, policy.model_copy(update={"direct_nvme": False})):
        with stream(make_model("qwen3"), made, device=device, facts=facts, debug=True) as streamed:
            a, b = (streamed.model(**make_batch(seed)).loss for seed in range(2))
            with torch.no_grad():
                between = streamed.model(**make_batch(2)).loss
            (a * b + between).backward()
            grads.append(streamed.gradients())
    assert all(torch.equal(grads[0][name], tensor) for name, tensor in grads[1].items())


def test_a_run_may_switch_to_it_and_back(make_model, facts_of, make_batch, policy, gpudirect):
    facts, optimizer = facts_of("qwen3"), HybridAdamW(lr=1e-2)
    by_host = policy.model_copy(update={"direct_nvme": False})
    device = Emulated(memory_bytes=1 << 30)
    with stream(make_model("qwen3"), by_host, device=device, facts=facts, optimizer=optimizer, debug=True) as streamed:
        for made in (policy, by_host, policy):
            streamed.switch(made)
            for micro in range(2):
                streamed.model(**make_batch(micro)).loss.backward()
            streamed.step()
        sys.modules["kvikio.defaults"].is_compat_mode_preferred = lambda: True
        streamed.switch(by_host)
        with pytest.raises(HardwareError, match="compatibility mode"):
            streamed.switch(policy)
        assert streamed.policy == by_host


FAULTS = {
    "full": ("write", RuntimeError("POSIX error: No space left on device"), OutOfMemory),
    "broken for writing": ("write", RuntimeError("cuFile error: I/O error"), StorageError),
    "broken for reading": ("read", RuntimeError("cuFile error: GPUDirect Storage driver error"), StorageError),
    "ends early": ("read", 0, StorageError),
}


@pytest.mark.parametrize("what", FAULTS)
def test_a_failure_ends_the_step_with_a_typed_error_and_nothing_else(
    what, make_model, facts_of, make_batch, policy, gpudirect
):
    way, fault, kind = FAULTS[what]
    facts, optimizer = facts_of("qwen3"), HybridAdamW(lr=1e-2)

    def step(streamed):
        for micro in range(2):
            streamed.model(**make_batch(micro)).loss.backward()
        return streamed.step()

    device = Emulated(memory_bytes=1 << 30)
    with stream(make_model("qwen3"), policy, device=device, facts=facts, optimizer=optimizer) as streamed:
        step(streamed)
        before = streamed.state_dict()
        gpudirect.fails[way] = [10**9, fault]
        with pytest.raises(kind) as caught:
            step(streamed)
        assert caught.value.tier == "nvme"
        assert caught.value.hint
        assert all(torch.equal(before[name], tensor) for name, tensor in streamed.state_dict().items())
        assert step(streamed).step == 2


def test_whole_blocks_are_one_request_at_a_block_and_short_ones_are_completed(gpudirect, tmp_path):
    file = GpuDirectFile(tmp_path, CpuDevice())
    data = torch.randn(5000)
    offset = [file.reserve(100), file.reserve(data.nbytes)][1]
    gpudirect.fails["write"], gpudirect.fails["read"] = [5000, 7], [4096, 4096]
    file.write(offset, data)
    into = torch.empty_like(data)
    file.read(offset, into)
    assert torch.equal(into, data)
    written = [(at, size) for way, at, size in gpudirect.requests if way == "write"]
    assert written[0] == (ALIGNMENT, 4 * ALIGNMENT)  # of the 20,000 bytes, the blocks that are whole
    assert written[-1] == (5 * ALIGNMENT, data.nbytes - 4 * ALIGNMENT)
    file.close()


def test_memory_that_is_written_counts_until_compute_waits_for_its_write(gpudirect):
    device = EmulatedDevice(Emulated(memory_bytes=1000))
    with device.counting():
        source = torch.zeros(200)
    device.lend(source, "nvme_write")
    written = device.streams["nvme_write"].submit("spill", lambda: None, ())
    del source
    device.streams["nvme_write"].submit("other", lambda: None, ()).wait()
    assert device._tracker.live_bytes == 800
    device.compute_waits(written)
    assert device._tracker.live_bytes == 0
    device.close()


@pytest.mark.parametrize(
    "lacking, words",
    [
        ("library", "kvikio cannot be imported"),
        ("driver", "nvidia-fs is not loaded"),
        ("configuration", "cuFile cannot be used .cuFile error: 5000"),
        ("mode", "KVIKIO_COMPAT_MODE"),
        ("file system", "cannot be reached from the GPU: O_DIRECT is not supported"),
        ("device", "no GPU of NVIDIA's"),
    ],
)
def test_what_is_missing_is_said_and_nothing_falls_back(
    lacking, words, make_model, facts_of, policy, gpudirect, monkeypatch
):
    def refuse(*_):
        raise RuntimeError("O_DIRECT is not supported")

    def fail(_):
        raise RuntimeError("cuFile error: 5000")

    if lacking == "library":
        monkeypatch.setitem(sys.modules, "kvikio", None)
    elif lacking == "device":
        monkeypatch.setattr(EmulatedDevice, "has_direct_io", False)
    elif lacking == "file system":
        monkeypatch.setattr(sys.modules["kvikio"], "CuFile", refuse)
    elif lacking == "configuration":
        monkeypatch.setattr(sys.modules["kvikio.cufile_driver"], "get", fail)
    gpudirect.gds_available = lacking != "driver"
    gpudirect.compat_preferred = lacking == "mode"
    model = make_model("qwen3")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(HardwareError, match=words) as caught:
        stream(model, policy, device=Emulated(memory_bytes=1 << 30), facts=facts_of("qwen3"))
    assert "direct_nvme" in caught.value.hint
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_block_is_tried_once_for_each_directory(gpudirect, tmp_path):
    device = EmulatedDevice(Emulated(memory_bytes=1 << 20))
    assert [gpudirect_problem(device, tmp_path) for _ in range(2)] == ["", ""]
    assert len(gpudirect.requests) == 4  # a whole block and a half, out and in
    device.close()
    assert problem_here(tmp_path) == "no CUDA device is visible"


def test_a_policy_without_boundaries_on_nvme_needs_none_of_it(make_model, facts_of, policy):
    made = Policy.from_homes(facts_of("qwen3"), ["host"] * 5 + ["gpu"]).model_copy(update={"direct_nvme": True})
    stream(make_model("qwen3"), made, device="cpu", facts=facts_of("qwen3")).close()
