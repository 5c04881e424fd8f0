"""HybridAdamW as a drop-in torch optimizer on plain CPU parameters."""

import copy
import io
import math
from typing import Any

import pytest
import torch

from lazytrain.jobs.errors import CheckpointError, InputError
from lazytrain.jobs.layout import Layout
from lazytrain.jobs.optim import HybridAdamW, join

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def network(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.LayerNorm(128), torch.nn.Linear(128, 70)).to(dtype)


def learn(model: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int, clip: float = 0.0) -> float:
    loss = torch.tensor(math.nan)
    for step in range(first, last + 1):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(32, 64, generator=generator).to(next(model.parameters()).dtype)
        loss = (model(x) - x.roll(1, 1).repeat(1, 2)[:, :70]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return loss.item()


def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0, "lr": 3e-3},
    ]


def states(optimizer: HybridAdamW) -> dict[int, dict[str, Any]]:
    return copy.deepcopy(optimizer.state_dict()["state"])


def assert_same(a: dict[int, dict[str, Any]], b: dict[int, dict[str, Any]]) -> None:
    assert a.keys() == b.keys()
    for key in a:
        assert a[key].keys() == b[key].keys()
        for name, value in a[key].items():
            if name == "step":
                assert value == b[key][name]
            else:
                assert value.dtype == b[key][name].dtype
                assert torch.equal(value.view(torch.uint8), b[key][name].view(torch.uint8)), name


@pytest.mark.parametrize("clip", [0.0, 0.05])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_fp32_states_are_torchs_adamw_over_fifty_steps(clip: float, decay: float) -> None:
    ours, theirs = network(), network()
    learn(ours, HybridAdamW(ours.parameters(), lr=1e-2, weight_decay=decay, state_bits=32), 1, 50, clip)
    learn(theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=decay, foreach=False), 1, 50, clip)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=3e-7)


def test_parameter_groups_are_torchs() -> None:
    ours, theirs = network(), network()
    learn(ours, HybridAdamW(groups(ours), lr=1e-2, state_bits=32), 1, 50)
    learn(theirs, torch.optim.AdamW(groups(theirs), lr=1e-2, foreach=False), 1, 50)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=3e-7)


def test_own_clipping_equals_torchs_and_keeps_the_gradients() -> None:
    ours, theirs = network(), network()
    optimizer = HybridAdamW(ours.parameters(), lr=1e-2, state_bits=32, max_grad_norm=0.05)
    learn(ours, optimizer, 1, 20)
    learn(theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0, foreach=False), 1, 20, clip=0.05)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    assert optimizer.last_clip is not None
    norm = torch.stack([p.grad.norm() for p in ours.parameters()]).norm().item()
    assert optimizer.last_clip.norm == pytest.approx(norm, rel=1e-6)
    assert optimizer.last_clip.scale == pytest.approx(0.05 / (norm + 1e-6), rel=1e-6)


@DTYPES
def test_8bit_learns_like_fp32(dtype: torch.dtype) -> None:
    small, full = network(dtype), network(dtype)
    eight = learn(small, HybridAdamW(small.parameters(), lr=3e-3), 1, 200)
    exact = learn(full, HybridAdamW(full.parameters(), lr=3e-3, state_bits=32), 1, 200)
    assert exact < 0.3
    assert eight == pytest.approx(exact, rel=0.05)


@DTYPES
def test_state_formats_per_parameter(dtype: torch.dtype) -> None:
    model = network(dtype)
    optimizer = HybridAdamW(model.parameters(), lr=1e-3)
    learn(model, optimizer, 1, 1)
    low = {"master.low"} if dtype == torch.bfloat16 else set()
    eight = {"m.codes", "m.scales", "root_v.codes", "root_v.scales"}
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        quantised = name in ("0.weight", "2.weight")
        assert state.keys() == {"step", "format"} | low | (eight if quantised else {"m", "v"}), name
        if quantised:
            assert state["m.codes"].dtype == state["root_v.codes"].dtype == torch.uint8


