"""Multiplication and addition with one rounding: right in every bit, also where fp64 rounds to the middle."""

from fractions import Fraction

import pytest
import torch

from lazytrain.jobs.optim.fused import fused


def nearest(exact: Fraction) -> float:
    """The fp32 number nearest to ``exact``, of two the even one."""
    guess = torch.tensor(float(exact), dtype=torch.float32)
    around = [torch.nextafter(guess, torch.tensor(sign * float("inf"))) for sign in (-1.0, 1.0)]
    distances = [(abs(Fraction(x.item()) - exact), int(x.view(torch.int32)) & 1, x.item()) for x in (guess, *around)]
    return min(distances)[2]


@pytest.mark.parametrize("sign", [1, -1])
def test_a_sum_that_fp64_rounds_to_the_middle_of_two_fp32_numbers(sign: int) -> None:
    one_up, tiny = 1 + 2.0**-23, 2.0**-24 * (1 - 2.0**-23)
    a, b, c = (torch.tensor([x]) for x in (one_up, sign * tiny, sign * one_up))
    assert (a.double() * b.double() + c.double()).float().item() == sign * (1 + 2.0**-22)  # rounded twice
    assert fused(a, b, c).item() == sign * one_up
    assert fused(a, sign * tiny, sign * one_up).item() == sign * one_up


@pytest.mark.parametrize("size", [1.0, 1e-19, 2.0**-64, 2.0**-70])
def test_it_is_the_exact_result_rounded_once(size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b, c = (torch.randn(400, generator=generator) for _ in range(3))
    a, b, c = a * size, b * size, c * size**2
    c[::4] = torch.nextafter(-a * b, torch.tensor(0.0))[::4]  # nearly all of it goes
    c[1::4] *= 2**20
    got = fused(a, b, c)
    for x, y, z, sum_ in zip(a.tolist(), b.tolist(), c.tolist(), got.tolist(), strict=True):
        assert sum_ == nearest(Fraction(x) * Fraction(y) + Fraction(z))


def test_what_is_not_finite_stays_so() -> None:
    infinite, one = torch.tensor([float("inf")]), torch.ones(1)
    assert fused(infinite, one, one).item() == float("inf")
    assert fused(one, 3e38, 3e38).item() == float("inf")
    assert fused(infinite, one, -infinite).isnan().all()
