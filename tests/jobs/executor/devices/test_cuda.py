"""The CUDA device's own logic, on a stand-in for `torch.cuda` that works on the CPU.

It proves that nothing is called wrongly, that memory is held as long as copies need it and no longer, and that the
engine gives the same bits; it proves nothing about a real GPU, for which there is `tests/benchmarks/gpu.py`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import time
import types
import weakref

import pytest
import torch

from lazytrain.jobs.errors import HardwareError
from lazytrain.jobs.executor import opening, stream
from lazytrain.jobs.executor.devices import CpuDevice, cuda
from lazytrain.jobs.executor.devices.cuda import CudaDevice, CudaEvent
from lazytrain.jobs.executor.stores.parameters import PartlyFrozen
from lazytrain.jobs.layout import Layout
from lazytrain.jobs.optim import HybridAdamW
from lazytrain.jobs.policy import LayerPolicy, Policy, lower


class FakeStream:
    def __init__(self, device=None):
        self.waits, self.cuda_stream = [], id(self)

    def wait_event(self, event):
        assert event.recorded is not None
        self.waits.append(event)

    def wait_stream(self, other):
        self.waits.append(other)

    def synchronize(self):
        pass


class FakeEvent:
    def __init__(self, enable_timing=False, blocking=False):
        self.timing, self.blocking, self.recorded = enable_timing, blocking, None

    def record(self, stream=None):
        self.recorded, self.at = stream or torch.cuda.current_stream(), time.perf_counter()

    def synchronize(self):
        assert self.recorded is not None

    def elapsed_time(self, other):
        assert self.timing and other.timing
        return 1e3 * (other.at - self.at)


@pytest.fixture
def fake(monkeypatch):
    """`torch.cuda` with one GPU whose streams have done what they are given at once."""
    default, current = FakeStream(), threading.local()

    @contextlib.contextmanager
    def on(stream):
        before = torch.cuda.current_stream()
        current.stream = stream
        yield
        current.stream = before

    pinned = {}

    def register(address, nbytes, flags):
        assert flags == 1
        pinned[address] = nbytes
        return 0

    state = types.SimpleNamespace(pinned=pinned, default=default, on=on, fraction=None, free=900)
    cudart = types.SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=lambda a: pinned.pop(a) and 0)
    replaced = {
        "Event": FakeEvent, "Stream": FakeStream, "stream": on, "device": lambda device: contextlib.nullcontext(),
        "current_stream": lambda device=None: getattr(current, "stream", default), "synchronize": lambda device: None,
        "is_available": lambda: True, "set_device": lambda device: None, "is_initialized": lambda: True,
        "cudart": lambda: cudart, "max_memory_allocated": lambda device: 0,
        "mem_get_info": lambda device: (state.free, 1000),
        "set_per_process_memory_fraction": lambda share, device: setattr(state, "fraction", share),
    }  # fmt: skip
    for name, value in replaced.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return state


class OnTheCpu(CudaDevice):
    """A CUDA device whose tensors are the host's."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.torch_device = self._memory._driver._device = torch.device("cpu")


@pytest.fixture
def device(fake):
    opened = OnTheCpu()
    yield opened
    opened.close()


def test_without_a_gpu_it_is_refused():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(HardwareError, match="no CUDA device"):
        CudaDevice(0)


