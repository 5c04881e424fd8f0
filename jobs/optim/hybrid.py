"""The optimizer people name: AdamW with 8-bit states and an exact fp32 master at 6 bytes a parameter."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from ..errors import CheckpointError, InputError
from ..layout import Layout
from .buffers import Master
from .clipping import Clip, clip, squares
from .native import choose
from .on_gpu import GpuUnit, gpu_unit
from .pages import zeros
from .unit import UnitOptimizer

log = logging.getLogger(__name__)


class HybridAdamW(torch.optim.Optimizer):
    """AdamW whose states take 2.03 bytes a parameter (8-bit m and sqrt(v) in blocks) and whose weights are exact fp32.

    Tensors of fewer than ``min_8bit_size`` elements, norms and biases (one dimension) keep fp32 states, and so does
    what fits one of the ``fp32_states``, patterns of parameter names like ``*embed_tokens*``; ``state_bits=32`` keeps
    them for all, and is then ``torch.optim.AdamW``. Embeddings get 8-bit states by default: the error of their updates
    is little above that of other matrices (0.048 against 0.041 and 0.045 in blocks of 256; bitsandbytes' states make
    it 0.067 against 0.043 and 0.072, ``tests/benchmarks/codes.py``).

    Two ways of use:

    - ``HybridAdamW(params, lr=...)``: a ``torch.optim.Optimizer`` for plain fp32 or bf16 parameters. A bf16 parameter
      is the high half of its own fp32 master. Parameter groups mean what they mean in torch: a group's
      ``weight_decay`` applies to each of its tensors; its ``state_bits`` may differ from the others'. Parameters on a
      GPU keep their states there, and bitsandbytes' kernels update them.
    - ``HybridAdamW(lr=...)``: for the executor, which asks for a ``unit`` per layer and drives it. Weight decay then
      applies to tensors of two or more dimensions only: not to norms and biases, nor to what fits a pattern of
      ``no_decay``.

    ``master`` says what becomes of bf16 weights: "split" keeps them exact (6.03 bytes a parameter with the states);
    "bf16_stochastic" keeps bf16 alone and rounds each update up or down so that it is right on average (4.03 bytes).
    ``eight_bit_fraction`` leaves the rest of every tensor's states in fp32 (the LazyTrain paper: 0.02, with a
    ``block_size`` of 4096).

    ``kernel`` is "auto", "torch" (torch operations, the same bits), or an instruction set: "baseline", "avx2",
    "avx512". ``threads`` bounds the native kernel's; None takes torch's number. Neither is ever more than the cores
    that the process may use.

    ``max_grad_norm`` clips by the global norm over all parameters inside ``step()``; gradients keep their values. A
    step with a non-finite gradient changes nothing at all and is reported in ``last_clip``.
    """

    def __init__(
        self,
        params: Iterable[Any] | None = None,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_grad_norm: float | None = None,
        state_bits: int = 8,
        block_size: int = 256,
        min_8bit_size: int = 4096,
        master: str = "split",
        eight_bit_fraction: float = 1.0,
        fp32_states: Sequence[str] = (),
        no_decay: Sequence[str] = (),
        kernel: str = "auto",
        threads: int | None = None,
    ) -> None:
        _check_numbers(lr, betas, eps, weight_decay, max_grad_norm)
        _check_formats(state_bits, block_size, master, eight_bit_fraction, threads)
        if params is not None and (fp32_states or no_decay):
            raise InputError(
                "optimizer fp32_states and no_decay go by parameter names, which plain parameters do not have",
                hint="give parameter groups with their own state_bits and weight_decay",
            )
        self.max_grad_norm = max_grad_norm
        self.state_bits = state_bits
        self.block_size = block_size
        self.min_8bit_size = min_8bit_size
        self.master = master
        self.eight_bit_fraction = eight_bit_fraction
        self.fp32_states = tuple(fp32_states)
        self.no_decay = tuple(no_decay)
        self.kernel = kernel
        self.threads = threads
        self._kernel = choose(kernel, threads)
        self.last_clip: Clip | None = None
        self._units: dict[torch.Tensor, UnitOptimizer | GpuUnit] = {}
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay, "state_bits": state_bits}
        super().__init__([{"params": []}] if params is None else params, defaults)

    @property
    def lr(self) -> float:
        """Learning rate (of the first group); setting it sets every group's."""
        return float(self.param_groups[0]["lr"])

    @lr.setter
    def lr(self, value: float) -> None:
        for group in self.param_groups:
            group["lr"] = value

    def unit(
        self, layout: Layout, weights: torch.Tensor | None, dtype: torch.dtype, *, path: str = ""
    ) -> UnitOptimizer:
        """Master and zero states for one unit.

        ``weights`` is flat fp32 of ``layout.numel`` elements and is copied (None: zeros, for ``load_master`` to fill);
        ``dtype``, bfloat16 or float32, is what is streamed. ``path`` goes before the names of the layout, so that
        patterns see the names of the whole model.
        """
        if weights is not None and (weights.dtype != torch.float32 or weights.shape != (layout.numel,)):
            raise ValueError(f"weights must be flat float32 of {layout.numel:,} elements")
        splits = _is_half(dtype) and self.master != "bf16_stochastic"
        streamed = zeros(layout.numel, dtype)
        low = zeros(layout.numel, torch.int16) if splits else None
        unit = self._build(layout, streamed, low, self.state_bits, path=path)
        if weights is not None:
            unit.load_master(weights)
        return unit

    def squares(self, gradient: torch.Tensor) -> float:
        """Sum of squares of a gradient, accumulated in fp64."""
        gradient = gradient.detach()
        if (
            self._kernel is None
            or gradient.dtype not in (torch.bfloat16, torch.float32)
            or gradient.device.type != "cpu"
        ):
            return squares(gradient)
        return self._kernel.squares(gradient.contiguous())

    def clip(self, sum_of_squares: float) -> Clip:
        """Norm and factor for gradients with this sum of squares, as in ``torch.nn.utils.clip_grad_norm_``."""
        return clip(sum_of_squares, self.max_grad_norm)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step on every parameter that has a gradient; returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        pairs = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.last_clip = self.clip(sum(self.squares(p.grad) for p, _ in pairs))
        if not self.last_clip.finite:
            log.warning("a gradient is not finite: step skipped, weights and states unchanged")
            return loss
        for parameter, group in pairs:
            self._step_parameter(parameter, group, self.last_clip.scale)
        return loss

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``state_dict()`` gave; every state keeps its dtype and its bits.

        Torch's own loader would cast states to the parameter's dtype. Raises CheckpointError when a state does not
        belong to its parameter or was saved with another block size.
        """
        saved_ids = list(chain.from_iterable(group["params"] for group in state_dict["param_groups"]))
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        pairs = [(p, group) for group in self.param_groups for p in group["params"]]
        for saved_id, (parameter, group) in zip(saved_ids, pairs, strict=True):
            saved = state_dict["state"].get(saved_id)
            if saved is None:
                continue
            if "step" not in saved:
                raise CheckpointError(f"optimizer state {saved_id} has no step", hint="another optimizer saved it")
            self.state[parameter] = dict(saved)
            self._unit_of(parameter, group)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in _SETTINGS}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._units = {}
        self._kernel = choose(self.kernel, self.threads)

    def _step_parameter(self, parameter: torch.Tensor, group: Mapping[str, Any], scale: float) -> None:
        gradient = parameter.grad
        assert gradient is not None
        unit, state = self._unit_of(parameter, group), self.state[parameter]
        state["step"] += 1
        unit.apply(gradient.reshape(-1), step=state["step"], scale=scale, options=group)
        if not parameter.is_contiguous():
            parameter.copy_(unit.streamed.view(parameter.shape))

    def _unit_of(self, parameter: torch.Tensor, group: Mapping[str, Any]) -> UnitOptimizer | GpuUnit:
        """The parameter's unit, over the storage that the parameter has now."""
        if parameter not in self._units:
            self._units[parameter] = self._adopt(parameter, group["state_bits"])
        unit = self._units[parameter]
        if unit.streamed.data_ptr() != parameter.data_ptr():
            unit.streamed = parameter.detach().reshape(-1)
        return unit

    def _adopt(self, parameter: torch.Tensor, state_bits: int) -> UnitOptimizer | GpuUnit:
        """A unit for one parameter, with zero states or, after a load or unpickling, with those in ``state``."""
        unit = self._unit_on_cpu if parameter.device.type == "cpu" else self._unit_on_gpu
        made = unit(parameter, state_bits)
        saved = self.state[parameter]
        if saved:
            made.load_state({name: value for name, value in saved.items() if name != "step"})
        self.state[parameter] = {"step": int(saved.get("step", 0)), **made.state_beside_streamed()}
        return made

    def _unit_on_cpu(self, parameter: torch.Tensor, state_bits: int) -> UnitOptimizer:
        layout = Layout(Layout.of({"parameter": tuple(parameter.shape)}).segments, parameter.numel())
        splits = _is_half(parameter.dtype) and self.master == "split"
        low = torch.zeros(parameter.numel(), dtype=torch.int16) if splits else None
        return self._build(layout, parameter.detach().reshape(-1), low, state_bits, decay_all=True)

    def _unit_on_gpu(self, parameter: torch.Tensor, state_bits: int) -> GpuUnit:
        half: Master = "split" if self.master == "split" else "stochastic"
        return gpu_unit(
            parameter,
            master=half if _is_half(parameter.dtype) else "plain",
            state_bits=state_bits,
            min_8bit_size=self.min_8bit_size,
            block_size=self.block_size,
            fraction=self.eight_bit_fraction,
        )

    def _build(
        self,
        layout: Layout,
        streamed: torch.Tensor,
        low: torch.Tensor | None,
        state_bits: int,
        *,
        decay_all: bool = False,
        path: str = "",
    ) -> UnitOptimizer:
        return UnitOptimizer(
            layout,
            streamed,
            low,
            lambda: self.param_groups[0],
            state_bits=state_bits,
            block_size=self.block_size,
            min_8bit_size=self.min_8bit_size,
            eight_bit_fraction=self.eight_bit_fraction,
            decay_all=decay_all,
            fp32_states=self.fp32_states,
            no_decay=self.no_decay,
            path=path,
            kernel=self._kernel,
        )


