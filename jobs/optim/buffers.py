"""What one update works on: views of a parameter's weights, gradient and states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from .blocks import blocks

Master = Literal["plain", "split", "stochastic"]
"""How weights are kept: fp32, bf16 with int16 low halves, or bf16 alone."""


@dataclass(frozen=True, slots=True)
class Buffers:
    """Flat contiguous CPU tensors of one parameter, or of a part that begins at a block.

    ``weights`` is fp32 ("plain") or bf16, ``gradient`` either. 8-bit states are ``m_codes`` and ``v_codes`` (uint8)
    with ``m_scales`` and ``v_scales`` (fp32, one per ``block`` elements); fp32 states are ``m`` and ``v``.
    """

    weights: torch.Tensor
    master: Master
    gradient: torch.Tensor
    block: int
    low: torch.Tensor | None = None
    m_codes: torch.Tensor | None = None
    m_scales: torch.Tensor | None = None
    v_codes: torch.Tensor | None = None
    v_scales: torch.Tensor | None = None
    m: torch.Tensor | None = None
    v: torch.Tensor | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.weights.numel()

    def quantised(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """8-bit states: m's codes (blocks x width) and scales (blocks), and sqrt(v)'s. Blocks must be of one width."""
        m, m_scales, v, v_scales = self.m_codes, self.m_scales, self.v_codes, self.v_scales
        assert m is not None and m_scales is not None and v is not None and v_scales is not None
        shape = (-1, min(self.block, self.numel))
        return m.view(shape), m_scales, v.view(shape), v_scales

    def piece(self, start: int, stop: int) -> Buffers:
        """Elements ``start``, a multiple of ``block``, to ``stop``."""
        here = slice(start, stop)
        scales = slice(start // self.block, start // self.block + blocks(stop - start, self.block))
        return Buffers(
            self.weights[here],
            self.master,
            self.gradient[here],
            self.block,
            _cut(self.low, here),
            _cut(self.m_codes, here),
            _cut(self.m_scales, scales),
            _cut(self.v_codes, here),
            _cut(self.v_scales, scales),
            _cut(self.m, here),
            _cut(self.v, here),
        )


def _cut(tensor: torch.Tensor | None, where: slice) -> torch.Tensor | None:
    return None if tensor is None else tensor[where]
