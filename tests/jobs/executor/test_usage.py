"""What people do to a model while it is streamed: it works as in plain PyTorch, or is refused in words."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from lazytrain.jobs.errors import LazytrainError, ProgramError
from lazytrain.jobs.executor import Emulated, stream
from lazytrain.jobs.introspect import model_facts
from lazytrain.jobs.optim import HybridAdamW
from lazytrain.jobs.policy import LayerPolicy, Policy

HOMES = ["host", "recompute", "gpu", "nvme", "host", "gpu"]


def open_stream(model, *, homes=HOMES, device=None, accumulation=1, slots=2, facts=None, debug=True, **options):
    facts = facts or model_facts(model, micro_batch=3, sequence_length=17, dtype="float32")
    policy = Policy.from_homes(facts, homes, accumulation=accumulation, weight_slots=slots)
    optimizer = options.pop("optimizer", None) or HybridAdamW(lr=1e-2, state_bits=32)
    device = device or Emulated(memory_bytes=1 << 30)
    return stream(model, policy, device=device, optimizer=optimizer, facts=facts, debug=debug, **options)


def plain_gradients(model, *batches):
    model.zero_grad()
    for batch in batches:
        model(**batch, use_cache=False).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


def assert_close(got, wanted):
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert (got[name] - gradient).norm() <= 1e-5 * gradient.norm().clamp_min(1e-6), name


# ---- layers that do more than compute


class Around(nn.Module):
    """A decoder layer, and something around it."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)


class Remembering(Around):
    """Adds a running mean of what it sees, which it updates in place, and replaces a count."""

    def __init__(self, layer):
        super().__init__(layer)
        self.register_buffer("mean", torch.zeros(32))
        self.register_buffer("count", torch.zeros(()), persistent=False)
        self.register_buffer("fixed", torch.ones(32))

    def forward(self, states, **kwargs):
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.5).add_(0.5 * states.mean((0, 1)))
            self.count = self.count + 1
        return self.layer(states, **kwargs) * self.fixed + self.count * self.mean


def test_buffers_that_forwards_change_are_changed_once_and_found_as_they_were(make_model, make_batch):
    model = make_model("qwen2")
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = Remembering(layer)
    plain = copy.deepcopy(model)
    with open_stream(model, accumulation=2) as streamed:
        for step in range(2):
            batches = [make_batch(2 * step), make_batch(2 * step + 1)]
            wanted = plain_gradients(plain, *batches)
            for batch in batches:
                streamed.model(**batch).loss.backward()
            assert_close(streamed.gradients(), wanted)
            streamed.zero_grad()
        for got, wanted in zip(model.buffers(), plain.buffers(), strict=True):
            assert torch.allclose(got, wanted, rtol=1e-6)
        assert model.model.layers[0].count == 4


def test_a_step_that_is_given_up_leaves_no_trace_in_buffers(make_model, make_batch):
    model = make_model("qwen2")
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = Remembering(layer)
    with open_stream(model, accumulation=3) as streamed:
        for seed in range(3):
            streamed.model(**make_batch(seed)).loss.backward()
        streamed.step()
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        assert before["model.layers.0.count"] == 3
        for seed in range(2):
            streamed.model(**make_batch(seed)).loss.backward()
        assert not torch.equal(model.model.layers[0].mean, before["model.layers.0.mean"])
        streamed.abandon()
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, before[name]), name


def test_a_buffer_that_is_changed_later_than_in_the_first_run_is_kept_from_then_on(make_model, make_batch):
    class Late(Remembering):
        def forward(self, states, **kwargs):
            self.train(self.late)
            return super().forward(states, **kwargs)

    model = make_model("qwen2")
    model.model.layers[1] = Late(model.model.layers[1])
    Late.late = False
    with open_stream(model, debug=False) as streamed:
        streamed.model(**make_batch()).loss.backward()
        streamed.step()
        Late.late = True
        with pytest.raises(ProgramError, match="buffer mean") as caught:
            streamed.model(**make_batch(1))
        assert "again" in caught.value.hint
        plain = make_model("qwen2")
        plain.model.layers[1] = Late(plain.model.layers[1])
        plain.load_state_dict(streamed.model.state_dict())
        plain.model.layers[1].count = model.model.layers[1].count.clone()
        wanted = plain_gradients(plain, make_batch(2))
        streamed.model(**make_batch(2)).loss.backward()
        assert_close(streamed.gradients(), wanted)