@pytest.mark.parametrize("direct", [False, True], ids=["by the host", "gpudirect"])
def test_training_gives_the_bits_of_the_cpu(
    direct, fake, gpudirect, make_model, facts_of, make_batch, monkeypatch, tmp_path
):
    facts = facts_of("qwen3")
    kept = [("all", "host"), ("none", "gpu"), ("matmuls", "host"), ("none", "gpu"), ("all", "gpu")]
    layers = tuple(LayerPolicy(index=i, internals=what, internals_home=home) for i, (what, home) in enumerate(kept))
    policy = Policy.from_homes(facts, ["host", "gpu", "nvme", "host", "recompute", "gpu"], accumulation=2)
    policy = policy.model_copy(update={"layers": layers})
    policy = policy.parked(optimizer=[3, 4], gradients=[4])

    monkeypatch.setattr(opening, "open_device", lambda which: OnTheCpu() if which == "cuda" else CpuDevice())

    def train(device):
        optimizer = HybridAdamW(lr=1e-2, max_grad_norm=0.5, min_8bit_size=256)
        model = make_model("qwen3", dropout=False)
        made = policy.model_copy(update={"direct_nvme": direct and device == "cuda"})
        with stream(model, made, device=device, optimizer=optimizer, facts=facts, nvme_directory=tmp_path) as streamed:
            losses = []
            for step in range(3):
                streamed.flush()
                streamed.trace()
                for micro in range(2):
                    loss = streamed.model(**make_batch(10 * step + micro)).loss
                    loss.backward()
                    losses.append(loss.item())
                losses.append(streamed.step().grad_norm)
            streamed.flush()
            pinned, spans = len(fake.pinned), streamed.timeline().spans
            return losses, streamed.state_dict(), pinned, spans

    wanted = train("cpu")
    got = train("cuda")
    assert got[0] == wanted[0]
    assert all(torch.equal(got[1][name], tensor) for name, tensor in wanted[1].items())
    assert wanted[2] == 0 < got[2]
    assert fake.pinned == {}  # closed
    assert len({stream for _, stream in gpudirect.used}) == (2 if direct else 0)  # none of them that of compute
    policy = policy.model_copy(update={"direct_nvme": direct})
    compute = [op.id for op in lower(policy, facts).ops if op.stream in ("compute", "h2d", "d2h")]
    assert sorted(span.op for span in got[3] if span.stream in ("compute", "h2d", "d2h")) == sorted(compute)
    assert all(0 <= span.start_s <= span.end_s for span in got[3])


def test_memory_that_is_read_into_from_nvme_is_first_left_by_compute(
    fake, gpudirect, make_model, facts_of, make_batch, monkeypatch
):
    facts, device = facts_of("qwen3"), OnTheCpu()
    policy = Policy.from_homes(facts, ["nvme"] * 5 + ["gpu"]).model_copy(update={"direct_nvme": True})
    monkeypatch.setattr(opening, "open_device", lambda which: device)
    stream_of_reads, waited_for = device.streams["nvme_read"], []
    submit = stream_of_reads.submit

    def noted(name, work, after, nbytes=0):
        waited_for.append([event.gpu.recorded for event in after if isinstance(event, CudaEvent)])
        return submit(name, work, after, nbytes)

    monkeypatch.setattr(stream_of_reads, "submit", noted)
    with stream(make_model("qwen3"), policy, device="cuda", facts=facts) as streamed:
        streamed.model(**make_batch()).loss.backward()
    assert len(waited_for) == 5
    assert all(fake.default in streams for streams in waited_for)


def test_weights_of_a_partly_frozen_layer_are_one_pinned_buffer_that_updates_reach(device, fake):
    layout = Layout.of({"learns": (8, 16)})
    learning = HybridAdamW(lr=0.1).unit(layout, torch.ones(layout.numel), torch.bfloat16)
    weights = PartlyFrozen(learning, 64)
    weights.load_master(torch.full((64,), 2.0), layout.numel)
    weights.streamed = device.adopt(weights.streamed)
    assert device._memory.is_pinned(weights.streamed)
    weights.update(torch.ones(layout.numel, dtype=torch.bfloat16), step=1, scale=1.0, lr=0.1)
    assert (weights.streamed[: layout.numel] < 1).all()
    assert (weights.streamed[layout.numel :] == 2).all()


def test_what_a_copy_reads_is_held_until_compute_has_waited_for_it(device):
    source = torch.ones(10)
    gone = weakref.ref(source)
    device.lend(source, "d2h")
    copied = torch.zeros(10)
    event = device.streams["d2h"].submit("copy", lambda source=source: copied.copy_(source), ())
    later = device.streams["d2h"].submit("other", lambda: None, ())
    del source
    later._ended.wait()
    gc.collect()
    assert gone() is not None  # the copy was enqueued, but nobody knows that it has ended
    device.compute_waits(event)
    gc.collect()
    assert gone() is None
    assert copied.all()


