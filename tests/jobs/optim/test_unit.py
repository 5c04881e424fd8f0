"""One unit's master and states: exact, in place, bit for bit through save and load, near exact AdamW in 8 bits."""

from collections.abc import Callable

import pytest
import torch

from lazytrain.jobs.errors import CheckpointError
from lazytrain.jobs.layout import Layout
from lazytrain.jobs.optim import HybridAdamW, UnitOptimizer, join
from lazytrain.jobs.optim import blocks as optim_blocks

LAYOUT = Layout.of({"w.weight": (70, 90), "w.bias": (70,), "v.weight": (33, 11), "norm.weight": (50,)})
SEGMENTS = LAYOUT.segments
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
BITS = pytest.mark.parametrize("state_bits", [8, 32])


def flat(seed: int, layout: Layout = LAYOUT) -> torch.Tensor:
    """Random values in the segments, zeros in the padding."""
    values = torch.zeros(layout.numel)
    generator = torch.Generator().manual_seed(seed)
    for segment in layout.segments:
        values[segment.offset : segment.offset + segment.numel] = torch.randn(segment.numel, generator=generator)
    return values


def trained(optimizer: HybridAdamW, dtype: torch.dtype, first: int = 1, last: int = 10) -> UnitOptimizer:
    unit = optimizer.unit(LAYOUT, flat(0), dtype)
    train(unit, dtype, first, last)
    return unit


def train(unit: UnitOptimizer, dtype: torch.dtype, first: int, last: int) -> None:
    for step in range(first, last + 1):
        unit.update(flat(step).to(dtype), step=step, scale=0.5, lr=1e-2)


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype and torch.equal(a[k].view(torch.uint8), b[k].view(torch.uint8)) for k in a
    )


def snapshot(unit: UnitOptimizer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in unit.state().items()}


@DTYPES
def test_master_is_exact_and_streamed_is_its_high_half(dtype: torch.dtype) -> None:
    weights = flat(0)
    unit = HybridAdamW().unit(LAYOUT, weights, dtype)
    assert torch.equal(unit.master(), weights)
    assert unit.streamed.dtype == dtype
    assert torch.equal(unit.streamed, weights.to(dtype))


def test_split_and_plain_master_are_the_same_weights_after_training() -> None:
    split_unit = HybridAdamW(weight_decay=0.1).unit(LAYOUT, flat(0), torch.bfloat16)
    plain = HybridAdamW(weight_decay=0.1).unit(LAYOUT, flat(0), torch.float32)
    for step in range(1, 11):
        gradient = flat(step).to(torch.bfloat16)
        for unit in (split_unit, plain):
            unit.update(gradient, step=step, scale=0.5, lr=1e-2)
    assert torch.equal(split_unit.master(), plain.master())
    assert not torch.equal(plain.master(), flat(0))


@DTYPES
@BITS
def test_update_works_in_place_and_leaves_padding_and_gradient_alone(dtype: torch.dtype, state_bits: int) -> None:
    unit = HybridAdamW(state_bits=state_bits).unit(LAYOUT, flat(0), dtype)
    where = {name: tensor.data_ptr() for name, tensor in unit.state().items() if name != "format"}
    before, gradient = unit.streamed, flat(1).to(dtype)
    copy = gradient.clone()
    unit.update(gradient, step=1, scale=0.5, lr=1e-2)
    assert unit.streamed is before
    assert {name: tensor.data_ptr() for name, tensor in unit.state().items() if name != "format"} == where
    assert torch.equal(gradient, copy)
    covered = torch.zeros(LAYOUT.numel, dtype=torch.bool)
    for segment in LAYOUT.segments:
        covered[segment.offset : segment.offset + segment.numel] = True
    assert not unit.master()[~covered].any()
    assert (unit.master() != flat(0))[covered].float().mean() > 0.99


@DTYPES
def test_fp32_states_are_torchs_adamw(dtype: torch.dtype) -> None:
    """The same to rounding, and much nearer to AdamW in fp64 than torch's own fp32 AdamW is."""
    unit = HybridAdamW(state_bits=32, weight_decay=0.1).unit(LAYOUT, flat(0), dtype)
    theirs, exact = (
        {s.name: torch.nn.Parameter(flat(0)[s.offset : s.offset + s.numel].reshape(s.shape).to(kind)) for s in SEGMENTS}
        for kind in (torch.float32, torch.float64)
    )
    references = [
        torch.optim.AdamW(
            [{"params": [p], "weight_decay": 0.1 if p.ndim >= 2 else 0.0} for p in each.values()],
            lr=1e-2,
            foreach=False,
        )
        for each in (theirs, exact)
    ]
    for step in range(1, 51):
        gradient = flat(step).to(dtype)
        unit.update(gradient, step=step, scale=0.5, lr=1e-2)
        for each, reference in zip((theirs, exact), references, strict=True):
            for s in SEGMENTS:
                each[s.name].grad = (
                    gradient[s.offset : s.offset + s.numel].reshape(s.shape).to(each[s.name].dtype) * 0.5
                )
            reference.step()
    for s in SEGMENTS:
        right = exact[s.name].detach()
        got = unit.master()[s.offset : s.offset + s.numel].reshape(s.shape)
        torch.testing.assert_close(got, theirs[s.name].detach(), rtol=3e-6, atol=1e-7)
        assert (got - right).norm() < (0.5 if len(s.shape) >= 2 else 1.1) * (theirs[s.name] - right).norm()


