"""Host memory that the optimizer's options cost, for those who plan: without the optimizer, and without torch."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Final, Literal

from pydantic import Field

from .frozen import Frozen


class OptimizerOptions(Frozen):
    """The options of ``HybridAdamW`` and of the job file that decide how much host memory a parameter takes.

    Large pages are not among them: they are asked for only where whole ones lie within an array, so they add nothing.
    """

    master: Literal["split", "bf16_stochastic"] = "split"
    state_bits: Literal[8, 32] = 8
    block_size: int = Field(default=256, ge=1)
    eight_bit_fraction: float = Field(default=1.0, ge=0, le=1)
    fp32_states: tuple[str, ...] = ()
    """Patterns of the names of parameters that keep float32 states."""

    def keeps_fp32(self, unit: str) -> bool:
        """Whether a unit that is one matrix, an embedding or a head, keeps float32 states by its name."""
        return any(fnmatchcase(f"{unit}.weight", pattern) for pattern in self.fp32_states)

    def bytes_per_parameter(self, element_bytes: int = 2, unit: str = "") -> dict[str, float]:
        """Host bytes of one parameter of ``unit`` that learns, by purpose.

        ``element_bytes`` is what streams: 2 for bfloat16, 4 for float32, which is its own master. ``weights`` streams,
        ``master`` is what exact float32 weights need beyond it, ``gradients`` are of one micro-batch. A block's scales
        are two float32. Tensors that always keep float32 states (norms, biases, small ones) are counted as if they
        did not, and so are matrices within layers that ``fp32_states`` names, which the names of units do not tell.
        """
        eight = self.eight_bit_fraction if self.state_bits == 8 and not self.keeps_fp32(unit) else 0.0
        return {
            "weights": element_bytes,
            "master": 2.0 if element_bytes == 2 and self.master == "split" else 0.0,
            "optimizer_state": eight * (2 + 8 / self.block_size) + (1 - eight) * 8,
            "gradients": element_bytes,
        }


DEFAULT_OPTIMIZER: Final = OptimizerOptions()
"""What training uses where nobody says otherwise."""
