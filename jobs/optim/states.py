"""States read as the numbers they mean, and written from numbers: for moving between formats, not for updates."""

from __future__ import annotations

import torch

from .blocks import chunks
from .buffers import Buffers
from .codes import MOMENTUM, ROOT_VARIANCE


def read(buffers: Buffers, m: torch.Tensor, v: torch.Tensor) -> None:
    """Write the states of ``buffers`` into ``m`` and ``v`` (flat fp32)."""
    if buffers.m is not None and buffers.v is not None:
        m.copy_(buffers.m)
        v.copy_(buffers.v)
        return
    for start, stop in chunks(buffers.numel, buffers.block):
        m_codes, m_scales, v_codes, v_scales = buffers.piece(start, stop).quantised()
        m[start:stop] = MOMENTUM.decode(m_codes, m_scales).flatten()
        v[start:stop] = ROOT_VARIANCE.decode(v_codes, v_scales).square_().flatten()


def write(buffers: Buffers, m: torch.Tensor, v: torch.Tensor) -> None:
    """Set the states of ``buffers`` to ``m`` and ``v`` (flat fp32), 8-bit ones to the nearest code."""
    if buffers.m is not None and buffers.v is not None:
        buffers.m.copy_(m)
        buffers.v.copy_(v)
        return
    for start, stop in chunks(buffers.numel, buffers.block):
        m_codes, m_scales, v_codes, v_scales = buffers.piece(start, stop).quantised()
        MOMENTUM.encode(m[start:stop].view(m_codes.shape), m_codes, m_scales)
        ROOT_VARIANCE.encode(v[start:stop].sqrt().view(v_codes.shape), v_codes, v_scales)