def test_8bit_update_stays_near_exact_adamw_on_a_gradient_stream() -> None:
    """Against fp64 AdamW, 200 steps: mean relative error of the update under 12 % and no drift of its size."""
    layout = Layout.of({"w": (64, 256)})
    scale = torch.exp(torch.randn(layout.numel, generator=torch.Generator().manual_seed(99)))
    unit = HybridAdamW(betas=(0.9, 0.999)).unit(layout, torch.zeros(layout.numel), torch.float32)
    m = torch.zeros(layout.numel, dtype=torch.float64)
    v = m.clone()
    for step in range(1, 201):
        gradient = flat(step, layout) * scale
        before = unit.master().clone()
        unit.update(gradient, step=step, scale=1.0, lr=1.0)
        m = 0.9 * m + 0.1 * gradient.double()
        v = 0.999 * v + 0.001 * gradient.double() ** 2
        exact = -(m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
        got = (unit.master() - before).double()
        assert (got - exact).norm() / exact.norm() < 0.12, step
    assert got.norm() / exact.norm() == pytest.approx(1, abs=0.02)


def test_v_follows_gradients_that_change() -> None:
    """Nearest rounding freezes v: it would be wrong by a factor of ten here; dithered codes follow."""
    layout = Layout.of({"w": (16, 256)})
    unit = HybridAdamW(betas=(0.9, 0.99)).unit(layout, torch.zeros(layout.numel), torch.float32)
    loud = torch.arange(layout.numel) % 2 == 0
    for step in range(1, 601):
        sizes = torch.where(loud if step <= 100 else ~loud, 1.0, 0.1)
        unit.update(flat(step, layout).sign() * sizes, step=step, scale=1.0, lr=1e-3)
    from lazytrain.jobs.optim import ROOT_VARIANCE

    state = unit.state()
    root = ROOT_VARIANCE.decode(state["root_v.codes"].view(16, 256), state["root_v.scales"]).flatten()
    torch.testing.assert_close(root[~loud].mean(), torch.tensor(1.0), rtol=0.05, atol=0)
    torch.testing.assert_close(root[loud].mean(), torch.tensor(0.1), rtol=0.3, atol=0)


@DTYPES
def test_tiny_learning_rates_are_not_lost(dtype: torch.dtype) -> None:
    """A bf16 weight of 1.0 ignores steps of 1e-3; its master does not."""
    layout = Layout.of({"w": (64, 64)})
    unit = HybridAdamW().unit(layout, torch.ones(layout.numel), dtype)
    naive = torch.ones(layout.numel, dtype=torch.bfloat16)
    for step in range(1, 101):
        unit.update(torch.ones(layout.numel, dtype=dtype), step=step, scale=1.0, lr=1e-3)
        naive -= 1e-3
    assert unit.master().mean().item() == pytest.approx(0.9, abs=0.002)
    assert naive.mean().item() == 1.0


def test_bytes_per_parameter() -> None:
    layout = Layout.of({"w": (1000, 1000)})
    unit = HybridAdamW().unit(layout, torch.zeros(layout.numel), torch.bfloat16)
    assert unit.bytes / layout.numel <= 6.04  # with the bf16 gradient 8.04
    states = sum(t.nbytes for name, t in unit.state().items() if name.startswith(("m.", "root_v.")))
    assert states <= 2.1e6
    assert sum(t.nbytes for name, t in unit.state().items() if name != "format") == unit.bytes


@DTYPES
@BITS
@pytest.mark.parametrize("steps", [1, 7])
def test_resume_is_exact_and_needs_the_states(dtype: torch.dtype, state_bits: int, steps: int) -> None:
    options = {"state_bits": state_bits, "weight_decay": 0.1, "betas": (0.8, 0.95)}
    whole = trained(HybridAdamW(**options), dtype, last=steps)
    saved = snapshot(whole)
    train(whole, dtype, steps + 1, steps + 3)

    resumed = HybridAdamW(**options).unit(LAYOUT, flat(77), dtype)
    streamed = resumed.streamed
    resumed.load_state(saved)
    assert resumed.streamed is streamed
    assert same_bits(snapshot(resumed), saved)
    train(resumed, dtype, steps + 1, steps + 3)
    assert same_bits(resumed.state(), whole.state())

    weights_only = HybridAdamW(**options).unit(LAYOUT, flat(77), dtype)
    fresh = weights_only.state()
    weights_only.load_state({n: saved[n] if n.startswith("master") else fresh[n].clone() for n in saved})
    train(weights_only, dtype, steps + 1, steps + 3)
    assert not torch.equal(weights_only.master(), whole.master())


Change = Callable[[dict[str, torch.Tensor]], object]
DAMAGE: dict[str, Change] = {
    "expected torch.uint8": lambda s: s.update({"m.codes": s["m.codes"].float()}),
    "expected torch.float32": lambda s: s.update({"root_v.scales": s["root_v.scales"][:-1]}),
    "holds": lambda s: s.pop("m.scales"),
    "'extra'": lambda s: s.update(extra=torch.zeros(1)),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_damaged_states_are_refused_and_change_nothing(message: str) -> None:
    unit = trained(HybridAdamW(), torch.bfloat16)
    before, other = snapshot(unit), snapshot(trained(HybridAdamW(), torch.bfloat16, last=3))
    DAMAGE[message](other)
    with pytest.raises(CheckpointError, match=message):
        unit.load_state(other)
    assert same_bits(unit.state(), before)


@pytest.mark.parametrize(
    ("options", "layout", "message"),
    [
        ({"block_size": 128}, LAYOUT, "block size: 128 saved, 256 here"),
        ({"min_8bit_size": 100}, LAYOUT, "choice of 8-bit"),
        ({}, Layout.of({"w.weight": (90, 70), "w.bias": (70,), "v.weight": (33, 11), "norm.weight": (50,)}), "layout"),
        ({}, Layout.of({"w.weight": (70, 90)}), "number of elements"),
    ],
)
def test_states_of_another_format_are_refused(options: dict[str, int], layout: Layout, message: str) -> None:
    saved = HybridAdamW(**options).unit(layout, torch.zeros(layout.numel), torch.bfloat16).state()
    with pytest.raises(CheckpointError, match=message):
        HybridAdamW().unit(LAYOUT, flat(0), torch.bfloat16).load_state(saved)


def test_halves_in_the_state_are_the_master() -> None:
    unit = trained(HybridAdamW(), torch.bfloat16)
    state = unit.state()
    assert state["master.high"].data_ptr() == unit.streamed.data_ptr()
    assert torch.equal(join(state["master.high"], state["master.low"]), unit.master())


@DTYPES
def test_results_do_not_depend_on_the_chunk_size(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    whole = snapshot(trained(HybridAdamW(), dtype))
    monkeypatch.setattr(optim_blocks.chunks, "__defaults__", (1024,))
    assert same_bits(snapshot(trained(HybridAdamW(), dtype)), whole)


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e-3, 1e4, 1e15, 1e30])
@pytest.mark.parametrize("zeros", ["blocks", "after", "none"])
def test_no_gradient_size_or_zeros_break_the_states(size: float, zeros: str) -> None:
    layout = Layout.of({"w": (40, 200)})
    unit = HybridAdamW().unit(layout, torch.ones(layout.numel), torch.bfloat16)
    for step in range(1, 30):
        gradient = flat(step, layout) * size
        if zeros == "blocks":
            gradient[: layout.numel // 2] = 0
        elif zeros == "after" and step > 3:
            gradient.zero_()
        unit.update(gradient.to(torch.bfloat16), step=step, scale=1.0, lr=1e-3)
        assert unit.master().isfinite().all()
        assert (unit.master() - 1).abs().max() <= 1e-3 * step * 4
    assert all(t.isfinite().all() for t in unit.state().values())
    if zeros == "blocks":
        assert torch.equal(unit.master()[: layout.numel // 2], torch.ones(layout.numel // 2))


def test_sudden_quiet_parameters_do_not_explode() -> None:
    """One loud element sets the block's scale; the quiet ones' sqrt(v) is raised, never lowered to zero."""
    layout = Layout.of({"w": (16, 256)})
    unit = HybridAdamW().unit(layout, torch.zeros(layout.numel), torch.float32)
    gradient = torch.full((layout.numel,), 1e-7)
    gradient[::256] = 1.0
    for step in range(1, 20):
        before = unit.master().clone()
        unit.update(gradient, step=step, scale=1.0, lr=1.0)
        assert (unit.master() - before).abs().max() < 1.5


def test_wrong_arguments_are_refused() -> None:
    unit = HybridAdamW().unit(LAYOUT, flat(0), torch.float32)
    with pytest.raises(ValueError, match="gradient of shape"):
        unit.update(torch.zeros(3), step=1, scale=1.0, lr=1e-3)
    with pytest.raises(ValueError, match="count from 1"):
        unit.update(flat(1), step=0, scale=1.0, lr=1e-3)
    with pytest.raises(ValueError, match="flat float32"):
        HybridAdamW().unit(LAYOUT, flat(0).bfloat16(), torch.bfloat16)


def test_hyper_parameters_are_read_at_every_update() -> None:
    optimizer = HybridAdamW(weight_decay=0.0)
    unit = optimizer.unit(LAYOUT, flat(0), torch.float32)
    optimizer.param_groups[0]["weight_decay"] = 0.5
    unit.update(torch.zeros(LAYOUT.numel), step=1, scale=1.0, lr=0.1)
    decayed = [s for s in LAYOUT.segments if len(s.shape) >= 2]
    for s in LAYOUT.segments:
        here = slice(s.offset, s.offset + s.numel)
        factor = 0.95 if s in decayed else 1.0
        torch.testing.assert_close(unit.master()[here], flat(0)[here] * factor)


@pytest.mark.parametrize("kernel", ["auto", "torch"])
def test_parameters_without_a_gradient_stay_beside_busy_ones(kernel: str) -> None:
    """sqrt(v) of zero is lifted within a block; m is not, and nothing moves."""
    layout = Layout.of({"w": (64, 64)})
    unit = HybridAdamW(kernel=kernel).unit(layout, torch.ones(layout.numel), torch.bfloat16)
    quiet = torch.arange(layout.numel) % 3 == 0
    for step in range(1, 20):
        unit.update(flat(step, layout).masked_fill(quiet, 0).bfloat16(), step=step, scale=1.0, lr=0.1)
    assert torch.equal(unit.master()[quiet], torch.ones(int(quiet.sum())))
    gradient = torch.where(quiet, flat(20, layout) * 1e-2, 0.0).bfloat16()
    before = unit.master()
    unit.update(gradient, step=20, scale=1.0, lr=0.1)
    assert 0 < (unit.master() - before)[quiet].abs().max() < 1


@pytest.mark.parametrize("kernel", ["auto", "torch"])
def test_training_recovers_from_a_gradient_whose_square_overflows(kernel: str) -> None:
    layout = Layout.of({"w": (64, 64)})
    unit = HybridAdamW(betas=(0.5, 0.5), kernel=kernel).unit(layout, torch.ones(layout.numel), torch.bfloat16)
    huge = torch.zeros(layout.numel)
    huge[0] = 1e30
    unit.update(huge, step=1, scale=1.0, lr=1e-3)
    before = unit.master()
    for step in range(2, 200):
        unit.update(torch.ones(layout.numel), step=step, scale=1.0, lr=1e-3)
    assert ((before - unit.master()) > 0.02).all()


@pytest.mark.parametrize("kernel", ["auto", "torch"])
@DTYPES
@BITS
def test_a_learning_rate_of_zero_moves_states_only(kernel: str, dtype: torch.dtype, state_bits: int) -> None:
    unit = HybridAdamW(kernel=kernel, state_bits=state_bits, weight_decay=0.1).unit(LAYOUT, flat(0), dtype)
    states = snapshot(unit)
    unit.update(flat(1).to(dtype), step=1, scale=1.0, lr=0.0)
    assert torch.equal(unit.master(), flat(0))
    assert not same_bits(snapshot(unit), states)


@pytest.mark.parametrize("scale", [1e-30, 1e-15, 2.0**-30, 1e-6, 1e-2, 1e3, 2.0**11, 1e15])
@pytest.mark.parametrize("kernel", ["auto", "torch"])
def test_no_scale_of_a_gradient_takes_states_out_of_range(kernel: str, scale: float) -> None:
    """8-bit states are updated in units of the gradient's, so what was before has to fit these as well."""
    plain, scaled = (HybridAdamW(kernel=kernel).unit(LAYOUT, flat(0), torch.bfloat16) for _ in range(2))
    for unit in (plain, scaled):
        unit.update(flat(1), step=1, scale=1.0, lr=1e-2)
    plain.update(flat(2), step=2, scale=1.0, lr=1e-2)
    scaled.update(flat(2) / scale, step=2, scale=scale, lr=1e-2)
    torch.testing.assert_close(scaled.master(), plain.master(), rtol=1e-5, atol=1e-6)
