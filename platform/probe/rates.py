"""Rates of this machine: matrix products, host memory, the links of a GPU, and the optimizer on the CPU."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

import torch

from ...jobs.layout import Layout
from ...jobs.optim import HybridAdamW

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_FEW_PARAMETERS, _MANY_PARAMETERS = 2**19, 2**23
_FAST_S = 0.02
"""An update of few parameters that is quicker than this may have stayed in the caches."""


def median_seconds(work: Callable[[], object], *, seconds: float, device: torch.device | None = None) -> float:
    """Median time of one call of ``work``, repeated for about ``seconds`` (3 times at least) after one warm-up."""
    settle = _settler(device)
    work()
    settle()
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - start < seconds:
        before = time.perf_counter()
        work()
        settle()
        times.append(time.perf_counter() - before)
    return statistics.median(times)


def matmul_flops(dtype: str, *, device: torch.device, seconds: float = 0.4) -> float:
    """Floating-point operations per second of a square product: 8192 wide on a GPU, 768 on a CPU."""
    side = 8192 if device.type == "cuda" else 768
    a = torch.randn(side, side, device=device).to(DTYPES[dtype])
    b = torch.randn(side, side, device=device).to(DTYPES[dtype])
    out = torch.empty_like(a)
    took = median_seconds(lambda: torch.mm(a, b, out=out), seconds=seconds, device=device)
    return 2.0 * side**3 / took


def attention_flops(dtype: str, *, device: torch.device, seconds: float = 0.3) -> float:
    """Floating-point operations per second of fused causal attention, all pairs of tokens counted.

    4 rows of 32 heads, 4,096 tokens and 128 channels on a GPU; 1 row of 8 heads, 512 tokens and 64 channels on a CPU.
    """
    rows, heads, tokens, channels = (4, 32, 4096, 128) if device.type == "cuda" else (1, 8, 512, 64)
    query, key, value = torch.randn(3, rows, heads, tokens, channels, device=device).to(DTYPES[dtype])

    def attend() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    return 4.0 * rows * heads * tokens**2 * channels / median_seconds(attend, seconds=seconds, device=device)


def operation_overhead_s(*, device: torch.device, seconds: float = 0.2) -> float:
    """Seconds of a layer's forward that are not arithmetic: Python and launches.

    It is the time of a decoder layer so small that its arithmetic takes none. On a GPU the calls return before the work
    is done, and while they do a larger layer would compute; what counts is the time of the calls.
    """
    layer = torch.nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True, norm_first=True).to(device)
    states = torch.zeros(1, 4, 32, device=device)

    def forward() -> torch.Tensor:
        with torch.no_grad():
            result: torch.Tensor = layer(states)
        return result

    return median_seconds(forward, seconds=seconds)


def host_bytes_s(*, size_bytes: int = 128 * 2**20, seconds: float = 0.4) -> float:
    """Bytes per second of host memory: a copy larger than the caches reads and writes every byte once."""
    source = torch.ones(size_bytes, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2.0 * size_bytes / median_seconds(lambda: target.copy_(source), seconds=seconds)


def update_parameters_s(*, seconds: float = 0.4) -> float:
    """Parameters per second of the job's own optimizer, with bf16 gradients, as the executor calls it."""
    took = _update_seconds(_FEW_PARAMETERS, seconds)
    if took > _FAST_S:
        return _FEW_PARAMETERS / took
    return _MANY_PARAMETERS / _update_seconds(_MANY_PARAMETERS, seconds)


def _update_seconds(parameters: int, seconds: float) -> float:
    layout = Layout.of({"weight": (parameters // 1024, 1024)})  # a matrix: vectors keep float32 states
    unit = HybridAdamW().unit(layout, torch.zeros(layout.numel), torch.bfloat16)
    gradient = torch.full((layout.numel,), 1e-3, dtype=torch.bfloat16)
    steps = itertools.count(1)
    return median_seconds(lambda: unit.update(gradient, step=next(steps), scale=1.0, lr=1e-3), seconds=seconds)


def link_bytes_s(device: torch.device, *, size_bytes: int = 256 * 2**20, seconds: float = 0.4) -> tuple[float, float]:
    """Bytes per second from pinned host memory to the GPU, and back."""
    host = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty(size_bytes, dtype=torch.uint8, device=device)
    there = median_seconds(lambda: on_device.copy_(host, non_blocking=True), seconds=seconds, device=device)
    back = median_seconds(lambda: host.copy_(on_device, non_blocking=True), seconds=seconds, device=device)
    return size_bytes / there, size_bytes / back


def _settler(device: torch.device | None) -> Callable[[], None]:
    if device is not None and device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: None
