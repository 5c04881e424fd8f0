"""AdamW (Loshchilov & Hutter 2019) in fp32, on slices of weights and states.

The formula is that of ``torch.optim.AdamW``, and with fp32 states the results differ from its by rounding only. Every
operation is one addition, multiplication, division or square root of fp32 numbers, in an order that the native kernel
(``kernel/``) shares: both give the same bits on any processor. Bias corrections follow from the step at use; nothing
derived is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .blocks import chunks
from .buffers import Buffers
from .codes import MOMENTUM, ROOT_VARIANCE, dither, weight_dither
from .split import join, round_stochastically, split


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
    def root_correction(self) -> float:
        """Factor of sqrt(v) that corrects its bias towards the zero it started from."""
        return float((1 - self.beta2**self.step) ** -0.5)

    @property
    def rate(self) -> float:
        """Factor of m / (corrected sqrt(v) + eps), m's own correction included: what is added to the weights."""
        return float(-self.lr / (1 - self.beta1**self.step))


def step(buffers: Buffers, by: Step) -> None:
    """One step, in place, by torch operations; temporaries stay bounded whatever the number of elements."""
    for start, stop in chunks(buffers.numel, buffers.block):
        _step_chunk(buffers.piece(start, stop), start, by)


def update(weights: torch.Tensor, gradient: torch.Tensor, m: torch.Tensor, v: torch.Tensor, by: Step) -> torch.Tensor:
    """One AdamW step on fp32 tensors of one shape; ``weights``, ``m`` and ``v`` change in place. Returns sqrt(v)."""
    weights.mul_(by.decay)
    m.add_((gradient - m).mul_(1 - by.beta1))
    v.mul_(by.beta2).add_(gradient.square().mul_(1 - by.beta2))
    root = v.double().sqrt_().float()  # torch's own fp32 root is off by a bit in one of five
    denominator = root.mul(by.root_correction).add_(by.eps)
    weights.add_(m.div(denominator).mul_(by.rate))
    return root


def _step_chunk(b: Buffers, start: int, by: Step) -> None:
    weights = b.weights.float() if b.low is None else join(b.weights, b.low)
    gradient = b.gradient.float() * by.scale
    if b.m is not None and b.v is not None:
        update(weights, gradient, b.m, b.v, by)
    else:
        _update_quantised(weights, gradient, b, start // b.block, by)
    if b.low is not None:
        split(weights, b.weights, b.low)
    elif b.master == "stochastic":
        round_stochastically(weights, b.weights, weight_dither(by.step, start, b.numel))


def _update_quantised(weights: torch.Tensor, gradient: torch.Tensor, b: Buffers, first_block: int, by: Step) -> None:
    m_codes, m_scales, v_codes, v_scales = b.quantised()
    m = MOMENTUM.decode(m_codes, m_scales)
    v = ROOT_VARIANCE.decode(v_codes, v_scales).square_()
    root = update(weights.view(m.shape), gradient.view(m.shape), m, v, by)
    noise = dither(by.step, first_block, *m_codes.shape)
    MOMENTUM.encode(m, m_codes, m_scales, noise)
    ROOT_VARIANCE.encode(root, v_codes, v_scales, noise)