def test_waiting_for_later_work_of_the_stream_lets_go_of_earlier_sources(device):
    stream, sources = device.streams["d2h"], [torch.ones(2) for _ in range(3)]
    gone = [weakref.ref(source) for source in sources]
    events = []
    for source in sources:
        device.lend(source, "d2h")
        events.append(stream.submit("copy", lambda: None, ()))
    del source, sources
    events[1].wait()
    gc.collect()
    assert all(ref() is not None for ref in gone)  # a stream's thread that waits is not yet the program
    events[1].settle()
    gc.collect()
    assert [ref() is None for ref in gone] == [True, True, False]


def test_waiting_for_what_came_after_a_copy_lets_go_of_its_source_too(device):
    """A program leaves out waits that follow from others: compute may wait for the reload alone."""
    source = torch.ones(2)
    gone = weakref.ref(source)
    device.lend(source, "d2h")
    offload = device.streams["d2h"].submit("offload", lambda: None, ())
    device.streams["h2d"].submit("reload", lambda: None, (offload, device.compute_event()))
    later = device.streams["h2d"].submit("load", lambda: None, ())
    del source, offload
    later._ended.wait()
    gc.collect()
    assert gone() is not None
    device.compute_waits(later)
    gc.collect()
    assert gone() is None


def test_the_users_tensors_come_by_way_of_pinned_memory_so_that_nobody_waits(device, monkeypatch):
    pinned, batch = [], torch.ones(3)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    assert device.bring(batch) is batch
    device.torch_device = torch.device("meta")
    assert device.bring(batch).is_meta
    assert [tensor is batch for tensor in pinned] == [True]


def test_compute_runs_on_one_stream_whatever_the_callers(device, fake):
    other = FakeStream()
    with fake.on(other):
        with device.counting():
            assert torch.cuda.current_stream() is fake.default
        assert fake.default.waits == [other]  # what the caller has made is there
        assert other.waits == [fake.default]  # and the caller sees what was computed
    with device.counting(), device.counting():
        assert fake.default.waits == [other]


def test_a_failing_copy_is_raised_where_it_is_waited_for(device):
    def fail():
        raise ValueError("broken")

    event = device.streams["h2d"].submit("copy", fail, ())
    with pytest.raises(ValueError, match="broken"):
        device.compute_waits(event)


@pytest.mark.parametrize(("wanted", "free", "fraction"), [(500, 900, 0.5), (950, 900, 0.9)])
def test_the_cap_leaves_the_contexts_memory_alone(fake, wanted, free, fraction):
    fake.free = free
    OnTheCpu(0, wanted).close()
    assert fake.fraction == fraction


def test_the_allocator_is_set_before_cuda_starts_and_never_against_the_user(monkeypatch):
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    environment = {}
    monkeypatch.setattr(cuda.os, "environ", environment)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    cuda.prefer_expandable_segments()
    assert environment == {}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    cuda.prefer_expandable_segments()
    assert environment == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    environment.clear()
    environment["PYTORCH_ALLOC_CONF"] = "max_split_size_mb:64"
    cuda.prefer_expandable_segments()
    assert environment == {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}


def test_a_limit_on_pinned_memory_changes_no_bit(fake, make_model, facts_of, make_batch, monkeypatch):
    facts, weights = facts_of("qwen2"), []
    for limit in (None, 13 * 2**20, 0):
        limited = functools.partial(OnTheCpu, pinned_limit_bytes=limit)
        monkeypatch.setattr(opening, "open_device", lambda _, opened=limited: opened())
        policy = Policy.from_homes(facts, ["host"] * 5 + ["gpu"])
        with stream(
            make_model("qwen2"), policy, device="cuda", optimizer=HybridAdamW(lr=1e-2), facts=facts
        ) as streamed:
            for step in range(2):
                streamed.model(**make_batch(step)).loss.backward()
                streamed.step()
            weights.append(streamed.state_dict())
    for others in weights[1:]:
        assert all(torch.equal(others[name], tensor) for name, tensor in weights[0].items())
