"""AdamW (Loshchilov & Hutter 2019) in fp32, on slices of weights and states.

The formula is that of ``torch.optim.AdamW``, with all factors that are the same for every element multiplied up front,
and with fp32 states the results differ from its by rounding only. Every operation is one addition, multiplication,
fused multiply-add, division or square root of fp32 numbers, in an order that the native kernel (``kernel/``) shares:
both give the same bits on any processor. Bias corrections follow from the step at use; nothing derived is kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .blocks import chunks
from .buffers import Buffers
from .codes import MOMENTUM, ROOT_VARIANCE, dither, weight_dither
from .fused import fused
from .split import join, round_stochastically, split

_SMALLEST_LR = 2.0**-90


@dataclass(frozen=True, slots=True)
class Step:
    """The numbers of one update; ``step`` counts from 1, ``scale`` multiplies the gradient (the clip factor)."""

    step: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    scale: float = 1.0

    @property
    def shrink(self) -> float:
        """What weight decay adds to the weights, times them: as a factor of them it would lose its digits beside 1."""
        return -self.lr * self.weight_decay

    @property
    def gradient_factor(self) -> float:
        """Of the gradient, where it enters m."""
        return (1 - self.beta1) * self.scale

    @property
    def square_factor(self) -> float:
        """Of the square of the gradient's share of m, where it enters v."""
        return (1 - self.beta2) / (1 - self.beta1) ** 2

    @property
    def m_unit(self) -> float:
        """Of m while 8-bit states are updated: in it the gradient adds itself, and nothing is multiplied first."""
        return self.gradient_factor

    @property
    def root_unit(self) -> float:
        """Of sqrt(v) while 8-bit states are updated: in it the gradient adds its square to v."""
        return math.sqrt(1 - self.beta2) * self.scale

    @property
    def m_keep(self) -> float:
        """What is kept of m, in ``m_unit``."""
        return self.beta1 / self.m_unit

    @property
    def root_keep(self) -> float:
        """What is kept of sqrt(v), in ``root_unit``."""
        return math.sqrt(self.beta2) / self.root_unit

    @property
    def moves(self) -> bool:
        """Whether weights change at all; below, the factors of the denominator would leave fp32."""
        return self.lr > _SMALLEST_LR

    def denominator(self, m_unit: float = 1.0, root_unit: float = 1.0) -> tuple[float, float]:
        """Factor of sqrt(v), and what is added, for the denominator d of weights += m / d, in units of m and sqrt(v).

        It holds both bias corrections and the learning rate.
        """
        per_rate = (-(1 - self.beta1**self.step) / self.lr if self.moves else -1.0) / m_unit
        return (1 - self.beta2**self.step) ** -0.5 * root_unit * per_rate, self.eps * per_rate


def step(buffers: Buffers, by: Step) -> None:
    """One step, in place, by torch operations; temporaries stay bounded whatever the number of elements."""
    for start, stop in chunks(buffers.numel, buffers.block):
        _step_chunk(buffers.piece(start, stop), start, by)


def update(weights: torch.Tensor, m: torch.Tensor, v: torch.Tensor, by: Step, *units: float) -> torch.Tensor:
    """The weights' move by the new ``m`` and ``v``, all fp32 tensors of one shape, in place; returns sqrt(v).

    ``units`` are those of m and sqrt(v), if they have any.
    """
    root = v.double().sqrt_().float()  # torch's own fp32 root is off by a bit in one of five
    if by.moves:
        weights.add_(fused(weights, by.shrink, m / fused(root, *by.denominator(*units))))
    return root


def _step_chunk(b: Buffers, start: int, by: Step) -> None:
    weights = b.weights.float() if b.low is None else join(b.weights, b.low)
    gradient = b.gradient.float()
    if b.m is not None and b.v is not None:
        share = gradient * by.gradient_factor
        b.m.copy_(fused(b.m, by.beta1, share))
        b.v.copy_(fused(b.v, by.beta2, share.square().mul_(by.square_factor)))
        update(weights, b.m, b.v, by)
    else:
        _update_quantised(weights, gradient, b, start // b.block, by)
    if not by.moves:
        return
    if b.low is not None:
        split(weights, b.weights, b.low)
    elif b.master == "stochastic":
        round_stochastically(weights, b.weights, weight_dither(by.step, start, b.numel))
    else:
        b.weights.copy_(weights)


def _update_quantised(weights: torch.Tensor, gradient: torch.Tensor, b: Buffers, first_block: int, by: Step) -> None:
    m_codes, m_scales, v_codes, v_scales = b.quantised()
    gradient = gradient.view(m_codes.shape)
    m = fused(MOMENTUM.decode(m_codes), (m_scales * by.m_keep).unsqueeze(1), gradient)
    keep = (v_scales * by.root_keep).unsqueeze(1)
    old = fused(ROOT_VARIANCE.floats(v_codes), keep, -(keep * ROOT_VARIANCE.zero))
    v = fused(old, old, gradient.square())
    root = update(weights.view(m.shape), m, v, by, by.m_unit, by.root_unit)
    noise = dither(by.step, first_block, *m_codes.shape)
    MOMENTUM.encode(m, m_codes, m_scales, noise)
    ROOT_VARIANCE.encode(root, v_codes, v_scales, noise)
    m_scales.mul_(by.m_unit)
    v_scales.mul_(by.root_unit)