class Returning(Around):
    def forward(self, states, **kwargs):
        output = self.layer(states, **kwargs)
        return output, (None, {"a number": output.mean()})


@pytest.mark.parametrize("internals", ["none", "matmuls", "all"])
def test_layers_may_return_nothing_numbers_and_nests(internals, make_model, make_batch):
    model = make_model("llama", dropout=False)
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = Returning(layer)
        model.model.layers[i].register_forward_hook(lambda module, args, output: output[0])
    plain, facts = copy.deepcopy(model), model_facts(model, micro_batch=3, sequence_length=17, dtype="float32")
    homes = ["host", "gpu", "gpu", "nvme", "host", "gpu"]
    layers = tuple(LayerPolicy(index=i, internals=internals, internals_home="host") for i in range(5))
    policy = Policy.from_homes(facts, homes).model_copy(update={"layers": layers})
    with stream(model, policy, device=Emulated(memory_bytes=1 << 30), facts=facts, debug=True) as streamed:
        streamed.model(**make_batch()).loss.backward()
        assert_close(streamed.gradients(), plain_gradients(plain, make_batch()))


# ---- other ways to call it


def test_an_evaluation_in_inference_mode_at_any_moment(make_model, make_batch):
    plain = make_model("llama", dropout=False)
    with open_stream(make_model("llama", dropout=False)) as streamed:
        for step in range(2):
            with torch.inference_mode():
                batch = {name: tensor.clone() for name, tensor in make_batch(5).items()}  # made in this mode
                del batch["labels"]
                assert torch.allclose(streamed.model(**batch).logits, plain(**batch).logits, atol=1e-5)
                ids = batch["input_ids"][:, :4]
                got, text = (m.generate(ids, max_new_tokens=3, do_sample=False) for m in (streamed.model, plain))
                assert torch.equal(got, text)
            streamed.model(**make_batch(step)).loss.backward()
            assert_close(streamed.gradients(), plain_gradients(plain, make_batch(step)))
            with torch.inference_mode():
                assert torch.allclose(streamed.model(**make_batch(5)).loss, plain(**make_batch(5)).loss)
            streamed.zero_grad()


def test_the_head_may_be_read_in_inference_mode(make_model, make_batch):
    plain, ids = make_model("llama", dropout=False), make_batch()["input_ids"]
    with open_stream(make_model("llama", dropout=False)) as streamed:
        logits = []
        for model in (plain, streamed.model):
            with torch.inference_mode():
                states = model.model(ids).last_hidden_state
                logits.append(states @ model.get_output_embeddings().weight.T)
        assert torch.allclose(*logits, atol=1e-5)
        streamed.model(**make_batch()).loss.backward()
        assert streamed.step().step == 1


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])  # qwen3's embedding is its head too
def test_embeddings_that_the_user_gives_get_their_gradient(family, make_model, make_batch):
    plain, batch = make_model(family, dropout=False), make_batch()
    ids = batch.pop("input_ids")
    given = plain.get_input_embeddings()(ids).detach()
    results = []
    for model in (plain, make_model(family, dropout=False)):
        embeds = given.clone().requires_grad_()
        if model is plain:
            model(inputs_embeds=embeds, **batch, use_cache=False).loss.backward()
            gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
        else:
            with open_stream(model, debug=False) as streamed:  # embeddings of the user's are beyond what was promised
                with torch.no_grad():
                    logits = streamed.model(inputs_embeds=given).logits
                    assert torch.allclose(logits, plain(inputs_embeds=given).logits, atol=1e-5)
                streamed.model(inputs_embeds=embeds, **batch).loss.backward()
                gradients = streamed.gradients()
                streamed.step()
                streamed.model(**make_batch(1)).loss.backward()
                assert streamed.step().step == 2
        results.append((embeds.grad, gradients))
    assert torch.allclose(results[0][0], results[1][0], atol=1e-6)
    assert_close(results[1][1], results[0][1])


