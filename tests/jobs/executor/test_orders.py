"""The model may be run in any order: the numbers are those of plain PyTorch."""

from __future__ import annotations

import pytest
import torch

from lazytrain.jobs.errors import ProgramError
from lazytrain.jobs.executor import Emulated, stream
from lazytrain.jobs.optim import HybridAdamW

FAMILIES = ["gpt2", "qwen3"]  # with dropout, and tied


@pytest.fixture(params=[("cpu", 1), ("emulated", 2)], ids=["cpu", "emulated"])
def setting(request):
    """A device, and the seed of a random policy."""
    name, seed = request.param
    return Emulated(memory_bytes=1 << 30) if name == "emulated" else "cpu", seed


@pytest.fixture
def pair(setting, make_model, facts_of, random_policy):
    """A plain model and the same one streamed, with an optimizer, as two drivers of one interface."""
    opened = []

    def make(family="gpt2", accumulation=1, debug=True):
        facts, (device, seed) = facts_of(family), setting
        policy = random_policy(facts, seed, accumulation=accumulation)
        optimizer = HybridAdamW(lr=1e-3, state_bits=32, max_grad_norm=1.0)
        streamed = stream(make_model(family), policy, device=device, optimizer=optimizer, facts=facts, debug=debug)
        opened.append(streamed)
        return Plain(make_model(family)), Streaming(streamed)

    yield make
    for streamed in opened:
        streamed.close()


class Plain:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)

    def forward(self, batch):
        return self.model(**batch, use_cache=False).loss

    def gradients(self):
        return {name: p.grad.clone() for name, p in self.model.named_parameters()}

    def step(self):
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0).item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm


class Streaming:
    def __init__(self, streamed):
        self.streamed = streamed

    def forward(self, batch):
        return self.streamed.model(**batch).loss

    def gradients(self):
        return self.streamed.gradients()

    def step(self):
        return self.streamed.step().grad_norm


