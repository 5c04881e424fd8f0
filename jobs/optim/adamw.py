"""AdamW (Loshchilov & Hutter 2019) in fp32, on slices of weights and states.

The formula is that of ``torch.optim.AdamW``, with all factors that are the same for every element multiplied up front,
and with fp32 states the results differ from its by rounding only. Every operation is one addition, multiplication,
division or square root of fp32 numbers, in an order that the native kernel (``kernel/``) shares: both give the same
bits on any processor. Bias corrections follow from the step at use; nothing derived is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .blocks import chunks
from .buffers import Buffers
from .codes import MOMENTUM, ROOT_VARIANCE, dither, weight_dither
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
    def decay(self) -> float:
        """Factor of the weights."""
        return 1 - self.lr * self.weight_decay

    @property
    def gradient_factor(self) -> float:
        """Of the gradient, where it enters m."""
        return (1 - self.beta1) * self.scale

    @property
    def square_factor(self) -> float:
        """Of the gradient's square, where it enters v."""
        return (1 - self.beta2) * self.scale**2

    @property
    def moves(self) -> bool:
        """Whether weights change at all; below, the factors of the denominator would leave fp32."""
        return self.lr > _SMALLEST_LR

    @property
    def root_factor(self) -> float:
        """Of sqrt(v) in the denominator d of weights += m / d: both bias corrections and the learning rate."""
        return float((1 - self.beta2**self.step) ** -0.5 * self._per_rate)

    @property
    def eps_term(self) -> float:
        """What is added to it."""
        return self.eps * self._per_rate

    @property
    def _per_rate(self) -> float:
        return -(1 - self.beta1**self.step) / self.lr if self.moves else -1.0


def step(buffers: Buffers, by: Step) -> None:
    """One step, in place, by torch operations; temporaries stay bounded whatever the number of elements."""
    for start, stop in chunks(buffers.numel, buffers.block):
        _step_chunk(buffers.piece(start, stop), start, by)


def update(weights: torch.Tensor, m: torch.Tensor, v: torch.Tensor, by: Step) -> torch.Tensor:
    """The weights' move by the new ``m`` and ``v``, all fp32 tensors of one shape, in place. Returns sqrt(v)."""
    root = v.double().sqrt_().float()  # torch's own fp32 root is off by a bit in one of five
    if by.moves:
        denominator = root.mul(by.root_factor).add_(by.eps_term)
        weights.mul_(by.decay).add_(m.div(denominator))
    return root


def _step_chunk(b: Buffers, start: int, by: Step) -> None:
    weights = b.weights.float() if b.low is None else join(b.weights, b.low)
    gradient = b.gradient.float()
    if b.m is not None and b.v is not None:
        b.m.mul_(by.beta1).add_(gradient * by.gradient_factor)
        b.v.mul_(by.beta2).add_(gradient.square().mul_(by.square_factor))
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
    m = MOMENTUM.decode(m_codes, m_scales * by.beta1).add_(gradient * by.gradient_factor)
    v = ROOT_VARIANCE.decode(v_codes, torch.ones_like(v_scales)).square_()
    v.mul_((v_scales.square() * by.beta2).unsqueeze(1)).add_(gradient.square().mul_(by.square_factor))
    root = update(weights.view(m.shape), m, v, by)
    noise = dither(by.step, first_block, *m_codes.shape)
    MOMENTUM.encode(m, m_codes, m_scales, noise)
    ROOT_VARIANCE.encode(root, v_codes, v_scales, noise)
