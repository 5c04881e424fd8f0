"""Parameters of a streamed model that are read and written between their uses: as in plain PyTorch, or not at all."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from lazytrain.jobs.errors import ProgramError
from lazytrain.jobs.executor import Emulated, resident, stream
from lazytrain.jobs.introspect import model_facts
from lazytrain.jobs.optim import HybridAdamW
from lazytrain.jobs.policy import Policy

HOMES = ["host", "recompute", "gpu", "nvme", "host", "gpu"]
EMULATED = Emulated(memory_bytes=1 << 30)


@pytest.fixture
def open_stream(facts_of):
    def open_stream(model, family="llama", facts=None, **options):
        facts = facts or facts_of(family)
        optimizer = HybridAdamW(lr=1e-2, weight_decay=0.0, state_bits=32)
        policy = Policy.from_homes(facts, HOMES, weight_slots=3)
        options = {"device": EMULATED, "optimizer": optimizer, "debug": True, **options}
        return stream(model, policy, facts=facts, **options)

    return open_stream


@pytest.fixture
def model(make_model):
    return make_model("llama", dropout=False)


def weight_of(model):
    return model.model.layers[1].mlp.gate_proj.weight


# ---- reading


def test_what_is_read_is_what_the_plain_model_has(make_model, open_stream, model, make_batch):
    """Also right after a step, whose updates are still running."""
    plain = make_model("llama", dropout=False)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0)
    with open_stream(model) as streamed:
        for seed in range(2):
            plain(**make_batch(seed), use_cache=False).loss.backward()
            norm = nn.utils.clip_grad_norm_(plain.parameters(), float("inf"))
            optimizer.step(), optimizer.zero_grad()
            streamed.model(**make_batch(seed)).loss.backward()
            assert streamed.step().grad_norm == pytest.approx(norm.item(), rel=1e-5)
            for (name, got), (_, wanted) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
                assert torch.allclose(got, wanted, rtol=1e-4, atol=1e-5), name
                assert (got.shape, got.stride(), got.dtype, got.device) == (
                    wanted.shape, wanted.stride(), wanted.dtype, wanted.device,
                )  # fmt: skip
                assert isinstance(got, nn.Parameter) and got.requires_grad and got.is_leaf


READINGS = {
    "norm": lambda p: p.norm(),
    "data": lambda p: p.data.sum(1),
    "row": lambda p: p[3],
    "rows": lambda p: torch.stack([row.max() for row in p]),
    "view": lambda p: p.view(-1)[5:9].clone(),
    "transposed": lambda p: p.detach().T[2:4, ::3] * 1,
    "two views": lambda p: p[1] @ p[2] + p.mean(),
    "foreach": lambda p: torch.stack(torch._foreach_norm([p, p.data])),
    "numpy": lambda p: torch.from_numpy(p.detach().cpu().numpy().copy()),
    "list": lambda p: torch.tensor(p.tolist()),
    "item": lambda p: torch.tensor(p[0, 0].item()),
    "maximum": lambda p: torch.max(p, dim=1).values,
    "copied": lambda p: copy.deepcopy(p),
    "copied view": lambda p: copy.deepcopy(p.data),
    "pickled": lambda p: pickle.loads(pickle.dumps(p)),  # noqa: S301
    "cast": lambda p: p.to(torch.float64),
    "like": lambda p: torch.zeros_like(p),
    "into another": lambda p: torch.zeros(p.shape).copy_(p),
    "flat": lambda p: nn.utils.parameters_to_vector([p, p]),
    "sparse": lambda p: p.detach().to_sparse().to_dense(),
    "mapped": lambda p: torch.func.vmap(lambda x: p.detach()[3].sum() * x)(torch.ones(3)),
}


def test_readings_of_every_kind(open_stream, model):
    parameter = weight_of(model)
    with torch.no_grad():
        wanted = {name: read(parameter.detach().clone()) for name, read in READINGS.items()}
    with open_stream(model):
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                for name, read in READINGS.items():
                    got = read(parameter)
                    assert torch.equal(got, wanted[name]), name
                    assert got.shape == wanted[name].shape, name
        assert (parameter.numel(), parameter.ndim, len(parameter)) == (64 * 32, 2, 64)
        assert repr(parameter) == repr(nn.Parameter(wanted["copied view"]))
        buffer = io.BytesIO()
        torch.save(parameter, buffer)
        buffer.seek(0)
        assert type(torch.load(buffer)) is nn.Parameter
        assert parameter.to("cpu") is parameter.float() is parameter.contiguous() is parameter


def test_parts_of_a_model_give_their_state(open_stream, model):
    part = model.model.layers[2].self_attn
    wanted = {name: tensor.clone() for name, tensor in part.state_dict().items()}
    with open_stream(model):
        for state in (part.state_dict(), part.state_dict(keep_vars=True)):
            assert all(torch.equal(state[name], tensor) for name, tensor in wanted.items())
        part.load_state_dict({name: 2 * tensor for name, tensor in wanted.items()})
        assert all(torch.equal(part.state_dict()[name], 2 * tensor) for name, tensor in wanted.items())


# ---- writing


def scaled(p):
    p.mul_(0.5)


def noisy(p):
    p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(3)), alpha=0.01)


def merged(p):
    p.data += torch.ones_like(p)


def assigned(p):
    p.data = torch.full_like(p, 0.25)


def averaged(p):
    p.data.copy_(p.data.clone().lerp(torch.ones(p.shape), 0.1))


def one_row(p):
    p[3] = 0.0


def view_of_view(p):
    p.data.view(-1)[8:40:2].fill_(0.125)


def one_view_into_another(p):
    p.data[0].copy_(p.data[1])


def foreach(p):
    torch._foreach_mul_([p, p.data], 0.5)


def out(p):
    torch.mul(torch.ones(p.shape), 0.5, out=p.data)


def initialised(p):
    torch.manual_seed(5)
    nn.init.trunc_normal_(p, std=0.1)


def from_vector(p):
    nn.utils.vector_to_parameters(torch.linspace(-1, 1, p.numel()), [p])


WRITES = [
    scaled, noisy, merged, one_row, view_of_view, one_view_into_another, foreach, averaged, initialised, out,
    from_vector, assigned,
]  # fmt: skip


def test_what_is_written_takes_effect(make_model, open_stream, model, make_batch):
    plain = make_model("llama", dropout=False)
    with open_stream(model) as streamed:
        for write in WRITES:
            for target in (plain, model):
                with torch.inference_mode() if write is foreach else torch.no_grad():
                    write(weight_of(target))
            with torch.no_grad():
                assert torch.equal(weight_of(model), weight_of(plain)), write.__name__
                wanted, got = plain(**make_batch()).loss, streamed.model(**make_batch()).loss
            assert got.item() == pytest.approx(wanted.item(), rel=1e-6), write.__name__
    assert type(weight_of(model)) is nn.Parameter
    assert not hasattr(weight_of(model), "_home")


@pytest.mark.parametrize(
    "again", [lambda model: model.lm_head.reset_parameters(), lambda model: model.apply(model._init_weights)]
)
def test_initialising_again_needs_no_care_for_gradients(again, make_model, open_stream, model):
    plain = make_model("llama", dropout=False)
    with open_stream(model):
        for target in (plain, model):
            torch.manual_seed(7)
            again(target)
        for (name, got), (_, wanted) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
            assert torch.equal(got, wanted), name


@pytest.mark.parametrize("write", [scaled, averaged])
def test_what_is_written_within_a_step_takes_effect(write, make_model, open_stream, model, make_batch):
    """Although the next layers' weights were sent for already."""
    plain = make_model("llama", dropout=False)
    with open_stream(model) as streamed:
        streamed.accumulation = 2
        streamed.model(**make_batch(0)).loss.backward()
        with torch.no_grad():
            for layer, other in zip(model.model.layers, plain.model.layers, strict=True):
                write(layer.mlp.gate_proj.weight), write(other.mlp.gate_proj.weight)
            wanted = plain(**make_batch(1)).loss
        loss = streamed.model(**make_batch(1)).loss
        assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
        loss.backward()
        assert streamed.step().step == 1
        assert not torch.equal(weight_of(model), weight_of(plain))


