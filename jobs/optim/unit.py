"""Master weights and optimizer states of one unit: flat buffers that stay where they are for the whole run."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..errors import CheckpointError
from ..layout import Layout
from . import adamw
from .blocks import Part, blocks, chunks, cut
from .codes import VERSION, dither
from .split import join, split

Options = Callable[[], Mapping[str, Any]]
"""Gives the optimizer's current ``betas``, ``eps`` and ``weight_decay``: read at every update, never remembered."""


class UnitOptimizer:
    """AdamW for the parameters of one unit (a layer, the embedding, the head).

    ``streamed`` is flat, of the dtype asked for, and is what crosses the link: the master's bf16 high halves (a split
    master: ``low`` holds the rest), or the fp32 master itself (``low`` is None). Updates change it in place.
    """

    def __init__(
        self,
        layout: Layout,
        streamed: torch.Tensor,
        low: torch.Tensor | None,
        options: Options,
        *,
        state_bits: int,
        block_size: int,
        min_8bit_size: int,
        decay_all: bool = False,
    ) -> None:
        self.layout = layout
        self.streamed = streamed
        self.low = low
        self._options = options
        self._block_size = block_size
        self._parts = cut(
            layout,
            state_bits=state_bits,
            block_size=block_size,
            min_8bit_size=min_8bit_size,
            decay_all=decay_all,
        )
        self._states = _allocate(self._parts, block_size)

    def update(self, gradient: torch.Tensor, *, step: int, scale: float, lr: float) -> None:
        """One AdamW step, ``step`` counted from 1, with ``gradient`` (flat, bf16 or fp32) times ``scale``.

        Temporaries stay bounded whatever the unit's size.
        """
        self.apply(gradient, step=step, scale=scale, options={**self._options(), "lr": lr})

    def apply(self, gradient: torch.Tensor, *, step: int, scale: float, options: Mapping[str, Any]) -> None:
        """``update`` with ``lr``, ``betas``, ``eps`` and ``weight_decay`` given by the caller."""
        if gradient.shape != self.streamed.shape:
            raise ValueError(f"gradient of shape {tuple(gradient.shape)} for a unit of {self.layout.numel:,} elements")
        if step < 1:
            raise ValueError(f"steps count from 1, got {step}")
        beta1, beta2 = options["betas"]
        for part in self._parts:
            decay = options["weight_decay"] if part.decayed else 0.0
            by = adamw.Step(step, options["lr"], beta1, beta2, options["eps"], decay, scale)
            for start, stop in chunks(part.segment.numel, self._block_size):
                self._update_chunk(part, start, stop, gradient, by)

    def master(self) -> torch.Tensor:
        """The exact weights, flat fp32; a copy when the master is split, else the master itself."""
        return self.streamed if self.low is None else join(self.streamed, self.low)

    def state(self) -> dict[str, torch.Tensor]:
        """All that an exact continuation needs, by name; views of the live buffers, except the small ``format``."""
        weights = {"master": self.streamed} if self.low is None else {"master.high": self.streamed}
        return {**weights, **self.state_beside_streamed()}

    def state_beside_streamed(self) -> dict[str, torch.Tensor]:
        """``state()`` without the streamed weights, for when these are kept elsewhere (in the model)."""
        low = {} if self.low is None else {"master.low": self.low}
        return {"format": self._format(), **low, **self._states}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Copy in what ``state()`` or ``state_beside_streamed()`` gave, bit for bit.

        Raises CheckpointError, and changes nothing, when a tensor is missing, left over, or of another dtype or shape,
        or when the state is of another layout, block size or code version.
        """
        target = self.state() if {"master", "master.high"} & state.keys() else self.state_beside_streamed()
        _check(state, target)
        for name, tensor in target.items():
            tensor.copy_(state[name])

    @property
    def bytes(self) -> int:
        """Host bytes of master and states together."""
        return sum(tensor.nbytes for name, tensor in self.state().items() if name != "format")

    def _update_chunk(self, part: Part, start: int, stop: int, gradient: torch.Tensor, by: adamw.Step) -> None:
        here = slice(part.segment.offset + start, part.segment.offset + stop)
        weights = self.streamed[here] if self.low is None else join(self.streamed[here], self.low[here])
        scaled = gradient[here].to(torch.float32)
        if by.scale != 1.0:
            scaled = scaled * by.scale
        if part.quantised:
            self._update_quantised(part, start, weights, scaled, by)
        else:
            states = slice(part.state_offset + start, part.state_offset + stop)
            adamw.update(weights, scaled, self._states["m"][states], self._states["v"][states], by)
        if self.low is not None:
            split(weights, self.streamed[here], self.low[here])

    def _update_quantised(
        self, part: Part, start: int, weights: torch.Tensor, gradient: torch.Tensor, by: adamw.Step
    ) -> None:
        numel = weights.numel()
        width = min(self._block_size, numel)
        first, count = start // self._block_size, numel // width
        codes = slice(part.state_offset + start, part.state_offset + start + numel)
        scales = slice(part.scale_offset + first, part.scale_offset + first + count)
        state = adamw.QuantisedState(
            self._states["m.codes"][codes].view(count, width),
            self._states["m.scales"][scales],
            self._states["root_v.codes"][codes].view(count, width),
            self._states["root_v.scales"][scales],
        )
        noise = dither(by.step, first, count, width)
        adamw.update_quantised(weights.view(count, width), gradient.view(count, width), state, by, noise)

    def _format(self) -> torch.Tensor:
        parts = [(p.segment.name, p.segment.shape, p.quantised) for p in self._parts]
        return torch.tensor([VERSION, self._block_size, self.layout.numel, zlib.crc32(repr(parts).encode())])


def _allocate(parts: tuple[Part, ...], block_size: int) -> dict[str, torch.Tensor]:
    """Zero states of the parts; buffers that would be empty are left out."""
    small = [p.segment.numel for p in parts if p.quantised]
    full = sum(p.segment.numel for p in parts if not p.quantised)
    scales = sum(blocks(numel, block_size) for numel in small)
    states = {}
    for name in ("m", "root_v") if small else ():
        states[f"{name}.codes"] = torch.zeros(sum(small), dtype=torch.uint8)
        states[f"{name}.scales"] = torch.zeros(scales, dtype=torch.float32)
    for name in ("m", "v") if full else ():
        states[name] = torch.zeros(full, dtype=torch.float32)
    return states


_FORMAT = ("code version", "block size", "number of elements", "layout or choice of 8-bit tensors")


def _check(state: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor]) -> None:
    hint = "resume with the model and the optimizer settings of the run that saved it"
    if "format" in state and state["format"].shape == target["format"].shape:
        for what, saved, ours in zip(_FORMAT, state["format"].tolist(), target["format"].tolist(), strict=True):
            if saved != ours:
                raise CheckpointError(f"optimizer state has another {what}: {saved} saved, {ours} here", hint=hint)
    if state.keys() != target.keys():
        raise CheckpointError(f"optimizer state holds {sorted(state)}, expected {sorted(target)}", hint=hint)
    for name, tensor in target.items():
        saved = state[name]
        if saved.dtype != tensor.dtype or saved.shape != tensor.shape:
            raise CheckpointError(
                f"optimizer state {name!r} is {saved.dtype} {tuple(saved.shape)}, "
                f"expected {tensor.dtype} {tuple(tensor.shape)}",
                hint=hint,
            )