@DTYPES
@pytest.mark.parametrize("state_bits", [8, 32])
@pytest.mark.parametrize("via_file", [False, True])
def test_state_dict_round_trip_is_exact(dtype: torch.dtype, state_bits: int, via_file: bool) -> None:
    model = network(dtype)
    optimizer = HybridAdamW(groups(model), lr=1e-2, betas=(0.8, 0.95), state_bits=state_bits)
    learn(model, optimizer, 1, 10)
    weights, saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    learn(model, optimizer, 11, 13)

    if via_file:
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
    other = network(dtype)
    other.load_state_dict(weights)
    resumed = HybridAdamW([{"params": g["params"]} for g in groups(other)], state_bits=state_bits)
    resumed.load_state_dict(saved)
    assert resumed.param_groups[0]["betas"] == (0.8, 0.95)
    assert_same(states(resumed), saved["state"])
    learn(other, resumed, 11, 13)
    assert_same(states(resumed), states(optimizer))
    for a, b in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)

    weights_only = network(dtype)
    weights_only.load_state_dict(weights)
    learn(weights_only, HybridAdamW(groups(weights_only), lr=1e-2, betas=(0.8, 0.95), state_bits=state_bits), 11, 13)
    assert any(not torch.equal(a, b) for a, b in zip(weights_only.parameters(), model.parameters(), strict=True))


def test_loading_does_not_share_tensors_with_the_saved_state() -> None:
    model = network()
    optimizer = HybridAdamW(model.parameters(), lr=1e-2)
    learn(model, optimizer, 1, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    untouched = copy.deepcopy(saved)
    optimizer.load_state_dict(saved)
    learn(model, optimizer, 3, 5)
    assert_same(saved["state"], untouched["state"])


@pytest.mark.parametrize("damage", ["truncated", "cast", "step"])
def test_a_state_of_another_format_is_refused(damage: str) -> None:
    model = network()
    optimizer = HybridAdamW(model.parameters(), lr=1e-2)
    learn(model, optimizer, 1, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    state = saved["state"][0]
    if damage == "truncated":
        state["m.codes"] = state["m.codes"][:-1]
    elif damage == "cast":
        state["m.codes"] = state["m.codes"].float()
    else:
        del state["step"]
    with pytest.raises(CheckpointError):
        HybridAdamW(model.parameters()).load_state_dict(saved)


def test_another_block_size_is_refused() -> None:
    model = network()
    optimizer = HybridAdamW(model.parameters(), block_size=128)
    learn(model, optimizer, 1, 1)
    with pytest.raises(CheckpointError, match="block size: 128 saved, 256 here"):
        HybridAdamW(model.parameters()).load_state_dict(optimizer.state_dict())


@DTYPES
def test_deepcopied_optimizer_continues_alike(dtype: torch.dtype) -> None:
    model = network(dtype)
    optimizer = HybridAdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)
    learn(model, optimizer, 1, 3)
    other, twin = copy.deepcopy((model, optimizer))
    learn(model, optimizer, 4, 6)
    learn(other, twin, 4, 6)
    assert_same(states(twin), states(optimizer))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_bf16_parameter_is_the_high_half_of_its_master() -> None:
    parameter = torch.nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    optimizer = HybridAdamW([parameter], lr=1e-3)
    for _ in range(100):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    master = join(parameter.detach().flatten(), optimizer.state[parameter]["master.low"])
    assert master.mean().item() == pytest.approx(0.9, abs=0.002)


def test_non_finite_gradient_changes_nothing() -> None:
    model = network()
    optimizer = HybridAdamW(model.parameters(), lr=1e-2)
    learn(model, optimizer, 1, 3)
    before, weights = states(optimizer), copy.deepcopy(model.state_dict())
    next(iter(model.parameters())).grad[0, 0] = math.nan
    optimizer.step()
    assert optimizer.last_clip is not None
    assert not optimizer.last_clip.finite
    assert_same(states(optimizer), before)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_frozen_empty_scalar_and_strided_parameters() -> None:
    frozen = torch.nn.Parameter(torch.ones(100, 100), requires_grad=False)
    empty = torch.nn.Parameter(torch.zeros(0, 5))
    scalar = torch.nn.Parameter(torch.tensor(2.0))
    strided = torch.nn.Parameter(torch.ones(80, 100).t())
    plain = torch.nn.Parameter(torch.ones(100, 80))
    optimizer = HybridAdamW([frozen, empty, scalar, strided, plain], lr=0.1)
    for step in range(1, 6):
        for parameter in (empty, scalar, strided, plain):
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))
        optimizer.step()
    assert frozen not in optimizer.state
    assert torch.equal(frozen, torch.ones(100, 100))
    assert scalar.item() != 2.0
    assert torch.equal(strided, plain)
    assert not torch.equal(plain, torch.ones(100, 80))