def test_a_tied_weight_is_one(make_model, open_stream, make_batch):
    model, plain = (make_model("qwen3", dropout=False) for _ in range(2))
    with open_stream(model, "qwen3") as streamed, torch.no_grad():
        for target in (model, plain):
            target.lm_head.weight.mul_(2)
        assert torch.equal(model.model.embed_tokens.weight, plain.lm_head.weight)
        assert streamed.model(**make_batch()).loss.item() == pytest.approx(plain(**make_batch()).loss.item(), rel=1e-6)


def test_of_a_split_master_only_what_was_written_changes(make_model, make_batch, open_stream):
    """The master is finer than the bf16 weights that are seen; where nothing is written it keeps all its bits."""
    model = make_model("llama", dropout=False).to(torch.bfloat16)
    model.model.layers[2].mlp.up_proj.weight.requires_grad_(False)
    facts = model_facts(model, micro_batch=3, sequence_length=17, dtype="bfloat16")
    with open_stream(model, facts=facts) as streamed:
        streamed.model(**make_batch()).loss.backward()
        streamed.step()
        streamed.flush()
        for number, name in ((1, "gate_proj"), (2, "gate_proj"), (2, "up_proj")):  # the last one is frozen
            unit = next(u for u in streamed._engine.units if u.name == f"model.layers.{number}")
            wanted, segment = unit.weights.master().clone(), next(s for s in unit.layout.segments if name in s.name)
            with torch.no_grad():
                getattr(model.model.layers[number].mlp, name).weight[3] = 0.1
            wanted[segment.offset + 3 * 32 :][:32] = torch.tensor(0.1).bfloat16().float()
            assert torch.equal(unit.weights.master(), wanted)
        streamed.model(**make_batch(1)).loss.backward()
        assert streamed.step().step == 2


