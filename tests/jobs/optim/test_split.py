"""The two halves of the master restore every weight exactly, and the high half is the nearest bf16."""

import math

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from lazytrain.jobs.optim import join, split


def halves(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    high, low = torch.empty(master.shape, dtype=torch.bfloat16), torch.empty(master.shape, dtype=torch.int16)
    split(master, high, low)
    return high, low


def from_bits(bits: list[int]) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


finite_bits = st.integers(0, 2**32 - 1).filter(lambda bits: (bits >> 23) & 0xFF != 0xFF)


@given(st.lists(finite_bits, min_size=1, max_size=70))
@example([0x00000001, 0x807FFFFF, 0x00008000])  # denormals
@example([0x3F7F8000, 0x3F80FFFF, 0x3FFF8001, 0x7F7FFFFF])  # ties and carries into the exponent
@example([0x00000000, 0x80000000])  # both zeros
def test_halves_restore_the_bits(bits: list[int]) -> None:
    master = from_bits(bits)
    restored = join(*halves(master))
    assert torch.equal(restored.view(torch.int32), master.view(torch.int32))


def test_all_low_halves_of_some_exponents_restore() -> None:
    lows = torch.arange(1 << 16, dtype=torch.int64)
    for top in (0x0000, 0x0001, 0x007F, 0x3F80, 0x3F81, 0x3FFF, 0x7F7F, 0x8000, 0xBF80, 0xFF7F):
        master = ((top << 16) + lows).to(torch.int32).view(torch.float32)
        assert torch.equal(join(*halves(master)).view(torch.int32), master.view(torch.int32)), hex(top)


def test_high_half_is_the_nearest_bf16_and_differs_from_torchs_rounding_in_ties_only() -> None:
    master = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0))
    tie = master.view(torch.int32).bitwise_and(0xFFFF) == 0x8000
    high, _ = halves(master)
    assert torch.equal(high[~tie], master.to(torch.bfloat16)[~tie])
    ties = from_bits([0x3F808000, 0x3F818000])
    assert [x.hex() for x in halves(ties)[0].tolist()] == [math.ldexp(129, -7).hex(), math.ldexp(130, -7).hex()]


def test_weights_that_were_bf16_have_no_low_half() -> None:
    master = torch.randn(1000, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16).float()
    high, low = halves(master)
    assert torch.equal(high.float(), master)
    assert not low.any()