def run_both(pair, course):
    """Run a course on both, from the same random numbers, and compare all that it yields."""
    seen = []
    for driver in pair:
        torch.manual_seed(7)
        seen.append(list(course(driver)))
    for wanted, got in zip(*seen, strict=True):
        if isinstance(wanted, dict):
            assert wanted.keys() == got.keys()
            for name, gradient in wanted.items():
                error = (got[name] - gradient).norm() / gradient.norm().clamp_min(1e-9)
                assert error <= 1e-4, f"{name}: relative error {error:.2e}"
        else:
            assert got == pytest.approx(wanted, rel=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_two_forwards_before_one_backward(family, pair, make_batch):
    def course(driver):
        for step in range(4):  # from the third on, the order is foreseen
            a, b = driver.forward(make_batch(2 * step)), driver.forward(make_batch(2 * step + 1))
            loss = torch.nn.functional.softplus(a - 2 * b) + a * b
            loss.backward()
            yield loss.item()
            yield driver.gradients()
            yield driver.step()

    run_both(pair(family), course)


def test_the_backwards_of_two_forwards_in_either_order(pair, make_batch):
    def course(driver):
        for step in range(3):
            a, b, c = (driver.forward(make_batch(3 * step + i)) for i in range(3))
            b.backward()
            a.backward()
            (2 * c).backward()
            yield driver.gradients()
            yield driver.step()

    run_both(pair(), course)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_evaluation_between_forward_and_backward(family, pair, make_batch):
    def course(driver):
        for step in range(4):
            policy = driver.forward(make_batch(step))
            with torch.no_grad():
                reference = driver.forward(make_batch(step))
            loss = torch.nn.functional.softplus(policy - reference)
            loss.backward()
            with torch.no_grad():
                yield driver.forward(make_batch(9)).item()
            yield driver.gradients()
            yield driver.step()

    run_both(pair(family), course)


def test_fewer_and_more_micro_batches_than_the_policy_says(pair, make_batch):
    def course(driver):
        for step, count in enumerate((3, 1, 2, 5, 3, 3)):
            for micro in range(count):
                (driver.forward(make_batch(10 * step + micro)) / count).backward()
            yield driver.gradients()
            yield driver.step()

    run_both(pair(accumulation=3), course)


def test_a_forward_whose_backward_never_comes(pair, make_batch):
    def course(driver):
        for step in range(3):
            loss = driver.forward(make_batch(50))  # the user forgot no_grad
            yield loss.item()
            loss = driver.forward(make_batch(51))
            yield loss.item()
            first = driver.forward(make_batch(step))
            first.backward()
            yield driver.forward(make_batch(52)).item()
            driver.forward(make_batch(step + 1)).backward()
            yield driver.gradients()
            yield driver.step()

    run_both(pair(), course)


def test_many_forwards_without_a_backward_take_no_memory(pair, make_batch):
    _, driver = pair()
    host = []
    for i in range(8):
        loss = driver.forward(make_batch(i))
        host.append(driver.streamed.host_bytes()["activations"])
    assert host[3:] == host[3:4] * 5
    loss.backward()
    assert driver.streamed.step().step == 1


def test_a_forward_that_is_interrupted(pair, make_batch, monkeypatch):
    def course(driver):
        model = driver.model if isinstance(driver, Plain) else driver.streamed.model
        (driver.forward(make_batch(0)) / 2).backward()
        with pytest.raises(KeyboardInterrupt), interrupted(model):
            driver.forward(make_batch(1))
        torch.manual_seed(3)
        (driver.forward(make_batch(2)) / 2).backward()
        yield driver.gradients()
        yield driver.step()

    run_both(pair(accumulation=2), course)


class interrupted:  # noqa: N801
    """Raise KeyboardInterrupt in the model's own code, between two of its layers."""

    def __init__(self, model):
        self.model = model

    def __enter__(self):
        def interrupt(module, args):
            raise KeyboardInterrupt

        self.handle = self.model.transformer.h[3].register_forward_pre_hook(interrupt)

    def __exit__(self, *exception):
        self.handle.remove()


def test_a_backward_that_is_interrupted_drops_the_gradients_and_says_so(pair, make_batch):
    plain, driver = pair(debug=False)  # what the interrupt leaves alive is not in the promise
    model = driver.streamed.model

    def interrupt(grad):
        raise KeyboardInterrupt

    handle = model.transformer.h[2].register_forward_hook(lambda module, args, out: hook(out, interrupt))
    loss = driver.forward(make_batch(0))
    handle.remove()
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    del loss
    with pytest.raises(ProgramError, match="incomplete"):
        driver.forward(make_batch(0))
    for each in (plain, driver):
        torch.manual_seed(0)
        each.forward(make_batch(1)).backward()
    assert driver.step() == pytest.approx(plain.step(), rel=1e-5)


def hook(output, call):
    (output if isinstance(output, torch.Tensor) else output[0]).register_hook(call)


def test_a_backward_after_the_step_and_a_second_one_are_refused(pair, make_batch):
    _, driver = pair()
    kept = driver.forward(make_batch(0))
    driver.forward(make_batch(1)).backward(retain_graph=True)
    driver.step()
    with pytest.raises(ProgramError, match="whose step is over"):
        kept.backward()
    loss = driver.forward(make_batch(1))
    loss.backward(retain_graph=True)
    with pytest.raises(ProgramError, match="whose step is over, or whose backward has run"):
        loss.backward()


def test_a_step_that_is_not_taken_is_forgotten_by_zero_grad(pair, make_batch):
    def course(driver):
        driver.forward(make_batch(0)).backward()
        if isinstance(driver, Plain):
            driver.optimizer.zero_grad()
        else:
            driver.streamed.zero_grad()
        driver.forward(make_batch(1)).backward()
        yield driver.gradients()
        yield driver.step()

    run_both(pair(), course)