def test_a_write_that_plain_pytorch_refuses_changes_nothing(open_stream, model):
    with open_stream(model):
        before = weight_of(model).detach().clone()
        for write in (lambda p: p.mul_(2), lambda p: p[2].zero_(), lambda p: torch._foreach_zero_([p])):
            with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
                write(weight_of(model))
        assert torch.equal(weight_of(model), before)


# ---- what cannot be done

REFUSED = {
    "memory": (lambda p: p.data_ptr(), "give its memory away"),
    "storage": (lambda p: p.data.untyped_storage(), "give its memory away"),
    "hook": (lambda p: p.register_hook(lambda gradient: gradient), "hook on its gradient"),
    "accumulated": (lambda p: p.register_post_accumulate_grad_hook(lambda _: None), "hook on its gradient"),
    "gradient given": (lambda p: setattr(p, "grad", torch.zeros(p.shape)), "be given a gradient"),
    "other shape": (lambda p: setattr(p, "data", torch.zeros(3)), "another shape, dtype or device"),
    "other dtype": (lambda p: setattr(p, "data", p.data.double()), "another shape, dtype or device"),
    "other type": (lambda p: p.view(torch.int32), "be viewed as torch.int32"),
}


def test_what_is_refused(open_stream, model, make_batch):
    with open_stream(model) as streamed:
        before = streamed.state_dict()
        for do, words in REFUSED.values():
            with pytest.raises(ProgramError, match=f"^model.layers.1.mlp.gate_proj.weight is .*{words}") as caught:
                do(weight_of(model))
            assert caught.value.hint
        assert all(torch.equal(tensor, before[name]) for name, tensor in streamed.state_dict().items())
        streamed.model(**make_batch()).loss.backward()
        assert streamed.step().step == 1


def test_what_numpy_is_given_is_for_reading(open_stream, model):
    with open_stream(model), pytest.raises(ValueError, match="read-only"):
        weight_of(model).detach().numpy()[0, 0] = 1


def test_gradients_are_never_silently_missing(open_stream, model, make_batch):
    with open_stream(model) as streamed:
        weight = weight_of(model)
        assert weight.grad is None and nn.utils.clip_grad_norm_(model.parameters(), 1.0) == 0
        streamed.model(**make_batch()).loss.backward()
        for use in (
            lambda: weight.grad,
            lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
            lambda: torch.optim.SGD(model.parameters(), lr=1.0).step(),
            lambda: model.model.zero_grad(),
            lambda: setattr(weight, "grad", None),
        ):
            with pytest.raises(ProgramError, match=r"cannot have its gradient in \.grad") as caught:
                use()
            assert "streamed.gradients()" in caught.value.hint
        assert streamed.step().step == 1
        assert weight.grad is None
        loss = streamed.model(**make_batch()).loss
        with pytest.raises(ProgramError, match="asked for its gradient alone"):
            torch.autograd.grad(loss, [weight])


def test_a_penalty_on_the_weights_is_refused_where_its_gradient_would_be_lost(open_stream, model, make_batch):
    with open_stream(model) as streamed:
        penalty = sum(p.pow(2).sum() for p in model.parameters())
        assert penalty.item() > 0
        loss = streamed.model(**make_batch()).loss
        with pytest.raises(ProgramError, match="cannot have a gradient of what is computed of it"):
            (loss + 0.1 * penalty).backward()
        streamed.zero_grad()
        streamed.model(**make_batch()).loss.backward()
        assert streamed.step().step == 1


@pytest.mark.parametrize(
    "part", ["model.embed_tokens", "model.layers.1", "model.layers.1.mlp", "model.norm", "lm_head"]
)
def test_a_part_of_the_model_that_is_called_alone(part, make_model, open_stream, model, make_batch):
    """Between a forward and its backward, and between two steps."""
    plain, batch, results = make_model("llama", dropout=False), make_batch(), []
    given = batch["input_ids"] if part == "model.embed_tokens" else torch.randn(2, 5, 32)
    rotary = plain.model.rotary_emb(torch.zeros(1), torch.arange(5)[None])
    more = {"position_embeddings": rotary} if part == "model.layers.1" else {}

    def alone(target):
        with torch.no_grad():
            return target.get_submodule(part)(given, **more)

    with open_stream(model) as streamed:
        for target in (plain, streamed.model):
            loss = target(**batch, use_cache=False).loss
            during = alone(target)
            loss.backward()
            results.append([during, alone(target)])
        assert all(torch.allclose(*pair, atol=1e-6) for pair in zip(*results, strict=True))
        assert torch.allclose(streamed.gradients()["lm_head.weight"], plain.lm_head.weight.grad, atol=1e-6)
        assert streamed.step().step == 1