def test_replaced_parameter_storage_is_followed() -> None:
    parameter = torch.nn.Parameter(torch.ones(64, 64))
    optimizer = HybridAdamW([parameter], lr=0.1)
    for _ in range(2):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        parameter.data = parameter.data.clone()
    assert parameter.mean().item() == pytest.approx(0.8, abs=0.01)


def test_schedulers_and_lr_property() -> None:
    optimizer = HybridAdamW(lr=1.0)
    assert optimizer.lr == 1.0
    optimizer.lr = 0.5
    assert optimizer.param_groups[0]["lr"] == 0.5
    parameter = torch.nn.Parameter(torch.ones(3))
    driven = HybridAdamW([parameter], lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(driven, lambda step: 0.1**step)
    parameter.grad = torch.ones(3)
    driven.step()
    schedule.step()
    assert driven.lr == pytest.approx(0.1)


def test_closure_and_zero_grad() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = HybridAdamW([parameter], lr=0.1)

    def closure() -> float:
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 3.0
    assert parameter.mean().item() == pytest.approx(0.9)
    optimizer.zero_grad()
    assert parameter.grad is None


@pytest.mark.parametrize(
    "options",
    [
        {"lr": -1.0},
        {"betas": (0.9, 1.0)},
        {"eps": -1e-8},
        {"eps": 0.0},
        {"weight_decay": -0.1},
        {"max_grad_norm": 0.0},
        {"state_bits": 4},
        {"block_size": 0},
        {"master": "bf16"},
        {"lr": math.nan},
    ],
)
def test_wrong_options_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(options))):
        HybridAdamW(**options)


def test_half_precision_parameters_are_refused() -> None:
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
    parameter.grad = torch.ones(3, dtype=torch.float16)
    with pytest.raises(InputError, match="float16"):
        HybridAdamW([parameter]).step()


def test_a_group_may_keep_fp32_states() -> None:
    model = network()
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    optimizer = HybridAdamW([{"params": matrices[:1], "state_bits": 32}, {"params": matrices[1:]}], lr=1e-2)
    learn(model, optimizer, 1, 2)
    assert "m" in optimizer.state[matrices[0]]
    assert "m.codes" in optimizer.state[matrices[1]]
    resumed = HybridAdamW([{"params": matrices[:1]}, {"params": matrices[1:]}])
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_same(states(resumed), states(optimizer))


def test_named_tensors_keep_fp32_states_and_do_not_decay() -> None:
    layout = Layout.of({"weight": (64, 64), "other": (64, 64)})
    options: dict[str, Any] = {"fp32_states": ["*embed*.weight"], "no_decay": ["lm_head.*"], "weight_decay": 0.5}
    optimizer = HybridAdamW(lr=0.1, **options)
    for path, eight, decayed in (("model.embed_tokens", 4096, True), ("lm_head", 8192, False), ("", 8192, True)):
        unit = optimizer.unit(layout, torch.ones(layout.numel), torch.bfloat16, path=path)
        assert unit.state()["m.codes"].numel() == eight
        assert ("m" in unit.state()) == (eight == 4096)
        unit.update(torch.zeros(layout.numel), step=1, scale=1.0, lr=0.1)
        assert unit.master()[0].item() == pytest.approx(0.95 if decayed else 1.0)


def test_patterns_are_refused_where_parameters_have_no_names() -> None:
    with pytest.raises(InputError, match="go by parameter names"):
        HybridAdamW([torch.nn.Parameter(torch.ones(2))], fp32_states=["*"])
