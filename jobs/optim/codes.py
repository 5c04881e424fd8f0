"""8-bit codes of optimizer states: small floats relative to the largest magnitude of their block.

A code is a piece of the fp32 bit pattern of ``value / largest``: the low exponent bits and the leading mantissa bits,
so that a vector unit decodes it by a shift and an addition, without a table. The top code is exactly 1, each step below
keeps ``mantissa_bits`` bits of precision, and code 0 is exactly 0; all codes together span 16 octaves:

    MOMENTUM        m, signed        sign, 7 bits of magnitude, 3 of them mantissa    nearest: relative error <= 1/17
    ROOT_VARIANCE   sqrt(v) >= 0     8 bits, 4 of them mantissa                       nearest: relative error <= 1/33

Two properties that training needs:

- A positive sqrt(v) never becomes 0, however small next to its block's largest; m / (sqrt(v) + eps) cannot explode.
- An update moves sqrt(v) far less than a code step (0.05 % against 6 %). Rounding to the nearest code would undo it: v
  would stay, relative to its block's largest, what it was after some twenty steps. With ``dither`` a value between two
  codes goes up as often as it is near the upper one, so that v follows its gradients. The dither is a low-discrepancy
  sequence over the steps, a pure function of step and position: no random state, and a resumed run has the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

VERSION = 1
"""Of the two codes and the dither together; saved with every state."""

_TINY = torch.finfo(torch.float32).tiny
_LARGEST = torch.finfo(torch.float32).max
_MAGNITUDE = 0x7FFFFFFF
_SIGN = -(1 << 31)
_EXPONENT_OF_ONE = 127

# Fractions of 2^32: the golden ratio over steps, the two-dimensional "R2" pair (Roberts 2018) over lane and block.
_PER_STEP, _PER_LANE, _PER_BLOCK = 0x9E3779B9, 0xC13FA9A9, 0x91E10DA5


@dataclass(frozen=True, slots=True)
class FloatCode:
    """A small float format over blocks; ``mantissa_bits`` of precision, with or without a sign bit."""

    mantissa_bits: int
    signed: bool

    @property
    def top(self) -> int:
        """The largest magnitude code; it means 1."""
        return 127 if self.signed else 255

    @property
    def shift(self) -> int:
        """How far a code lies from its place in the fp32 bit pattern."""
        return 23 - self.mantissa_bits

    @property
    def base(self) -> int:
        """What is added to a non-zero magnitude code, as fp32 bits."""
        return ((_EXPONENT_OF_ONE << self.mantissa_bits) - self.top) << self.shift

    def decode(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Values (fp32, blocks x width) of ``codes`` (uint8, blocks x width) with ``scales`` (fp32, blocks)."""
        magnitude = codes.to(torch.int32)
        sign = magnitude.bitwise_left_shift(24).bitwise_and_(_SIGN) if self.signed else None
        if sign is not None:
            magnitude.bitwise_and_(self.top)
        nonzero = magnitude.clamp(max=1)
        bits = magnitude.bitwise_left_shift_(self.shift).add_(nonzero, alpha=self.base)
        if sign is not None:
            bits.bitwise_or_(sign)
        return bits.view(torch.float32).mul_(scales.unsqueeze(1))

    def encode(
        self, values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, dither: torch.Tensor | None = None
    ) -> None:
        """Write ``codes`` (uint8, blocks x width) and ``scales`` (fp32, blocks) for ``values`` (fp32, blocks x width).

        ``dither`` (int32, blocks x width, uniform over all bit patterns) decides how values between two codes are
        rounded; without it they go to the nearest.
        """
        largest = (values.abs() if self.signed else values).amax(1, keepdim=True).clamp_(_TINY, _LARGEST)
        scales.copy_(largest.squeeze(1))
        bits = (values / largest).view(torch.int32)
        magnitude = bits.bitwise_and(_MAGNITUDE) if self.signed else bits
        magnitude = magnitude.clamp(max=_EXPONENT_OF_ONE << 23).add_((1 << (self.shift - 1)) - self.base)
        if dither is not None:
            magnitude.add_(dither.bitwise_right_shift(32 - self.shift))
        magnitude.bitwise_right_shift_(self.shift).clamp_(min=0)
        if self.signed:
            magnitude.bitwise_or_(bits.bitwise_right_shift_(24).bitwise_and_(128))
        else:
            torch.maximum(magnitude, values.view(torch.int32).clamp(max=1), out=magnitude)
        codes.copy_(magnitude)

    def table(self) -> torch.Tensor:
        """The 256 values (fp32) of the codes 0 to 255 at scale 1."""
        return self.decode(torch.arange(256, dtype=torch.uint8).unsqueeze(0), torch.ones(1)).squeeze(0)


MOMENTUM = FloatCode(mantissa_bits=3, signed=True)
ROOT_VARIANCE = FloatCode(mantissa_bits=4, signed=False)


def dither(step: int, first_block: int, blocks: int, width: int) -> torch.Tensor:
    """Dither (int32, blocks x width) of ``blocks`` blocks from ``first_block`` at ``step``."""
    lanes = torch.arange(width, dtype=torch.int64).mul_(_PER_LANE).add_(step * _PER_STEP % (1 << 32))
    rows = torch.arange(first_block, first_block + blocks, dtype=torch.int64).mul_(_PER_BLOCK)
    return lanes.to(torch.int32) + rows.to(torch.int32).unsqueeze(1)
