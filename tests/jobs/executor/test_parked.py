"""Optimizer state and gradients on NVMe: the same bits as on the host, and the bytes that the program says."""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path

import pytest
import torch

from lazytrain.jobs.errors import OutOfMemory, ProgramError, StorageError
from lazytrain.jobs.executor import Emulated, stream
from lazytrain.jobs.executor.parking import parked_state_bytes
from lazytrain.jobs.introspect import model_facts
from lazytrain.jobs.optim import HybridAdamW
from lazytrain.jobs.policy import Policy, lower
from lazytrain.schedulers.costs import host_bytes

HOMES = ["host", "recompute", "gpu", "nvme", "recompute", "gpu"]
PARKED = {"optimizer": [0, 1, 2, 4], "gradients": [1, 2, 3, 4]}
DEVICES = {"cpu": "cpu", "emulated": Emulated(memory_bytes=1 << 30, h2d_bytes_s=1e9, nvme_write_bytes_s=2e8)}


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request):
    return request.param


@pytest.fixture(scope="module")
def facts(dtype, make_model):
    model = make_model("qwen3").to(getattr(torch, dtype))
    return model_facts(model, micro_batch=3, sequence_length=17, dtype=dtype)


@pytest.fixture
def open_stream(dtype, facts, make_model, tmp_path):
    def opened(parked, *, device="cpu", accumulation=1, seed=0, **options):
        policy = Policy.from_homes(facts, HOMES, accumulation=accumulation).parked(**(PARKED if parked else {}))
        optimizer = HybridAdamW(lr=1e-2, max_grad_norm=0.5, weight_decay=0.1, min_8bit_size=256, **options)
        model = make_model("qwen3", seed=seed).to(getattr(torch, dtype))
        return stream(model, policy, device=DEVICES[device], optimizer=optimizer, facts=facts, nvme_directory=tmp_path)

    return opened


def train(streamed, make_batch, steps, start=0):
    losses = []
    for step in range(start, start + steps):
        for micro in range(streamed.accumulation):
            loss = streamed.model(**make_batch(10 * step + micro)).loss
            loss.backward()
        losses.append((loss.item(), streamed.step().grad_norm))
    return losses


def states(streamed):
    return {name: {k: t.clone() for k, t in state.items()} for name, state in streamed.unit_states()}


def assert_same(some, others):
    assert some.keys() == others.keys()
    for name, tensors in some.items():
        assert tensors.keys() == others[name].keys()
        assert all(torch.equal(t, others[name][k]) for k, t in tensors.items()), name


@pytest.mark.parametrize(("device", "accumulation"), [("cpu", 1), ("emulated", 1), ("emulated", 3)])
def test_the_home_changes_no_bit(open_stream, make_batch, device, accumulation):
    with open_stream(False, accumulation=accumulation) as streamed:
        wanted = train(streamed, make_batch, 4), states(streamed), streamed.state_dict()
    with open_stream(True, device=device, accumulation=accumulation) as streamed:
        assert train(streamed, make_batch, 4) == wanted[0]
        assert_same(states(streamed), wanted[1])
        weights = streamed.state_dict()
        assert all(torch.equal(weights[name], tensor) for name, tensor in wanted[2].items())


def test_a_run_goes_on_from_a_saved_state_in_either_home(open_stream, make_batch):
    with open_stream(True) as streamed:
        train(streamed, make_batch, 2)
        saved = states(streamed)
        later = train(streamed, make_batch, 2, start=2)
        wanted = states(streamed)
    for parked in (True, False):
        with open_stream(parked, seed=9) as streamed:
            for name, state in saved.items():
                streamed.load_unit_state(name, state)
            streamed.steps = 2
            assert train(streamed, make_batch, 2, start=2) == later
            assert_same(states(streamed), wanted)


def test_the_bytes_moved_are_the_programs(open_stream, make_batch):
    with open_stream(True, accumulation=2) as streamed:
        train(streamed, make_batch, 3)
        streamed.flush()
        policy, facts = streamed.policy, streamed.facts
        program = lower(policy, facts, state_bytes=parked_state_bytes(streamed._engine.units))
        moved = streamed.moved_bytes()
        for link, nbytes in program.bytes_by_stream().items():
            assert moved[link] == 3 * nbytes, link
        held = streamed.host_bytes()
    assert held["gradients"] == sum(
        unit.weight_bytes // facts.element_bytes * 4
        for i, unit in enumerate(facts.units)
        if not unit.shares_weights_with and i - len(facts.before) not in PARKED["gradients"]
    )


def test_the_host_holds_what_the_costs_say(open_stream, make_batch, facts):
    """The reckoned bytes are those of large 8-bit tensors; norms and padding of a tiny model differ from them."""
    with open_stream(False) as streamed:
        train(streamed, make_batch, 1)
        on_host, plain = streamed.host_bytes(), host_bytes(facts, streamed.policy)
    with open_stream(True) as streamed:
        train(streamed, make_batch, 1)
        parked, fewer = streamed.host_bytes(), host_bytes(facts, streamed.policy)
        true = sum(parked_state_bytes(streamed._engine.units).values())
    assert on_host["weights_and_state"] - parked["weights_and_state"] == pytest.approx(true, rel=0.01)
    reckoned = sum(plain[k] - fewer[k] for k in ("weights", "master", "optimizer_state"))
    assert reckoned == pytest.approx(true, rel=0.1)
    assert plain["gradients"] - fewer["gradients"] == pytest.approx(
        on_host["gradients"] - parked["gradients"], rel=0.03
    )
    assert parked["activations"] > on_host["activations"]  # the rings


