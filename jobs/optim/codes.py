"""8-bit codes of optimizer states: small floats relative to the largest magnitude of their block.

A code is a piece of the fp32 bit pattern of ``value / largest``: the low exponent bits and the leading mantissa bits,
so that a vector unit decodes it by a shift and an addition, without a table. The top code is exactly 1, each step below
keeps ``mantissa_bits`` bits of precision:

    MOMENTUM        m, signed        sign, 7 bits of magnitude, 3 of them mantissa    16 octaves, nearest within 1/17
    ROOT_VARIANCE   sqrt(v) >= 0     8 bits, 5 of them mantissa                       8 octaves, nearest within 1/65

Three properties that training needs:

- Momentum 0 is exactly 0: parameters that never had a gradient stay where they are.
- sqrt(v) never falls below 2^-8 of its block's largest: m / (sqrt(v) + eps) cannot explode. Zero is lifted as well,
  which changes no update, as m is 0 where v is; a block whose gradients were all 0 stays all 0.
- An update moves sqrt(v) far less than a code step (0.05 % against 3 %). Rounding to the nearest code would undo it: v
  would stay, relative to its block's largest, what it was after some twenty steps. With ``dither`` a value between two
  codes goes up as often as it is near the upper one, so that v follows its gradients. The dither is a low-discrepancy
  sequence over the steps, a pure function of step and position: no random state, and a resumed run has the same bits.

Why these codes. Mean relative error of the update against AdamW in fp64, over 200 steps of gradients from a model that
trains from scratch, by block size (``tests/benchmarks/codes.py``, results beside it):

    mantissa bits over octaves                64      256     1024    4096
    m 3 over 16, v 5 over 8 (these)           0.0625  0.0660  0.0715  0.0786
    m 3 over 16, v 4 over 16                  0.0748  0.0769  0.0785  0.0795
    m 3 over 16, v 3 over 32                  0.1041  0.1067  0.1090  0.1113
    m 4 over 8, v 5 over 8                    0.0406  0.0544  0.0832  0.1100
    m 3 over 16, v 4 over 16, nearest         0.0813  0.0838  0.0872  0.0875
    bitsandbytes' tables, nearest             0.0416  0.0529  0.0705  0.0905

Over 8 octaves m would be more precise, but parameters whose gradients are 2^-8 of their block's largest would stop: in
blocks of 256 the embedding is already worse for it. sqrt(v) has no such end: what lies below is only damped.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

VERSION = 2
"""Of the two codes and the dither together; saved with every state."""

_SMALLEST, _LARGEST = 2.0**-126, 2.0**63
"""Of the scales: their reciprocals are normal numbers, and v is finite again after a gradient whose square was not."""
_MAGNITUDE = 0x7FFFFFFF
_SIGN = -(1 << 31)
_EXPONENT_OF_ONE = 127

# Fractions of 2^32: the golden ratio over steps, the two-dimensional "R2" pair (Roberts 2018) over lane and block.
_PER_STEP, _PER_LANE, _PER_BLOCK = 0x9E3779B9, 0xC13FA9A9, 0x91E10DA5
_PER_WEIGHT_STEP = 0x6A09E667
"""The root of 2: weights and codes are dithered by sequences that have nothing to do with each other."""


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
        """What is added to a magnitude code (to a signed one unless it is 0), as fp32 bits."""
        return ((_EXPONENT_OF_ONE << self.mantissa_bits) - self.top) << self.shift

    def decode(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Values (fp32, blocks x width) of ``codes`` (uint8, blocks x width) with ``scales`` (fp32, blocks)."""
        bits = codes.to(torch.int32)
        if not self.signed:
            bits.bitwise_left_shift_(self.shift).add_(self.base)
        else:
            sign = bits.bitwise_left_shift(24).bitwise_and_(_SIGN)
            bits.bitwise_and_(self.top)
            nonzero = bits.clamp(max=1)
            bits.bitwise_left_shift_(self.shift).add_(nonzero, alpha=self.base).bitwise_or_(sign)
        return bits.view(torch.float32).mul_(scales.unsqueeze(1))

    def encode(
        self, values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, dither: torch.Tensor | None = None
    ) -> None:
        """Write ``codes`` (uint8, blocks x width) and ``scales`` (fp32, blocks) for ``values`` (fp32, blocks x width).

        ``dither`` (int32, blocks x width, uniform over all bit patterns) decides how values between two codes are
        rounded; without it they go to the nearest.
        """
        largest = (values.abs() if self.signed else values).amax(1, keepdim=True).clamp_(_SMALLEST, _LARGEST)
        scales.copy_(largest.squeeze(1))
        bits = (values * largest.reciprocal_()).view(torch.int32)
        magnitude = bits.bitwise_and(_MAGNITUDE) if self.signed else bits
        magnitude = magnitude.clamp(max=_EXPONENT_OF_ONE << 23).add_((1 << (self.shift - 1)) - self.base)
        if dither is not None:
            magnitude.add_(dither.bitwise_right_shift(32 - self.shift))
        magnitude.bitwise_right_shift_(self.shift).clamp_(min=0)
        if self.signed:
            magnitude.bitwise_or_(bits.bitwise_right_shift_(24).bitwise_and_(128))
        codes.copy_(magnitude)

    def table(self) -> torch.Tensor:
        """The 256 values (fp32) of the codes 0 to 255 at scale 1."""
        return self.decode(torch.arange(256, dtype=torch.uint8).unsqueeze(0), torch.ones(1)).squeeze(0)


MOMENTUM = FloatCode(mantissa_bits=3, signed=True)
ROOT_VARIANCE = FloatCode(mantissa_bits=5, signed=False)


def code_word(step: int) -> int:
    """Dither of lane 0 of block 0 at ``step``, of 32 bits."""
    return step * _PER_STEP % (1 << 32)


def weight_word(step: int) -> int:
    """Dither of a parameter's first weight at ``step``, of 32 bits."""
    return step * _PER_WEIGHT_STEP % (1 << 32)


def dither(step: int, first_block: int, blocks: int, width: int) -> torch.Tensor:
    """Dither (int32, blocks x width) of the codes of ``blocks`` blocks from ``first_block`` at ``step``."""
    lanes = torch.arange(width, dtype=torch.int64).mul_(_PER_LANE).add_(code_word(step))
    rows = torch.arange(first_block, first_block + blocks, dtype=torch.int64).mul_(_PER_BLOCK)
    return lanes.to(torch.int32) + rows.to(torch.int32).unsqueeze(1)


def weight_dither(step: int, first: int, numel: int) -> torch.Tensor:
    """Dither (int32) of ``numel`` weights of a parameter from ``first`` at ``step``."""
    places = torch.arange(first, first + numel, dtype=torch.int64).mul_(_PER_LANE).add_(weight_word(step))
    return places.to(torch.int32)
