"""The 8-bit codes: pinned, monotonic, within their error bound, safe at the edges."""

import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lazytrain.jobs.optim import MOMENTUM, ROOT_VARIANCE, FloatCode
from lazytrain.jobs.optim.codes import dither

BOTH = pytest.mark.parametrize("code", [MOMENTUM, ROOT_VARIANCE], ids=["momentum", "root_variance"])


def coded(code: FloatCode, values: torch.Tensor, noise: torch.Tensor | None = None) -> torch.Tensor:
    codes = torch.zeros(values.shape, dtype=torch.uint8)
    scales = torch.zeros(values.shape[0])
    code.encode(values, codes, scales, noise)
    assert scales.isfinite().all()
    return code.decode(codes, scales)


def log_uniform(rows: int, width: int, low: float, seed: int, signed: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.exp(torch.rand(rows, width, generator=generator) * -torch.log(torch.tensor(low))) * low
    values[:, 0] = 1.0
    return values * (torch.randint(0, 2, (rows, width), generator=generator) * 2 - 1) if signed else values


def test_tables_are_pinned() -> None:
    assert zlib.crc32(MOMENTUM.table().numpy().tobytes()) == 0x7B64A495
    assert zlib.crc32(ROOT_VARIANCE.table().numpy().tobytes()) == 0xBB72AF63


@BOTH
def test_table_rises_in_even_steps_near_zero_and_in_even_ratios_far_from_it(code: FloatCode) -> None:
    table = code.table()[: code.top + 1]
    steps, many = table.diff(), 2**code.mantissa_bits
    assert (steps > 0).all()
    assert table[0] * code.span == pytest.approx(0 if code.signed else 2**-10, rel=0.03)
    assert table[-1] * code.span == pytest.approx(1, rel=1e-6)
    assert steps[0] * code.span == pytest.approx(2**-12 if code.signed else 2**-13, rel=0.05)
    assert torch.equal(steps[:many], steps[:1].expand(many))
    assert (steps / table[1:])[-many:].max() < 1 / many
    if code.signed:
        assert torch.equal(code.table()[128:], -code.table()[:128])
        assert len(code.table().unique()) == 255  # both zeros are one value
    else:
        assert len(code.table().unique()) == 256


@BOTH
def test_a_code_is_a_piece_of_the_fp32_bits(code: FloatCode) -> None:
    """What a native kernel relies on."""
    magnitudes = torch.arange(code.top + 1, dtype=torch.int32)
    bits = (magnitudes << code.shift) | code.base
    assert torch.equal(bits, (magnitudes << code.shift) + code.base)
    assert torch.equal(bits.view(torch.float32) - code.zero, code.table()[: code.top + 1])
    assert not (bits & 0xFFFF).any()  # a bf16 number: decoded in 16-bit lanes


@BOTH
def test_nearest_code_within_the_bound_on_a_million_values(code: FloatCode) -> None:
    values = log_uniform(4096, 256, 2.0**-9, 0, code.signed)
    error = (coded(code, values) - values).abs()
    bound = (values.abs() + code.zero * code.span) / (2 ** (code.mantissa_bits + 1) + 1)
    assert (error <= bound * (1 + 1e-5)).all()
    assert (error / bound).max() > 0.9


@BOTH
def test_nearest_code_is_nearest(code: FloatCode) -> None:
    values = log_uniform(16, 256, 2.0**-13, 1, code.signed)
    best = (values.unsqueeze(-1) - code.table() * code.span).abs().amin(-1)
    got = (coded(code, values) - values).abs()
    torch.testing.assert_close(got, best, rtol=1e-4, atol=1e-6)


@given(st.integers(1, 300), st.integers(0, 10_000), st.floats(-45, 38), st.booleans())
def test_no_scale_of_input_gives_nan_and_signs_and_zeros_of_m_are_kept(
    width: int, seed: int, exponent: float, signed: bool
) -> None:
    code = MOMENTUM if signed else ROOT_VARIANCE
    values = log_uniform(3, width, 1e-9, seed, signed).double().mul(10**exponent).clamp(-3.4e38, 3.4e38).float()
    values[1] = 0
    values[2, ::2] = 0
    for noise in (None, dither(seed + 1, 5, 3, width)):
        back = coded(code, values, noise)
        assert back.isfinite().all()
        largest = values.abs().amax(1, keepdim=True).clamp(min=2.0**-125) * (1 + 1e-6)
        assert (back.abs() <= (0 if signed else largest * 2**-9.9))[values == 0].all()
        assert (back * values.sign() >= 0).all()
        assert (back.abs() <= largest).all()


def test_root_variance_never_falls_below_its_least_code() -> None:
    values = torch.tensor([[1.0, 1e-6, 1e-30, 1e-38, 1e-45, 0.0]])
    for step in range(1, 50):
        back = coded(ROOT_VARIANCE, values, dither(step, 0, 1, 6))
        assert (back[0, 1:] == ROOT_VARIANCE.table()[0] * torch.tensor(ROOT_VARIANCE.span)).all()


def test_denormals_survive_flushing() -> None:
    values = torch.full((1, 8), 1e-40)
    flushes = torch.set_flush_denormal(True)
    try:
        back = coded(MOMENTUM, values)
    finally:
        torch.set_flush_denormal(False)
    assert flushes
    assert back.isfinite().all()


@BOTH
def test_largest_of_a_block_is_exact_under_dither(code: FloatCode) -> None:
    values = log_uniform(7, 64, 1e-4, 3, code.signed) * 0.37
    back = coded(code, values, dither(11, 0, 7, 64))
    torch.testing.assert_close(back[:, 0], values[:, 0], rtol=1e-6, atol=0)


@BOTH
def test_no_dither_carries_the_largest_of_a_block_beyond_the_last_code(code: FloatCode) -> None:
    """Beyond lies code 0: m would be forgotten, and v taken for a millionth of what it is."""
    values = (torch.rand(1 << 14, 1, generator=torch.Generator().manual_seed(0)) * 3 + 1e-3).expand(-1, 4).contiguous()
    for below in range(4):
        worst = torch.full(values.shape, -1 - (below << (32 - code.shift)), dtype=torch.int32)
        torch.testing.assert_close(coded(code, values, worst), values, rtol=1e-6, atol=0)


@BOTH
def test_dithered_codes_are_right_on_average(code: FloatCode) -> None:
    values = log_uniform(2, 256, 2.0**-7, 4, code.signed)
    mean = torch.stack([coded(code, values, dither(step, 0, 2, 256)) for step in range(1, 257)]).mean(0)
    step_size = 2.0**-code.mantissa_bits
    assert ((mean - values) / values).abs().max() < step_size / 50
    assert ((coded(code, values) - values) / values).abs().max() > step_size / 3


def test_dither_does_not_depend_on_how_the_work_is_cut() -> None:
    whole = dither(17, 0, 12, 32)
    assert torch.equal(whole[5:9], dither(17, 5, 4, 32))
    assert torch.equal(dither(3, 2**40, 1, 8), dither(3, 2**40 + 2**32, 1, 8))  # far beyond 32 bits


def test_dither_is_even_over_lanes_blocks_and_steps() -> None:
    for words in (dither(1, 0, 1, 4096), dither(1, 0, 4096, 1), torch.stack([dither(s, 0, 1, 1) for s in range(4096)])):
        histogram = torch.histc(words.double().flatten(), bins=16, min=-(2.0**31), max=2.0**31)
        assert (histogram - 256).abs().max() <= 4


def test_dither_repeats_every_sixteen_lanes_which_share_the_range_evenly() -> None:
    """What lets the kernel keep the words of a block in registers."""
    words = dither(5, 3, 1, 64)[0]
    assert torch.equal(words, words[:16].repeat(4))
    assert (words[:16].sort().values.diff() == 1 << 28).all()
