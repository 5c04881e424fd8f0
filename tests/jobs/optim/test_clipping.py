"""Exact global clipping, as torch defines it."""

import math
import pickle

import pytest
import torch

from lazytrain.jobs.optim import HybridAdamW, clip, squares


@pytest.mark.parametrize("size", [0, 1, 1000, (1 << 18) + 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_squares_are_exact_to_fp64(size: int, dtype: torch.dtype) -> None:
    gradient = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    assert squares(gradient) == pytest.approx(gradient.double().square().sum().item(), rel=1e-12)


def test_squares_of_huge_and_tiny_gradients_neither_overflow_nor_vanish() -> None:
    assert squares(torch.full((10,), 1e30)) == pytest.approx(1e61, rel=1e-6)
    assert squares(torch.full((10,), 1e-30)) == pytest.approx(1e-59, rel=1e-6)


@pytest.mark.parametrize("max_norm", [0.01, 1.0, 1e6])
def test_clip_equals_torchs(max_norm: float) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(n, 3)) for n in (5, 700)]
    for index, parameter in enumerate(parameters):
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index))
    before = [p.grad.clone() for p in parameters]
    found = HybridAdamW(max_grad_norm=max_norm).clip(sum(squares(g) for g in before))
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    assert found.finite
    assert found.norm == pytest.approx(norm.item(), rel=1e-6)
    for parameter, gradient in zip(parameters, before, strict=True):
        torch.testing.assert_close(gradient * found.scale, parameter.grad, rtol=1e-6, atol=0)


def test_no_clipping_without_a_limit_and_none_of_a_zero_gradient() -> None:
    assert clip(1e12, None) == (1e6, 1.0, True)
    assert clip(0.0, 1.0) == (0.0, 1.0, True)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_non_finite_element_is_found(bad: float, dtype: torch.dtype) -> None:
    gradient = torch.zeros(5000, dtype=dtype)
    gradient[4321] = bad
    found = clip(squares(gradient), 1.0)
    assert not found.finite
    assert found.scale == 0.0
    assert not math.isfinite(found.norm)
    assert pickle.loads(pickle.dumps(found)).finite is False  # noqa: S301