def test_a_part_that_is_called_alone_gives_the_gradient_of_its_input_where_it_is_frozen(open_stream, model):
    model.requires_grad_(False)
    states = torch.randn(2, 5, 32, requires_grad=True)
    (wanted,) = torch.autograd.grad(model.lm_head(states).pow(2).sum(), [states])
    facts = model_facts(model, micro_batch=3, sequence_length=17, dtype="float32")
    with open_stream(model, facts=facts):
        (got,) = torch.autograd.grad(model.lm_head(states).pow(2).sum(), [states])
    assert torch.allclose(got, wanted, atol=1e-6)


def test_hooks_that_are_there_before_are_refused(open_stream, model, make_batch):
    handle = weight_of(model).register_hook(lambda gradient: gradient * 0)
    with pytest.raises(ProgramError, match=r"layers\.1\.mlp\.gate_proj\.weight has a hook on its gradient"):
        open_stream(model)
    handle.remove()
    with open_stream(model) as streamed:
        streamed.model(**make_batch()).loss.backward()


# ---- memory that a parameter has for a while


def test_writes_into_weights_inside_a_forward_are_refused(open_stream, model, make_batch):
    norm = model.model.layers[1].input_layernorm

    def clamp(module, inputs):
        with torch.no_grad():
            module.weight.clamp_(max=0.5)

    with open_stream(model) as streamed:
        hook = norm.register_forward_pre_hook(clamp)
        for _ in range(2):
            with pytest.raises(ProgramError, match=r"input_layernorm\.weight of model\.layers\.1 was written in place"):
                streamed.model(**make_batch())
        hook.remove()
        streamed.model.load_state_dict(streamed.model.state_dict())
        streamed.model(**make_batch()).loss.backward()
        assert streamed.step().step == 1


def test_writes_into_what_state_dict_gave_are_refused(open_stream, model, make_batch):
    with open_stream(model) as streamed:
        streamed.model(**make_batch()).loss.backward()
        streamed.step()
        state = streamed.model.state_dict()
        before = {name: tensor.clone() for name, tensor in state.items()}
        state["model.layers.1.mlp.gate_proj.weight"].mul_(0.5)
        with pytest.raises(ProgramError, match="state_dict") as caught:
            streamed.model(**make_batch())
        assert "loaded again" in caught.value.hint
        streamed.model.load_state_dict(before)
        streamed.model(**make_batch()).loss.backward()
        assert streamed.step().step == 2


def test_writes_into_resident_weights_are_refused(open_stream, model, make_batch):
    with open_stream(model) as streamed:
        with torch.no_grad(), resident(streamed):
            weight_of(model).mul_(2)
        with pytest.raises(ProgramError, match="written in place"):
            streamed.model(**make_batch())


# ---- other parts than before


def tied_later(model):
    model.lm_head.weight = model.model.embed_tokens.weight


def other_parameter(model):
    model.model.norm.weight = nn.Parameter(torch.ones(32), requires_grad=False)


def other_module(model):
    model.set_output_embeddings(nn.Linear(32, 50, bias=False))


def fewer_layers(model):
    model.model.layers = model.model.layers[:2]


def pruned(model):
    prune.l1_unstructured(model.model.layers[0].mlp.up_proj, "weight", amount=0.5)


@pytest.mark.parametrize("change", [tied_later, other_parameter, other_module, fewer_layers, pruned])
@pytest.mark.parametrize("training", [True, False])
def test_a_model_of_other_parts_is_refused(change, training, open_stream, model, make_batch):
    with open_stream(model) as streamed, torch.set_grad_enabled(training):
        change(model)
        with pytest.raises(ProgramError, match=r"since stream\(\), .* was replaced or removed"):
            streamed.model(**make_batch())


def test_parameters_given_for_one_call_are_refused(open_stream, model, make_batch):
    with open_stream(model) as streamed:
        given = {name: tensor + 1 for name, tensor in streamed.state_dict().items()}
        with pytest.raises(ProgramError, match="was replaced"):
            torch.func.functional_call(model, given, kwargs=make_batch())
        assert streamed.model(**make_batch()).loss.isfinite()
