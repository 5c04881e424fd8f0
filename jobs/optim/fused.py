"""Multiplication and addition with one rounding, as processors do them, by torch operations."""

from __future__ import annotations

import torch

_KEPT_BITS = 35
"""The leading bits of an fp64 number that an fp32 number has places for."""
_TIE = -(1 << 63)
"""The other bits, moved to the front, of a number in the middle between two fp32 numbers."""
_SMALLEST = 2.0**-126
"""Below it, fp32 numbers have fewer bits."""


def fused(a: torch.Tensor, b: torch.Tensor | float, c: torch.Tensor | float) -> torch.Tensor:
    """``a * b + c`` (a new fp32 tensor), rounded once; all are fp32, numbers are rounded to it.

    In fp64 the product of two fp32 numbers is exact. Rounding the sum there and then to fp32 is the same as rounding it
    once unless the first result lies exactly between two fp32 numbers and is not exact itself. On a GPU, which would
    have to be waited for, that is left alone: one result in some 10^8 may be the other of two that are equally near.
    """
    b, c = _fp32(b), _fp32(c)
    total = a.double().mul_(b).add_(c)
    rounded = total.float()
    if total.device.type == "cpu" and _doubtful(total, rounded):
        return _rounded_to_odd(a.double().mul_(b), c, total).float()
    return rounded


def _fp32(value: torch.Tensor | float) -> torch.Tensor | float:
    return value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float32).item()


def _doubtful(total: torch.Tensor, rounded: torch.Tensor) -> bool:
    if total.numel() == 0:
        return False
    if int(total.view(torch.int64).bitwise_left_shift(_KEPT_BITS).min()) == _TIE:  # thrice as fast as comparing each
        return True
    return float(rounded.abs().min()) < _SMALLEST and bool((rounded.abs() < _SMALLEST).logical_and_(total != 0).any())


def _rounded_to_odd(product: torch.Tensor, added: torch.Tensor | float, total: torch.Tensor) -> torch.Tensor:
    """``total`` with an odd last bit wherever it is not the exact sum: rounding it on gives what the exact sum gives.

    (Boldo and Melquiond 2008; Knuth's two-sum tells what ``total`` lacks.)
    """
    part = total - product
    lacks = (product - (total - part)).add_(added - part)
    bits = total.view(torch.int64)
    toward = torch.where((lacks > 0) == (total > 0), 1, -1)
    inexact = ((lacks > 0) | (lacks < 0)) & (bits & 1 == 0)
    return (bits + toward * inexact).view(torch.float64)
