"""Host memory that the optimizer's options cost, for those who plan: without the optimizer, and without torch."""

from __future__ import annotations

from typing import Literal


def bytes_per_parameter(
    *,
    element_bytes: int = 2,
    master: Literal["split", "bf16_stochastic"] = "split",
    state_bits: Literal[8, 32] = 8,
    block_size: int = 256,
    eight_bit_fraction: float = 1.0,
) -> dict[str, float]:
    """Host bytes of one parameter by purpose; the options are those of ``HybridAdamW`` and of the job file.

    ``element_bytes`` is what streams: 2 for bfloat16, 4 for float32, which is its own master. ``weights`` streams,
    ``master`` is what exact float32 weights need beyond it, ``gradients`` are of one micro-batch. A block's scales are
    two float32. Tensors that always keep float32 states (norms, biases, small ones) are too few to count.
    """
    eight = eight_bit_fraction if state_bits == 8 else 0.0
    return {
        "weights": element_bytes,
        "master": 2.0 if element_bytes == 2 and master == "split" else 0.0,
        "optimizer_state": eight * (2 + 8 / block_size) + (1 - eight) * 8,
        "gradients": element_bytes,
    }
