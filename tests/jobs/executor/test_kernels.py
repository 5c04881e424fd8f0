from __future__ import annotations

import sys
import types

import pytest
import torch

from lazytrain.jobs.errors import InputError, ProgramError
from lazytrain.jobs.executor import stream
from lazytrain.jobs.executor.kernels import apply_liger
from lazytrain.jobs.policy import LayerPolicy, Policy

HOMES = ["host", "recompute", "gpu", "host", "gpu", "gpu"]


def policy_of(facts, internals):
    policy = Policy.from_homes(facts, HOMES)
    kept = [internals if HOMES[i + 1] != "recompute" else "none" for i in range(5)]
    layers = tuple(LayerPolicy(index=i, internals=what) for i, what in enumerate(kept))
    return policy.model_copy(update={"layers": layers})


@pytest.fixture(autouse=True)
def compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo.utils.counters
    torch._dynamo.reset()


@pytest.mark.parametrize("internals", ["none", "all"])
def test_compiled_layers_give_the_same_gradients_and_share_their_graphs(
    internals, compiler, make_model, facts_of, make_batch
):
    """By the backend that only traces: the compiler proper changes the order of sums, and takes 20 s."""
    facts, seen = facts_of("qwen2"), []
    for compile in (False, "aot_eager"):
        policy = policy_of(facts, internals)
        with stream(make_model("qwen2"), policy, device="cpu", facts=facts, compile=compile) as streamed:
            for step in range(2):
                streamed.model(**make_batch(step)).loss.backward()
            seen.append(streamed.gradients())
        assert "forward" not in vars(streamed.model.model.layers[0])
    assert all(torch.equal(seen[1][name], gradient) for name, gradient in seen[0].items())
    assert 1 <= compiler["stats"]["unique_graphs"] <= 2  # without and with a graph for backward, for all five layers


def test_what_compilation_would_make_wrong_is_refused(make_model, facts_of):
    facts = facts_of("qwen2")
    with pytest.raises(ProgramError, match=r"layers \[1, 2, 3, 4\] keep their products"):
        stream(make_model("qwen2"), policy_of(facts, "matmuls"), device="cpu", facts=facts, compile=True)
    facts = facts_of("llama")
    with pytest.raises(ProgramError, match="attention_dropout"):
        stream(make_model("llama"), policy_of(facts, "none"), device="cpu", facts=facts, compile=True)


def test_liger_is_refused_where_it_cannot_run_is_missing_or_does_not_know_the_model(monkeypatch, make_model, facts_of):
    model, facts = make_model("qwen2"), facts_of("qwen2")
    with pytest.raises(InputError, match="not on cpu"):
        stream(model, policy_of(facts, "none"), device="cpu", facts=facts, liger=True)
    cuda = torch.device("cuda")
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(InputError, match="not installed") as caught:
        apply_liger(model, cuda)
    assert "pip install liger-kernel" in caught.value.hint
    calls = []
    patches = types.ModuleType("liger_kernel.transformers.monkey_patch")
    patches.MODEL_TYPE_TO_APPLY_LIGER_FN = {"qwen2": None}
    patches._apply_liger_kernel_to_instance = lambda **options: calls.append(options)
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, patches.__name__, patches)
    apply_liger(model, cuda)
    assert calls == [{"model": model, "cross_entropy": False, "fused_linear_cross_entropy": False}]
    with pytest.raises(InputError, match="no kernels for gpt2"):
        apply_liger(make_model("gpt2"), cuda)