_SETTINGS = (
    *("max_grad_norm", "state_bits", "block_size", "min_8bit_size", "master", "eight_bit_fraction"),
    *("fp32_states", "no_decay", "kernel", "threads", "last_clip"),
)
"""What a copy of an optimizer has beside torch's own fields."""


def _is_half(dtype: torch.dtype) -> bool:
    """Whether weights of ``dtype`` are bf16, and not their own fp32 master."""
    if dtype not in (torch.bfloat16, torch.float32):
        raise InputError(
            f"HybridAdamW does not train {dtype} weights",
            hint="use bfloat16, whose exact master is kept beside it, or float32",
        )
    return dtype == torch.bfloat16


def _check_numbers(
    lr: float, betas: tuple[float, float], eps: float, weight_decay: float, max_grad_norm: float | None
) -> None:
    wrong = {
        "lr": (lr, lr >= 0, "0 or more"),
        "betas": (betas, all(0 <= beta < 1 for beta in betas), "in [0, 1)"),
        "eps": (eps, eps > 0, "above 0, or weights whose gradients were all 0 become NaN"),
        "weight_decay": (weight_decay, weight_decay >= 0, "0 or more"),
        "max_grad_norm": (max_grad_norm, max_grad_norm is None or max_grad_norm > 0, "above 0, or None not to clip"),
    }
    for name, (value, right, want) in wrong.items():
        if not right:
            raise InputError(f"optimizer {name} is {value}", hint=f"it must be {want}")


def _check_formats(
    state_bits: int, block_size: int, master: str, eight_bit_fraction: float, threads: int | None
) -> None:
    if state_bits not in (8, 32):
        raise InputError(f"optimizer state_bits is {state_bits}", hint="use 8 or 32")
    if block_size < 1:
        raise InputError(f"optimizer block_size is {block_size}", hint="use 256")
    if not 0 <= eight_bit_fraction <= 1:
        raise InputError(f"optimizer eight_bit_fraction is {eight_bit_fraction}", hint="it must be from 0 to 1")
    if threads is not None and threads < 1:
        raise InputError(f"optimizer threads is {threads}", hint="it must be 1 or more, or None for torch's number")
    if master not in ("split", "bf16_stochastic"):
        raise InputError(
            f"unknown optimizer master {master!r}",
            hint="use 'split', the exact fp32 master in two halves, or 'bf16_stochastic'",
        )