def test_second_derivatives_are_refused_and_not_zero(make_model, make_batch):
    with open_stream(make_model("llama", dropout=False)) as streamed:
        embeds = torch.randn(3, 17, 32, requires_grad=True)
        batch = make_batch()
        del batch["input_ids"]
        loss = streamed.model(inputs_embeds=embeds, **batch).loss
        (gradient,) = torch.autograd.grad(loss, [embeds], create_graph=True)
        with pytest.raises(RuntimeError, match="does not require grad"):
            gradient.pow(2).sum().backward()
        streamed.zero_grad()
        streamed.model(**make_batch()).loss.backward()
        assert streamed.step().step == 1


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.05])
def test_a_keyboard_interrupt_ends_the_step_and_nothing_else(delay_s, make_model, facts_of, make_batch):
    slow = Emulated(memory_bytes=1 << 30, h2d_bytes_s=2e6, d2h_bytes_s=2e6)  # a step takes 0.2 s at least
    plain = make_model("llama", dropout=False)
    with open_stream(make_model("llama", dropout=False), device=slow, facts=facts_of("llama")) as streamed:
        timer = threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            streamed.model(**make_batch()).loss.backward()
            streamed.gradients()
            timer.join()
        timer.join()
        streamed.zero_grad()
        streamed.model(**make_batch(1)).loss.backward()
        assert_close(streamed.gradients(), plain_gradients(plain, make_batch(1)))
        assert streamed.step().step == 1


# ---- frozen parameters


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_frozen_embedding(family, make_model, make_batch):
    model = make_model(family, dropout=False)
    model.get_input_embeddings().weight.requires_grad_(False)
    plain = copy.deepcopy(model)
    with open_stream(model) as streamed:
        for step in range(2):
            streamed.model(**make_batch(step)).loss.backward()
            if not step:
                assert_close(streamed.gradients(), plain_gradients(plain, make_batch(step)))
            streamed.step()
        kept = streamed.state_dict()["model.embed_tokens.weight"]
        assert torch.equal(kept, plain.get_input_embeddings().weight)


def test_a_step_of_a_model_that_is_frozen_is_refused(make_model, make_batch):
    with open_stream(make_model("llama").requires_grad_(False)) as streamed:
        streamed.model(**make_batch()).loss.backward()
        with pytest.raises(ProgramError, match="every parameter of the model is frozen"):
            streamed.step()


# ---- weights that others write


def test_weights_that_are_loaded_within_a_step_are_those_of_the_next_forward(make_model, make_batch):
    """Although the next layers' weights were sent for already."""
    plain, other = make_model("llama", dropout=False), make_model("llama", seed=1, dropout=False)
    with open_stream(make_model("llama", dropout=False), accumulation=2, slots=3) as streamed:
        streamed.model(**make_batch(0)).loss.backward()
        wanted = plain_gradients(plain, make_batch(0))
        streamed.model.load_state_dict(other.state_dict())
        loss = streamed.model(**make_batch(1)).loss
        assert loss.item() == pytest.approx(other(**make_batch(1)).loss.item(), rel=1e-6)
        loss.backward()
        second = plain_gradients(other, make_batch(1))
        assert_close(streamed.gradients(), {name: gradient + second[name] for name, gradient in wanted.items()})
        assert streamed.step().step == 1


def test_a_forward_before_weights_were_loaded_has_no_backward(make_model, make_batch):
    other = make_model("llama", seed=1, dropout=False)
    with open_stream(make_model("llama", dropout=False)) as streamed:
        loss = streamed.model(**make_batch()).loss
        streamed.model.load_state_dict(other.state_dict())
        with pytest.raises(ProgramError, match="whose step is over"):
            loss.backward()
        streamed.model(**make_batch()).loss.backward()
        assert_close(streamed.gradients(), plain_gradients(other, make_batch()))


