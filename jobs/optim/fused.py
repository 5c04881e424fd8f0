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
    if total.device.type == "cpu" and total.numel():
        _correct(rounded, total, a, b, c)
    return rounded


def _correct(
    rounded: torch.Tensor, total: torch.Tensor, a: torch.Tensor, b: torch.Tensor | float, c: torch.Tensor | float
) -> None:
    """Round again, exactly, what may have been rounded wrongly."""
    tie = int(_below(total).min()) == _TIE  # takes a third of what comparing each takes
    small = float(rounded.abs().min()) < _SMALLEST
    if not tie and not small:
        return
    doubtful = _below(total) == _TIE
    if small:
        doubtful |= (rounded.abs() < _SMALLEST) & (total != 0)
    where = doubtful.nonzero(as_tuple=True)
    product = a[where].double() * _at(b, total, where)
    rounded[where] = _rounded_to_odd(product, _at(c, total, where)).float()


def _at(value: torch.Tensor | float, like: torch.Tensor, where: tuple[torch.Tensor, ...]) -> torch.Tensor | float:
    return value.expand_as(like)[where].double() if isinstance(value, torch.Tensor) else value


def _fp32(value: torch.Tensor | float) -> torch.Tensor | float:
    return value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float32).item()


def _below(total: torch.Tensor) -> torch.Tensor:
    return total.view(torch.int64).bitwise_left_shift(_KEPT_BITS)


def _rounded_to_odd(product: torch.Tensor, added: torch.Tensor | float) -> torch.Tensor:
    """Their sum with an odd last bit wherever it is not exact: rounding it on gives what the exact sum gives.

    (Boldo and Melquiond 2008; Knuth's two-sum tells what the sum lacks.)
    """
    total = product + added
    part = total - product
    lacks = (product - (total - part)) + (added - part)
    bits = total.view(torch.int64)
    toward = torch.where((lacks > 0) == (total > 0), 1, -1)
    inexact = ((lacks > 0) | (lacks < 0)) & (bits & 1 == 0)
    return (bits + toward * inexact).view(torch.float64)
