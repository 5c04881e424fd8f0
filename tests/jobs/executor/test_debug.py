"""Random programs on streams that dawdle give the bits of the synchronous run; a wait too few is found at once."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lazytrain.jobs.errors import InvariantBroken
from lazytrain.jobs.executor import Emulated, opening, steps, stream
from lazytrain.jobs.executor.devices import EmulatedDevice
from lazytrain.jobs.introspect import model_facts
from lazytrain.jobs.policy.lowering import lower

LAYERS, ROWS, LENGTH = 3, 1, 4


def tiny_model():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=LAYERS, num_attention_heads=1, vocab_size=8,
        max_position_embeddings=LENGTH,
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


@pytest.fixture(scope="module")
def facts():
    return model_facts(tiny_model(), micro_batch=ROWS, sequence_length=LENGTH, dtype="float32")


def batch(seed):
    ids = torch.randint(0, 8, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


class Dawdling(EmulatedDevice):
    """Streams on threads, each piece of work a random while late."""

    def __init__(self, seed):
        super().__init__(Emulated(memory_bytes=1 << 30))
        for name, link in self.streams.items():
            link.submit = self._late(link.submit, random.Random(f"{seed} {name}"))

    def _late(self, submit, choose):
        def late(name, work, after, nbytes=0):
            delay = choose.choice((0, 0, 0, 0, 0.0005))

            def worked():
                if delay:
                    time.sleep(delay)
                work()

            return submit(name, worked, after, nbytes)

        return late


def gradients(model, facts, policy, device, monkeypatch):
    monkeypatch.setattr(opening, "open_device", lambda which: which)
    with stream(model, policy, device=device, facts=facts, debug=True) as opened:
        for micro in range(policy.accumulation):
            opened.model(**batch(micro)).loss.backward()
        return opened.gradients()


@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(60, 200), marks=pytest.mark.slow)], ids=len)
def test_random_programs_on_dawdling_streams_equal_the_synchronous_run(
    seeds, facts, random_policy, gpudirect, monkeypatch
):
    plain = {}
    for accumulation in (1, 2):
        model = tiny_model()
        for micro in range(accumulation):
            model(**batch(micro), use_cache=False).loss.backward()
        plain[accumulation] = {name: p.grad for name, p in model.named_parameters()}
    model = tiny_model()  # which each stream gives back as it was
    for seed in seeds:
        policy = random_policy(facts, seed, accumulation=1 + seed % 2)
        policy = policy.model_copy(update={"direct_nvme": seed % 3 == 0})
        got = gradients(model, facts, policy, Dawdling(seed), monkeypatch)
        for name, wanted in plain[policy.accumulation].items():
            assert torch.equal(got[name], wanted), (seed, name)


@pytest.mark.parametrize("direct", [False, True])
def test_a_wait_too_few_ends_the_step_with_the_name_of_the_invariant(
    direct, facts, random_policy, gpudirect, monkeypatch
):
    policy = random_policy(facts, 4, accumulation=2).model_copy(update={"direct_nvme": direct})
    assert "nvme" in policy.homes
    program = lower(policy, facts)
    waits = [(i, name) for i, op in enumerate(program.ops) for name in op.after]
    broken = set()
    for position, name in random.Random(0).sample(waits, 12):
        op = program.ops[position]
        fewer = replace(op, after=tuple(other for other in op.after if other != name))
        mutant = replace(program, ops=(*program.ops[:position], fewer, *program.ops[position + 1 :]))
        monkeypatch.setattr(steps, "lower", lambda *args, program=mutant, **options: program)
        with pytest.raises(InvariantBroken) as caught:
            gradients(tiny_model(), facts, policy, Dawdling(0), monkeypatch)
        broken.add(caught.value.invariant)
        assert caught.value.op
    assert len(broken) > 1