# ---- what cannot be done


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.to(torch.bfloat16), lambda model: model.half(), lambda model: model.double(),
        lambda model: model.to("meta"), lambda model: model.to_empty(device="cpu"), lambda model: model.model.half(),
        lambda model: model.model.layers[1].half(),
    ],
    ids=["bfloat16", "half", "double", "meta", "to_empty", "base", "layer"],
)  # fmt: skip
def test_changes_of_dtype_and_device_are_refused_before_they_change_anything(change, make_model, facts_of, make_batch):
    plain = make_model("llama", dropout=False)
    with open_stream(make_model("llama", dropout=False), facts=facts_of("llama")) as streamed:
        with pytest.raises(ProgramError, match="stays in its dtype"):
            change(streamed.model)
        assert streamed.model.to("cpu").float() is streamed.model
        streamed.model(**make_batch()).loss.backward()
        assert_close(streamed.gradients(), plain_gradients(plain, make_batch()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_a_model_of_another_dtype_is_refused_and_left_as_it_is(dtype, make_model, facts_of):
    model = make_model("qwen2")
    model.model.norm.to(dtype)
    with pytest.raises(ProgramError, match=rf"^model\.norm\.weight is {dtype}: weights stream in float32 or bfloat16"):
        open_stream(model, facts=facts_of("qwen2"))
    assert model.model.norm.weight.shape == (32,)


def test_it_is_said_which_weights_are_converted(make_model, facts_of, make_batch, caplog):
    model = make_model("qwen2")
    model.model.norm.to(torch.bfloat16)
    with open_stream(model, facts=facts_of("qwen2")) as streamed:
        assert "1 parameters (model.norm.weight, ...) stream and compute in float32" in caplog.text
        streamed.model(**make_batch()).loss.backward()
        assert streamed.step().step == 1


@pytest.mark.parametrize(
    "take",
    [copy.deepcopy, pickle.dumps, lambda model: torch.save(model, io.BytesIO()), lambda m: copy.deepcopy(m.model)],
    ids=["deepcopy", "pickle", "save", "base"],
)
def test_a_streamed_model_is_not_copied_and_can_be_afterwards(take, make_model, facts_of):
    model = make_model("qwen2")
    with open_stream(model, facts=facts_of("qwen2")), pytest.raises(ProgramError, match="cannot be copied"):
        take(model)
    take(model)


def test_a_model_is_streamed_once_at_a_time(make_model, facts_of, make_batch):
    facts, model = facts_of("qwen2"), make_model("qwen2")
    with open_stream(model, facts=facts) as streamed:
        with pytest.raises(ProgramError, match="streamed already"):
            open_stream(model, facts=facts)
        streamed.model(**make_batch()).loss.backward()
        streamed.step()
    with open_stream(model, facts=facts) as streamed:
        streamed.model(**make_batch()).loss.backward()
        streamed.step()


@pytest.mark.parametrize("what", [{"lr": -1.0}, {"lr": float("nan")}, {"lr": float("inf")}, {"scale": float("nan")}])
def test_a_step_that_would_ruin_the_weights_is_refused(what, make_model, facts_of, make_batch):
    with open_stream(make_model("qwen2"), facts=facts_of("qwen2")) as streamed:
        streamed.model(**make_batch()).loss.backward()
        with pytest.raises(ProgramError, match="would ruin the weights"):
            streamed.step(**what)
        result = streamed.step(lr=0.0)
        assert (result.step, result.skipped) == (1, False)


def test_parameters_are_counted_as_they_are(make_model, facts_of):
    model = make_model("qwen3")
    counts = [model.num_parameters(), model.num_parameters(only_trainable=True, exclude_embeddings=True)]
    with open_stream(model, facts=facts_of("qwen3")):
        assert [model.num_parameters(), model.num_parameters(only_trainable=True, exclude_embeddings=True)] == counts
        assert sum(p.numel() for p in model.parameters()) == counts[0]


# ---- the end


def test_after_close_everything_is_refused_in_words(make_model, facts_of, make_batch):
    streamed = open_stream(make_model("qwen2"), facts=facts_of("qwen2"))
    streamed.close()
    streamed.close()
    calls = [streamed.step, streamed.gradients, streamed.take_device, streamed.release_device, streamed.flush]
    for call in (
        *calls,
        streamed.trainer_optimizer,
        lambda: streamed.switch(None),
        lambda: list(streamed.unit_states()),
    ):
        with pytest.raises(LazytrainError, match="closed"):
            call()


def test_nothing_is_left_of_a_stream_that_was_closed_dropped_or_never_opened(make_model, facts_of, make_batch):
    def files():
        return len(list(Path("/proc/self/fd").iterdir()))

    gc.collect()  # what other tests have dropped
    facts, before, others = facts_of("qwen2"), files(), set(threading.enumerate())
    for ending in ("close", "drop", "refuse"):
        if ending == "refuse":
            with pytest.raises(LazytrainError):
                open_stream(make_model("qwen2"), facts=facts, device=Emulated(memory_bytes=1000))
        else:
            streamed = open_stream(make_model("qwen2"), facts=facts)
            streamed.model(**make_batch()).loss.backward()
            streamed.step()
            if ending == "close":
                streamed.close()
            del streamed
        _wait_for_the_end_of(lambda: set(threading.enumerate()) - others)
        assert [thread.name for thread in set(threading.enumerate()) - others] == [], ending
        assert files() == before, ending


def _wait_for_the_end_of(threads, most_s=60.0):
    """Collects until no thread is left: updates that were under way hold a dropped stream until they have ended."""
    deadline = time.monotonic() + most_s
    gc.collect()
    while (left := threads()) and time.monotonic() < deadline:
        left.pop().join(0.05)
        gc.collect()
