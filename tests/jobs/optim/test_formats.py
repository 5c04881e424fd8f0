"""Other formats of master and states, and moving between them with the stated errors."""

import pytest
import torch

from lazytrain.jobs.errors import InputError
from lazytrain.jobs.layout import Layout
from lazytrain.jobs.optim import HybridAdamW, UnitOptimizer

LAYOUT = Layout.of({"w": (130, 97), "bias": (97,), "v": (64, 64)})
COVERED = torch.cat([torch.arange(s.offset, s.offset + s.numel) for s in LAYOUT.segments])


def trained(steps: int = 10, dtype: torch.dtype = torch.bfloat16, **options: object) -> UnitOptimizer:
    generator = torch.Generator().manual_seed(0)
    weights = torch.zeros(LAYOUT.numel)
    weights[COVERED] = torch.randn(len(COVERED), generator=generator)
    unit = HybridAdamW(**options).unit(LAYOUT, weights, dtype)  # type: ignore[arg-type]
    for step in range(1, steps + 1):
        unit.update(torch.randn(LAYOUT.numel, generator=generator).to(dtype), step=step, scale=1.0, lr=1e-3)
    return unit


def fresh(dtype: torch.dtype = torch.bfloat16, **options: object) -> UnitOptimizer:
    return HybridAdamW(**options).unit(LAYOUT, torch.zeros(LAYOUT.numel), dtype)  # type: ignore[arg-type]


def same_bits(a: UnitOptimizer, b: UnitOptimizer) -> bool:
    ours, theirs = a.state(), b.state()
    return all(torch.equal(ours[n].view(torch.uint8), theirs[n].view(torch.uint8)) for n in ours)


@pytest.mark.parametrize("options", [{}, {"state_bits": 32}, {"block_size": 100}, {"eight_bit_fraction": 0.3}])
def test_the_same_format_is_copied_bit_for_bit(options: dict[str, object]) -> None:
    source, target = trained(**options), fresh(**options)
    target.take_over(source)
    assert same_bits(source, target)


@pytest.mark.parametrize("other", [{"block_size": 64}, {"block_size": 4096}, {"eight_bit_fraction": 0.5}])
def test_moving_between_block_sizes_stays_within_the_stated_error(other: dict[str, object]) -> None:
    source, target = trained(), fresh(**other)
    target.take_over(source)
    assert torch.equal(target.master(), source.master())
    bounds = ((1 / 33, 2.0**-13), (1 / 65, 2.0**-10))
    roots = ([m, v.sqrt()] for m, v in (target.moments(), source.moments()))
    for ours, theirs, (relative, of_largest) in zip(*roots, bounds, strict=True):
        allowed = theirs.abs() * relative * 1.02 + theirs.abs().max() * of_largest
        assert ((ours - theirs).abs() <= allowed).all()
        assert torch.allclose(ours, theirs, rtol=2**-20, atol=0) == ("block_size" not in other)


def test_to_fp32_is_exact_and_back_gives_the_same_codes() -> None:
    source, wide, back = trained(), fresh(state_bits=32), fresh()
    wide.take_over(source)
    assert all(torch.equal(a, b) for a, b in zip(wide.moments(), source.moments(), strict=True))
    back.take_over(wide)
    for ours, theirs in zip(back.moments(), source.moments(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2**-19, atol=0)  # the scales' margin, in v twice
    assert torch.equal(back.state()["root_v.codes"], source.state()["root_v.codes"])


def test_masters_move_exactly_where_they_can() -> None:
    source = trained()
    plain = fresh(torch.float32)
    plain.take_over(source)
    assert torch.equal(plain.master(), source.master())
    again = fresh()
    again.take_over(plain)
    assert same_bits(again, source)
    rounded = fresh(master="bf16_stochastic")
    rounded.take_over(source)
    assert torch.equal(rounded.streamed, source.master().bfloat16())


def test_another_layout_is_refused() -> None:
    other = HybridAdamW().unit(Layout.of({"w": (97, 130)}), torch.zeros(97 * 130 + 62), torch.bfloat16)
    with pytest.raises(InputError, match="different layouts"):
        other.take_over(trained())


def test_training_goes_on_after_a_move_as_without_it() -> None:
    source, target = trained(), fresh(block_size=64)
    target.take_over(source)
    before = source.master()
    generator = torch.Generator().manual_seed(5)
    for step in range(11, 41):
        gradient = torch.randn(LAYOUT.numel, generator=generator).bfloat16()
        for unit in (source, target):
            unit.update(gradient, step=step, scale=1.0, lr=1e-3)
    moved = source.master() - before
    assert (target.master() - source.master()).norm() < 0.1 * moved.norm()


def test_fraction_keeps_the_rest_in_fp32() -> None:
    unit = fresh(eight_bit_fraction=0.02, block_size=64)
    shapes = {name: tensor.numel() for name, tensor in unit.state().items()}
    eight = sum(int(n * 0.02) // 64 * 64 for n in (130 * 97, 64 * 64))
    assert shapes["m.codes"] == shapes["root_v.codes"] == eight
    assert shapes["m"] == shapes["v"] == 130 * 97 + 97 + 64 * 64 - eight
    assert fresh(eight_bit_fraction=0.0).state().keys() == fresh(state_bits=32).state().keys()


@pytest.mark.parametrize("kernel", ["auto", "torch"])
def test_fraction_trains_like_whole_tensors(kernel: str) -> None:
    """Each element's update depends on its own states: the fp32 share is that of fp32 states, bit for bit."""
    part = trained(eight_bit_fraction=0.5, kernel=kernel).master()
    full, small = trained(state_bits=32, kernel=kernel).master(), trained(kernel=kernel).master()
    half = int(130 * 97 * 0.5) // 256 * 256
    assert torch.equal(part[:half], small[:half])
    assert torch.equal(part[half : 130 * 97], full[half : 130 * 97])


@pytest.mark.parametrize("kernel", ["auto", "torch"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_stochastic_rounding_keeps_tiny_steps_on_average(kernel: str, sign: float) -> None:
    layout = Layout.of({"w": (64, 64)})
    unit = HybridAdamW(master="bf16_stochastic", kernel=kernel).unit(layout, torch.ones(layout.numel), torch.bfloat16)
    assert unit.bytes / layout.numel <= 4.04  # with the bf16 gradient 6.04
    for step in range(1, 101):
        gradient = torch.full((layout.numel,), sign, dtype=torch.bfloat16)
        unit.update(gradient, step=step, scale=1.0, lr=1e-3)
    assert unit.low is None
    assert unit.master().mean().item() == pytest.approx(1 - sign * 0.1, abs=0.002)
    assert unit.master().std() < 0.01


def test_stochastic_rounding_resumes_exactly_and_is_told_from_a_split_master() -> None:
    from lazytrain.jobs.errors import CheckpointError

    source, target = trained(master="bf16_stochastic"), fresh(master="bf16_stochastic")
    target.load_state({name: tensor.clone() for name, tensor in source.state().items()})
    for unit in (source, target):
        unit.update(torch.ones(LAYOUT.numel), step=11, scale=1.0, lr=1e-3)
    assert same_bits(source, target)
    with pytest.raises(CheckpointError, match=r"expected .*master\.low"):
        fresh().load_state(source.state())


def test_stochastic_rounding_in_the_drop_in_optimizer() -> None:
    parameter = torch.nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    optimizer = HybridAdamW([parameter], lr=1e-3, master="bf16_stochastic")
    for _ in range(100):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert parameter.float().mean().item() == pytest.approx(0.9, abs=0.002)
    assert "master.low" not in optimizer.state[parameter]
