"""AdamW (Loshchilov & Hutter 2019) in fp32, on slices of weights and states.

The order of operations is that of ``torch.optim.AdamW``, so that fp32 states give its results. Bias corrections follow
from the step at use; nothing derived is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .codes import MOMENTUM, ROOT_VARIANCE


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


@dataclass(frozen=True, slots=True)
class QuantisedState:
    """8-bit m and sqrt(v) of some blocks: codes (uint8, blocks x width) and scales (fp32, blocks)."""

    m_codes: torch.Tensor
    m_scales: torch.Tensor
    v_codes: torch.Tensor
    v_scales: torch.Tensor


def update(weights: torch.Tensor, gradient: torch.Tensor, m: torch.Tensor, v: torch.Tensor, by: Step) -> torch.Tensor:
    """One AdamW step on fp32 tensors of one shape; ``weights``, ``m`` and ``v`` change in place. Returns sqrt(v)."""
    if by.weight_decay:
        weights.mul_(1 - by.lr * by.weight_decay)
    m.lerp_(gradient, 1 - by.beta1)
    v.mul_(by.beta2).addcmul_(gradient, gradient, value=1 - by.beta2)
    root = v.sqrt()
    denominator = root.div((1 - by.beta2**by.step) ** 0.5).add_(by.eps)
    weights.addcdiv_(m, denominator, value=-by.lr / (1 - by.beta1**by.step))
    return root


def update_quantised(
    weights: torch.Tensor, gradient: torch.Tensor, state: QuantisedState, by: Step, dither: torch.Tensor
) -> None:
    """The same with 8-bit states: decode, update in fp32, encode; all tensors are blocks x width."""
    m = MOMENTUM.decode(state.m_codes, state.m_scales)
    v = ROOT_VARIANCE.decode(state.v_codes, state.v_scales).square_()
    root = update(weights, gradient, m, v, by)
    MOMENTUM.encode(m, state.m_codes, state.m_scales, dither)
    ROOT_VARIANCE.encode(root, state.v_codes, state.v_scales, dither)
