"""8-bit codes of optimizer states: small floats relative to the largest magnitude of their block.

A code is a piece of the fp32 bit pattern of ``value / scale + zero``, a float between 2^-7 and 2: the low three
exponent bits and the leading mantissa bits, so that a vector unit decodes it by a shift and a subtraction, without a
table. The ``zero`` that is added makes steps even near 0 and even in ratio far from it:

    MOMENTUM        m, signed        sign, 3 exponent and 4 mantissa bits    steps of 1/16 down to 2^-12 of the largest
    ROOT_VARIANCE   sqrt(v) >= 0     3 exponent and 5 mantissa bits          steps of 1/32 down to 2^-13 of the largest

Three properties that training needs:

- Momentum 0 is exactly 0: parameters that never had a gradient stay where they are.
- sqrt(v) never falls below 2^-10 of its block's largest: m / (sqrt(v) + eps) cannot explode. Zero is lifted as well,
  which changes no update, as m is 0 where v is; a block whose gradients were all 0 stays all 0.
- An update moves sqrt(v) far less than a code step (0.05 % against 3 %). Rounding to the nearest code would undo it: v
  would stay, relative to its block's largest, what it was after some twenty steps. With ``dither`` a value between two
  codes goes up as often as it is near the upper one, so that v follows its gradients, and no m is too small to be kept
  on average. The dither is a low-discrepancy sequence over the steps, a pure function of step and position: no random
  state, and a resumed run has the same bits.

Why these codes. Mean relative error of the update against AdamW in fp64, over 200 steps of gradients from a model that
trains from scratch, by block size (``tests/benchmarks/codes.py``, results beside it):

    mantissa bits                      64      256     1024    4096
    m 4, v 5 (these)                   0.0416  0.0446  0.0500  0.0604
    m 3, v 5                           0.0642  0.0657  0.0675  0.0698
    m 5, v 5                           0.0425  0.0665  0.0952  0.1479
    m 4, v 4                           0.0593  0.0617  0.0667  0.0764
    m 4, v 6                           0.0363  0.0434  0.0532  0.0708
    m 4, v 5, nearest                  0.0442  0.0475  0.0513  0.0598
    bitsandbytes' tables, nearest      0.0450  0.0606  0.0788  0.0992

One mantissa bit more leaves m only steps near 0 that are too wide for blocks whose gradients differ much, as those of
an embedding do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .fused import fused

VERSION = 3
"""Of what the codes mean; saved with every state."""

_MARGIN = 2.0**-21
"""By which the largest of a block stays below the float of the last code, so that dither never carries it beyond, to
code 0: span, scale, reciprocal and sum are rounded, which lifts it by 3.5 * 2^-23 at most."""
_SMALLEST, _LARGEST = 2.0**-126, 2.0**63
"""Of the scales: their reciprocals are normal numbers, and v is finite again after a gradient whose square was not."""
_SIGN = -(1 << 31)

# Fractions of 2^32: the golden ratio over steps; 11/16 over lanes, so that any 16 of them share the range evenly and
# the next 16 have the same words, which a kernel keeps in registers; over blocks one of the "R2" pair (Roberts 2018).
_PER_STEP, _PER_LANE, _PER_BLOCK = 0x9E3779B9, 0xB0000000, 0x91E10DA5
_PER_WEIGHT_STEP, _PER_WEIGHT = 0x6A09E667, 0xC13FA9A9
"""The root of 2, and the other of the pair: weights and codes are dithered by unrelated sequences."""


@dataclass(frozen=True, slots=True)
class FloatCode:
    """A small float format over blocks; ``mantissa_bits`` of precision, with or without a sign bit.

    ``least`` is what code 0 means, in units in which ``largest`` - ``zero`` is the largest of the block.
    """

    mantissa_bits: int
    signed: bool
    least: float = 0.0

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
        """The bits of an fp32 number that no code holds: code 0, with no bit in common with any other."""
        return ((128 << self.mantissa_bits) - self.top - 1) << self.shift

    @property
    def zero(self) -> float:
        """What is subtracted from a decoded float."""
        return float(2.0 ** ((self.base >> 23) - 127) - self.least)

    @property
    def span(self) -> float:
        """Scale of a block whose largest magnitude is 1, an fp32 number."""
        largest = 2.0 - 2.0**-self.mantissa_bits - _MARGIN
        return float(torch.tensor(largest - self.zero).reciprocal())

    def floats(self, codes: torch.Tensor) -> torch.Tensor:
        """The floats (fp32) that ``codes`` (uint8) are pieces of."""
        bits = codes.to(torch.int32).bitwise_and_(self.top).bitwise_left_shift_(self.shift).bitwise_or_(self.base)
        return bits.view(torch.float32)

    def decode(self, codes: torch.Tensor, scales: torch.Tensor | None = None) -> torch.Tensor:
        """Values (fp32, blocks x width) of ``codes`` (uint8, blocks x width) with ``scales`` (fp32, blocks; or 1)."""
        values = self.floats(codes).sub_(self.zero)
        if self.signed:
            values.view(torch.int32).bitwise_or_(codes.to(torch.int32).bitwise_left_shift_(24).bitwise_and_(_SIGN))
        return values if scales is None else values.mul_(scales.unsqueeze(1))

    def encode(
        self, values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, dither: torch.Tensor | None = None
    ) -> None:
        """Write ``codes`` (uint8, blocks x width) and ``scales`` (fp32, blocks) for ``values`` (fp32, blocks x width).

        ``dither`` (int32, blocks x width, uniform over all bit patterns) decides how values between two codes are
        rounded; without it they go to the nearest.
        """
        largest = (values.abs() if self.signed else values).amax(1, keepdim=True)
        scale = largest.mul_(self.span).clamp_(_SMALLEST, _LARGEST)
        scales.copy_(scale.squeeze(1))
        bits = fused(values, scale.reciprocal_(), self._zero_like(values)).view(torch.int32)
        if not self.signed:
            bits.clamp_(min=self.base)
        if dither is None:
            bits.add_(1 << (self.shift - 1))
        else:
            bits.add_(dither.bitwise_right_shift(32 - self.shift).bitwise_and_((1 << self.shift) - 1))
        magnitude = bits.bitwise_right_shift(self.shift).bitwise_and_(self.top)
        if self.signed:
            magnitude.bitwise_or_(bits.bitwise_right_shift_(24).bitwise_and_(128))
        codes.copy_(magnitude)

    def _zero_like(self, values: torch.Tensor) -> torch.Tensor:
        """``zero`` with the signs of ``values``."""
        zero = torch.tensor(self.zero)
        return zero.copysign(values) if self.signed else zero

    def table(self) -> torch.Tensor:
        """The 256 values (fp32) of the codes 0 to 255 at scale 1."""
        return self.decode(torch.arange(256, dtype=torch.uint8))


MOMENTUM = FloatCode(mantissa_bits=4, signed=True)
ROOT_VARIANCE = FloatCode(mantissa_bits=5, signed=False, least=2.0**-9)


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
    places = torch.arange(first, first + numel, dtype=torch.int64).mul_(_PER_WEIGHT).add_(weight_word(step))
    return places.to(torch.int32)
