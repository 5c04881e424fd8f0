"""Master weights and optimizer states of one unit: flat buffers that stay where they are for the whole run."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..errors import CheckpointError, InputError
from ..layout import Layout
from . import adamw, states
from .blocks import Part, blocks, cut
from .buffers import Buffers, Master
from .codes import VERSION
from .native import Kernel
from .pages import zeros
from .split import join, split

_WEIGHTS: dict[Master, str] = {"plain": "master", "split": "master.high", "stochastic": "weights"}
"""Names of the streamed weights in a saved state."""

_SMALLEST_SCALE, _LARGEST_SCALE = 2.0**-30, 2.0**10
"""Beyond these the gradient is multiplied first: in its own units the states' squares might leave fp32."""
_PIECE = 1 << 20
"""Elements that are converted at a time."""

Options = Callable[[], Mapping[str, Any]]
"""Gives the optimizer's current ``betas``, ``eps`` and ``weight_decay``: read at every update, never remembered."""


class UnitOptimizer:
    """AdamW for the parameters of one unit (a layer, the embedding, the head).

    ``streamed`` is flat, of the dtype asked for, and is what crosses the link. Updates change it in place. It is one of

    - the bf16 high halves of a split master, of which ``low`` holds the rest;
    - the fp32 master itself (``low`` is None);
    - bf16 weights that are rounded stochastically, with no master beside them (``low`` is None).
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
        eight_bit_fraction: float = 1.0,
        decay_all: bool = False,
        fp32_states: Sequence[str] = (),
        no_decay: Sequence[str] = (),
        path: str = "",
        kernel: Kernel | None = None,
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
            eight_bit_fraction=eight_bit_fraction,
            decay_all=decay_all,
            fp32_states=fp32_states,
            no_decay=no_decay,
            path=path,
        )
        self._kernel = kernel
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
        if gradient.dtype not in (torch.bfloat16, torch.float32) or not gradient.is_contiguous():
            gradient = gradient.float().contiguous()
        if not _SMALLEST_SCALE <= scale <= _LARGEST_SCALE:
            gradient, scale = gradient.float() * scale, 1.0
        for part in self._parts:
            decay = options["weight_decay"] if part.decayed else 0.0
            by = adamw.Step(step, float(options["lr"]), beta1, beta2, options["eps"], decay, scale)
            buffers = self._buffers(part, gradient)
            adamw.step(buffers, by) if self._kernel is None else self._kernel.step(buffers, by)

    def master(self) -> torch.Tensor:
        """The exact weights, flat fp32; the live ones when they are kept in fp32, else a copy."""
        return join(self.streamed, self.low) if self.low is not None else self.streamed.float()

    def load_master(self, weights: torch.Tensor, offset: int = 0) -> None:
        """Take these weights, flat, of any floating dtype, from element ``offset`` on; states stay as they are.

        Temporaries stay bounded whatever the number of weights.
        """
        for start in range(0, weights.numel(), _PIECE):
            piece = weights[start : start + _PIECE]
            here = slice(offset + start, offset + start + piece.numel())
            if self.low is None:
                self.streamed[here] = piece
            else:
                split(piece.float().contiguous(), self.streamed[here], self.low[here])

    def state(self) -> dict[str, torch.Tensor]:
        """All that an exact continuation needs, by name; views of the live buffers, except the small ``format``."""
        return {_WEIGHTS[self._master_kind]: self.streamed, **self.state_beside_streamed()}

    def state_beside_streamed(self) -> dict[str, torch.Tensor]:
        """``state()`` without the streamed weights, for when these are kept elsewhere (in the model)."""
        return {"format": self._format(), **self.kept()}

    def kept(self) -> dict[str, torch.Tensor]:
        """The live tensors that an update needs beside the streamed weights, flat, by name."""
        return {**({} if self.low is None else {"master.low": self.low}), **self._states}

    def keep_in(self, places: Mapping[str, torch.Tensor]) -> None:
        """Work on ``places`` from now on, named as in ``kept()`` and of the same dtypes; nothing is copied.

        No update may run while they are shorter than what ``kept()`` gave.
        """
        self.low = places.get("master.low")
        self._states = {name: tensor for name, tensor in places.items() if name != "master.low"}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Copy in what ``state()`` or ``state_beside_streamed()`` gave, bit for bit.

        Raises CheckpointError, and changes nothing, when a tensor is missing, left over, or of another dtype or shape,
        or when the state is of another layout, block size or code version.
        """
        target = self.state() if state.keys() & _WEIGHTS.values() else self.state_beside_streamed()
        _check(state, target)
        for name, tensor in target.items():
            tensor.copy_(state[name])

    def moments(self) -> tuple[torch.Tensor, torch.Tensor]:
        """m and v, flat fp32 copies: exactly what the states mean."""
        m, v = torch.zeros(self.layout.numel), torch.zeros(self.layout.numel)
        for part in self._parts:
            here = slice(part.offset, part.offset + part.numel)
            states.read(self._buffers(part, self.streamed), m[here], v[here])
        return m, v

    def take_over(self, other: UnitOptimizer) -> None:
        """Copy weights and states from a unit of the same layout whose block size, bits or master may be others.

        Exact wherever nothing has to be rounded: from 8 to 32 bits, and for what keeps its format. What becomes 8-bit,
        also with another block size, goes to the nearest code: m by at most 1/17 of it or 2^-16 of its block's largest;
        sqrt(v) by at most 1/65, and at least to 2^-8 of its block's largest. A bf16 master goes to the nearest bf16, by
        at most 2^-8.
        """
        if other.layout != self.layout:
            raise InputError("optimizer states cannot move between different layouts", hint="load the same model")
        self.load_master(other.master())
        if self._parts == other._parts and self._block_size == other._block_size:
            for name, tensor in self._states.items():
                tensor.copy_(other._states[name])
            return
        m, v = other.moments()
        for part in self._parts:
            here = slice(part.offset, part.offset + part.numel)
            states.write(self._buffers(part, self.streamed), m[here], v[here])

    @property
    def bytes(self) -> int:
        """Host bytes of master and states together."""
        return sum(tensor.nbytes for name, tensor in self.state().items() if name != "format")

    @property
    def _master_kind(self) -> Master:
        if self.low is not None:
            return "split"
        return "plain" if self.streamed.dtype == torch.float32 else "stochastic"

    def _buffers(self, part: Part, gradient: torch.Tensor) -> Buffers:
        """Views of everything that belongs to a part."""
        here = slice(part.offset, part.offset + part.numel)
        low = None if self.low is None else self.low[here]
        common = (self.streamed[here], self._master_kind, gradient[here], self._block_size, low)
        kept = slice(part.state_offset, part.state_offset + part.numel)
        if not part.quantised:
            return Buffers(*common, m=self._states["m"][kept], v=self._states["v"][kept])
        scales = slice(part.scale_offset, part.scale_offset + blocks(part.numel, self._block_size))
        return Buffers(
            *common,
            m_codes=self._states["m.codes"][kept],
            m_scales=self._states["m.scales"][scales],
            v_codes=self._states["root_v.codes"][kept],
            v_scales=self._states["root_v.scales"][scales],
        )

    def _format(self) -> torch.Tensor:
        parts = [(p.segment.name, p.segment.shape, p.start, p.quantised) for p in self._parts]
        return torch.tensor([VERSION, self._block_size, self.layout.numel, zlib.crc32(repr(parts).encode())])


def _allocate(parts: tuple[Part, ...], block_size: int) -> dict[str, torch.Tensor]:
    """Zero states of the parts; buffers that would be empty are left out."""
    small = [p.numel for p in parts if p.quantised]
    full = sum(p.numel for p in parts if not p.quantised)
    scales = sum(blocks(numel, block_size) for numel in small)
    made = {}
    for name in ("m", "root_v") if small else ():
        made[f"{name}.codes"] = zeros(sum(small), torch.uint8)
        made[f"{name}.scales"] = torch.zeros(scales, dtype=torch.float32)
    for name in ("m", "v") if full else ():
        made[name] = zeros(full, torch.float32)
    return made


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