def test_gradients_of_the_step_are_seen_wherever_they_are(open_stream, make_batch):
    seen = []
    for parked in (False, True):
        with open_stream(parked) as streamed:
            streamed.model(**make_batch()).loss.backward()
            seen.append(streamed.gradients())
    assert seen[0].keys() == seen[1].keys()
    assert all(torch.equal(gradient, seen[1][name]) for name, gradient in seen[0].items())


def test_evaluating_stopping_short_and_changing_the_accumulation_change_no_bit(open_stream, make_batch):
    def course(streamed):
        train(streamed, make_batch, 1)
        with torch.no_grad():
            streamed.model(**make_batch(5))
        streamed.model(**make_batch(6)).loss.backward()  # a step that nobody takes
        streamed.zero_grad()
        with torch.no_grad():
            streamed.model(**make_batch(5))
        (float("nan") * streamed.model(**make_batch(7)).loss).backward()
        assert streamed.step().skipped
        train(streamed, make_batch, 2, start=3)
        streamed.accumulation = 2
        train(streamed, make_batch, 2, start=6)
        return states(streamed)

    with open_stream(False) as streamed:
        wanted = course(streamed)
    with open_stream(True, device="emulated") as streamed:
        assert_same(course(streamed), wanted)


def open_files():
    gc.collect()  # what other tests have dropped
    return len(list(Path("/proc/self/fd").iterdir()))


def test_the_files_have_no_name_and_their_space_is_given_back(open_stream, make_batch, tmp_path):
    before = open_files()
    with open_stream(True) as streamed:
        train(streamed, make_batch, 1)
        assert list(tmp_path.iterdir()) == []
        assert open_files() > before
    assert open_files() == before


def test_a_disk_that_is_too_small_is_refused_before_the_first_step(open_stream, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OutOfMemory, match="nvme"):
        open_stream(True)


@pytest.mark.parametrize("device", DEVICES)
def test_a_disk_that_dies_ends_the_run_and_nothing_torn_can_be_saved(open_stream, make_batch, monkeypatch, device):
    def dead(*_):
        raise OSError(errno.EIO, "Input/output error")

    streamed = open_stream(True, device=device)
    train(streamed, make_batch, 1)
    streamed.model(**make_batch(1)).loss.backward()
    streamed.flush()
    monkeypatch.setattr(os, "preadv", dead)
    with pytest.raises(StorageError):  # at once, or on a stream of its own later
        streamed.step()
        streamed.flush()
    monkeypatch.undo()
    for use in (streamed.flush, lambda: list(streamed.unit_states()), lambda: streamed.model(**make_batch(2))):
        with pytest.raises(StorageError, match="nvme"):
            use()
    before = open_files()
    with pytest.raises(StorageError):
        streamed.close()
    assert open_files() < before


def test_layers_that_are_frozen_wholly_or_in_part(dtype, make_model, make_batch, tmp_path):
    """What learns of a layer is parked; of a layer that learns nothing, nothing is."""
    weights = []
    for parked in ({}, {"optimizer": [0, 1, 2], "gradients": [1, 2]}):
        model = make_model("qwen3").to(getattr(torch, dtype))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith("model.layers.1.") and "mlp.up_proj" not in name)
        facts = model_facts(model, micro_batch=3, sequence_length=17, dtype=dtype)
        policy = Policy.from_homes(facts, HOMES).parked(**parked)
        optimizer = HybridAdamW(lr=1e-2, min_8bit_size=256)
        with stream(model, policy, device="cpu", optimizer=optimizer, facts=facts, nvme_directory=tmp_path) as streamed:
            train(streamed, make_batch, 3)
            weights.append((states(streamed), streamed.state_dict()))
            assert len(parked_state_bytes(streamed._engine.units)) == (2 if parked else 0)
    assert_same(weights[1][0], weights[0][0])
    assert all(torch.equal(weights[1][1][name], tensor) for name, tensor in weights[0][1].items())


def test_an_optimizer_that_keeps_its_state_to_itself_is_refused(facts, make_model, dtype, tmp_path):
    class Own:
        lr = 0.1

        def unit(self, layout, weights, dtype, *, path=""):
            return self

        def load_master(self, weights, offset=0):
            pass

        streamed = torch.empty(0)

    policy = Policy.from_homes(facts, HOMES).parked(optimizer=[0])
    with pytest.raises(ProgramError, match="Own keeps its state to itself"):
        stream(
            make_model("qwen3").to(getattr(torch, dtype)), policy,
            device="cpu", optimizer=Own(), facts=facts, nvme_directory=tmp_path,
        )  # fmt: skip
