"""Weights and 8-bit states that stay on a GPU: bitsandbytes' kernels update them there.

The executor keeps all states in host memory. This is for parameters that are on a GPU anyway, a model that fits it or
what of it always stays there, when they are given to ``HybridAdamW`` as a plain torch optimizer. The codes are
bitsandbytes' (dynamic tables, blocks of 256, nearest), not those of ``codes.py``, so their states are no others'.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import CheckpointError, InputError
from .adamw import Step, step
from .blocks import blocks, chunks, is_quantised
from .buffers import Buffers, Master
from .codes import weight_dither
from .split import join, round_stochastically, split

BLOCK = 256
"""Elements that share a scale; the only size that bitsandbytes has."""
_CHUNK = 1 << 24
"""Elements of fp32 master that exist at once: 64 MB."""


class GpuUnit:
    """AdamW for one contiguous parameter, fp32 or bf16, on the device where it is.

    ``streamed`` is the parameter, flat, and changes in place; ``low`` (int16) is the rest of its fp32 master when the
    master is split. States are uint8 codes with fp32 scales, or fp32 where ``quantised`` is False.
    """

    def __init__(self, streamed: torch.Tensor, master: Master, *, quantised: bool) -> None:
        self.streamed = streamed
        self._master: Master = master
        self._quantised = quantised
        zeros = functools.partial(torch.zeros, device=streamed.device)
        numel, scales = streamed.numel(), blocks(streamed.numel(), BLOCK)
        self._states = {"m": zeros(numel), "v": zeros(numel)}
        if quantised:
            codes = {f"gpu.{name}.codes": zeros(numel, dtype=torch.uint8) for name in ("m", "v")}
            self._states = codes | {f"gpu.{name}.scales": zeros(scales) for name in ("m", "v")}
        if master == "split":
            self._states["master.low"] = zeros(numel, dtype=torch.int16)

    def apply(self, gradient: torch.Tensor, *, step: int, scale: float, options: Mapping[str, Any]) -> None:
        """One step, counted from 1, with ``gradient`` (flat) times ``scale`` and the options of a parameter group."""
        beta1, beta2 = options["betas"]
        by = Step(step, float(options["lr"]), beta1, beta2, options["eps"], options["weight_decay"], scale)
        for start, stop in chunks(self.streamed.numel(), BLOCK, _CHUNK):
            self._step_chunk(slice(start, stop), gradient[start:stop], by)

    def state_beside_streamed(self) -> dict[str, torch.Tensor]:
        """All that an exact continuation needs beside the parameter, by name: the live tensors."""
        return dict(self._states)

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Copy in what ``state_beside_streamed()`` gave. Raises CheckpointError, and changes nothing, if it differs."""
        found = {name: (tensor.dtype, tensor.shape) for name, tensor in state.items()}
        if found != {name: (tensor.dtype, tensor.shape) for name, tensor in self._states.items()}:
            raise CheckpointError(
                f"optimizer state holds {sorted(state)}, expected {sorted(self._states)} of this parameter's size",
                hint="states of a parameter on a GPU continue on a GPU, with the same optimizer settings",
            )
        for name, tensor in self._states.items():
            tensor.copy_(state[name])

    def _step_chunk(self, here: slice, gradient: torch.Tensor, by: Step) -> None:
        weights, low = self.streamed[here], self._states["master.low"][here] if self._master == "split" else None
        if not self._quantised:
            m, v = self._states["m"][here], self._states["v"][here]
            return step(Buffers(weights, self._master, gradient, BLOCK, low, m=m, v=v), by)
        exact = weights if self._master == "plain" else weights.float() if low is None else join(weights, low)
        self._update_quantised(exact, gradient.float(), here, by)
        if low is not None:
            split(exact, weights, low)
        elif self._master == "stochastic":
            dither = weight_dither(by.step, here.start, weights.numel()).to(weights.device)
            round_stochastically(exact, weights, dither)
        return None

    def _update_quantised(self, weights: torch.Tensor, gradient: torch.Tensor, here: slice, by: Step) -> None:
        from bitsandbytes.functional import optimizer_update_8bit_blockwise

        signed, unsigned = _tables(weights.device)
        scales = slice(here.start // BLOCK, here.start // BLOCK + blocks(weights.numel(), BLOCK))
        m, v = (self._states[f"gpu.{name}.codes"][here] for name in ("m", "v"))
        m_scales, v_scales = (self._states[f"gpu.{name}.scales"][scales] for name in ("m", "v"))
        constants = (by.beta1, by.beta2, 0.0, 0.0, by.eps, by.step, by.lr)
        kept = (signed, unsigned, m_scales, v_scales)
        optimizer_update_8bit_blockwise("adam", gradient, weights, m, v, *constants, *kept, by.weight_decay, by.scale)


def gpu_unit(
    parameter: torch.Tensor, *, master: Master, state_bits: int, min_8bit_size: int, block_size: int, fraction: float
) -> GpuUnit:
    """The unit of a parameter on a GPU. Raises InputError for what bitsandbytes' kernels cannot do."""
    if parameter.device.type != "cuda":
        raise InputError(
            f"HybridAdamW does not train parameters on {parameter.device}", hint="move them to the CPU or a CUDA device"
        )
    quantised = is_quantised(
        tuple(parameter.shape), parameter.numel(), state_bits=state_bits, min_8bit_size=min_8bit_size
    )
    if quantised and (block_size != BLOCK or fraction < 1):
        raise InputError(
            f"8-bit states on a GPU have blocks of {BLOCK} and are for whole tensors, "
            f"got block_size {block_size} and eight_bit_fraction {fraction}",
            hint="leave both at their defaults, or keep the parameters on the CPU",
        )
    return GpuUnit(parameter.detach().reshape(-1), master, quantised=quantised)


@functools.lru_cache
def _tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The values of the codes of m, signed, and of v, on ``device``."""
    from bitsandbytes.functional import create_dynamic_map

    return create_dynamic_map(signed=True).to(device), create_dynamic_map(signed=False).to(device)
