"""The compiled kernel (``kernel/``): where it is, why it is not, and one update through it.

It is built when the package is installed, if there is a C++ compiler (GCC or Clang). Without it everything works, by
torch operations that give the same bits and take over 100 times as long.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch

from ..errors import InputError
from .adamw import Step
from .buffers import Buffers
from .codes import code_word, weight_word
from .threads import usable_threads

log = logging.getLogger(__name__)

_VERSION = 8
"""Of the kernel's interface and arithmetic; a library that says another was built from other sources."""
_SETS = ("baseline", "avx2", "avx512")
_MASTERS = {"plain": 0, "split": 1, "stochastic": 2}
_FEW = 1 << 16
"""Elements below which a second thread costs more than it saves."""
_FP32_BLOCK = 1 << 12
"""Elements of fp32 states that one call of the inner loop takes; any number would do."""


def available() -> bool:
    """Whether the kernel can be used."""
    return _load()[0] is not None


def reason() -> str:
    """Why the kernel is not available, and what to do; empty when it is."""
    return _load()[1]


def instruction_sets() -> tuple[str, ...]:
    """The kernel's instruction sets that this processor has, the best last; empty without a kernel."""
    library = _load()[0]
    return () if library is None else _SETS[: library.lazytrain_instruction_set() + 1]


def describe() -> str:
    """One line for people: what updates will use."""
    if not available():
        return f"torch operations, over 100 times slower: {reason()}"
    return f"native kernel, {instruction_sets()[-1]}, {usable_threads()} threads"


@dataclass(frozen=True, slots=True)
class Kernel:
    """The compiled kernel with one instruction set and a number of threads."""

    instruction_set: str
    threads: int

    def step(self, buffers: Buffers, by: Step) -> None:
        """One AdamW step, in place; the interpreter lock is free meanwhile."""
        task = _task(buffers, by)
        library = _load()[0]
        assert library is not None
        threads = 1 if task.numel < _FEW else self.threads
        library.lazytrain_step(ctypes.byref(task), _SETS.index(self.instruction_set), threads)

    def squares(self, gradient: torch.Tensor) -> float:
        """Sum of squares of a contiguous bf16 or fp32 CPU tensor, in fp64; the same for any number of threads."""
        library = _load()[0]
        assert library is not None
        numel = gradient.numel()
        partial = torch.empty(-(-numel // library.lazytrain_sum_chunk()), dtype=torch.float64)
        half = gradient.dtype == torch.bfloat16
        threads = 1 if numel < _FEW else self.threads
        chosen = _SETS.index(self.instruction_set)
        total = library.lazytrain_squares(gradient.data_ptr(), half, numel, partial.data_ptr(), chosen, threads)
        return float(total)


def choose(kernel: str, threads: int | None) -> Kernel | None:
    """The kernel that ``kernel`` names: "auto" (the best there is), an instruction set, or "torch" (None).

    Raises InputError for a name that there is not, or an instruction set that cannot run here.
    """
    if kernel not in ("auto", "torch", *_SETS):
        raise InputError(f"unknown optimizer kernel {kernel!r}", hint=f"use auto, torch, {', '.join(_SETS)}")
    if kernel == "torch":
        return None
    if not available() and kernel == "auto":
        _say_once()
        return None
    if kernel != "auto" and kernel not in instruction_sets():
        why = reason() or f"this processor has {', '.join(instruction_sets())}"
        raise InputError(f"optimizer kernel {kernel!r} cannot run here: {why}", hint="use kernel='auto'")
    return Kernel(instruction_sets()[-1] if kernel == "auto" else kernel, usable_threads(threads))


class _Task(ctypes.Structure):
    """``Task`` of kernel/kernel.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weights", "low", "gradient", "m_codes", "m_scales")),
        *((name, ctypes.c_void_p) for name in ("v_codes", "v_scales", "m", "v")),
        *((name, ctypes.c_int64) for name in ("numel", "block")),
        *((name, ctypes.c_int32) for name in ("half_gradient", "master", "moves")),
        *((name, ctypes.c_float) for name in ("shrink", "beta1", "gradient_factor", "beta2", "square_factor")),
        *((name, ctypes.c_float) for name in ("m_unit", "root_unit", "m_keep", "root_keep")),
        *((name, ctypes.c_float) for name in ("root_factor", "eps_term")),
        *((name, ctypes.c_uint32) for name in ("code_word", "weight_word")),
    ]


_TENSORS = ("weights", "low", "gradient", "m_codes", "m_scales", "v_codes", "v_scales", "m", "v")


def _task(buffers: Buffers, by: Step) -> _Task:
    quantised = buffers.m_codes is not None
    pointers = [None if (tensor := getattr(buffers, name)) is None else tensor.data_ptr() for name in _TENSORS]
    return _Task(
        *pointers,
        buffers.numel,
        buffers.block if quantised else _FP32_BLOCK,
        buffers.gradient.dtype == torch.bfloat16,
        _MASTERS[buffers.master],
        by.moves,
        by.shrink,
        by.beta1,
        by.gradient_factor,
        by.beta2,
        by.square_factor,
        by.m_unit,
        by.root_unit,
        by.m_keep,
        by.root_keep,
        *by.denominator(*((by.m_unit, by.root_unit) if quantised else ())),
        code_word(by.step),
        weight_word(by.step),
    )


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    places = [Path(__file__).with_name(f"_kernel{suffix}") for suffix in reversed(EXTENSION_SUFFIXES)]
    return _open(next((place for place in places if place.exists()), places[0]))


def _open(path: Path) -> tuple[ctypes.CDLL | None, str]:
    if not path.exists():
        return None, "it was not built: install a C++ compiler (g++ or clang++), then install lazytrain again"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return None, f"{path.name} does not load ({error}): install lazytrain again on this machine"
    version = library.lazytrain_version()
    if version != _VERSION:
        return None, f"{path.name} is version {version}, this is {_VERSION}: install lazytrain again"
    library.lazytrain_step.argtypes = (ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32)
    library.lazytrain_step.restype = None
    library.lazytrain_sum_chunk.restype = ctypes.c_int64
    pointer, size, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    library.lazytrain_squares.argtypes = (pointer, number, size, pointer, number, number)
    library.lazytrain_squares.restype = ctypes.c_double
    return library, ""


@functools.cache
def _say_once() -> None:
    log.warning("no native optimizer kernel, updates are over 100 times slower: %s", reason())
