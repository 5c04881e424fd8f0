"""The split master: an fp32 weight as a bf16 high half, which is what the GPU gets, and a 16-bit low half.

``high`` is the bf16 number nearest to the weight, ``low`` the signed distance between their bit patterns; their sum is
the weight again, bit for bit. Exact ties go away from zero: rounding them to even would map 2^16 + 1 weights to every
even ``high``, one more than 16 low bits can tell apart. (Either neighbour is equally near, and no weight that was
bf16 before is a tie.) The carry of a round-up runs into the exponent as it should; a weight within half a bf16 step
of the largest fp32 streams as infinity, as with any rounding to bf16, and still restores exactly.
"""

from __future__ import annotations

import torch

_HALF = 1 << 15


def split(master: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> None:
    """Write ``master`` (fp32, contiguous) into ``high`` (bfloat16) and ``low`` (int16), both of its shape, in place."""
    bits = master.view(torch.int32)
    low.copy_(bits)
    high.view(torch.int16).copy_((bits + _HALF).bitwise_right_shift_(16))


def join(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """The fp32 weights (a new tensor) that were split into ``high`` (bfloat16) and ``low`` (int16)."""
    master = high.to(torch.float32)
    master.view(torch.int32).add_(low)
    return master


def round_stochastically(master: torch.Tensor, high: torch.Tensor, dither: torch.Tensor) -> None:
    """Write ``master`` (fp32) into ``high`` (bfloat16), both flat, in place.

    A weight between two bf16 numbers goes up as often as it is near the upper one: the leading 16 bits of ``dither``
    (int32, uniform) decide.
    """
    up = dither.bitwise_right_shift(16).bitwise_and_(0xFFFF)
    high.view(torch.int16).copy_((master.view(torch.int32) + up).bitwise_right_shift_(16))
