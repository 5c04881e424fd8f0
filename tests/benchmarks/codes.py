"""How far the 8-bit states' updates lie from exact AdamW's, for several codes and block sizes, on real gradients.

    python tests/benchmarks/codes.py [--quick] [--json]

The gradients of three matrices of the demo's model are recorded while it trains from scratch. Every code then follows
the same stream: decode, AdamW in fp32, encode. ``error`` is the mean over the steps of |update - exact| / |exact|
(Frobenius norms, exact in fp64); ``length`` the last update's norm over the exact one's: a code that rounds sqrt(v) to
the nearest value lets it freeze, and drifts. Codes are named by their mantissa bits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from typing import Any

import torch
from small_model import SmallModel

from lazytrain.jobs.optim import MOMENTUM, ROOT_VARIANCE, FloatCode
from lazytrain.jobs.optim.codes import dither

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8
MATRICES = (
    "model.embed_tokens.weight",
    "model.layers.2.self_attn.q_proj.weight",
    "model.layers.4.mlp.down_proj.weight",
)
CODES = {
    "m 4, v 5": (MOMENTUM, ROOT_VARIANCE, True),
    "m 3, v 5": (FloatCode(3, True), ROOT_VARIANCE, True),
    "m 5, v 5": (FloatCode(5, True), ROOT_VARIANCE, True),
    "m 4, v 4": (MOMENTUM, FloatCode(4, False, 2.0**-15), True),
    "m 4, v 6": (MOMENTUM, FloatCode(6, False, 2.0**-9), True),
    "m 4, v 5, nearest": (MOMENTUM, ROOT_VARIANCE, False),
}
BLOCKS = (64, 256, 1024, 4096)


def record(steps: int) -> dict[str, list[torch.Tensor]]:
    """Gradients of the matrices over the first steps of a training run."""
    torch.manual_seed(0)
    small = SmallModel(seed=0)
    optimizer = torch.optim.AdamW(small.model.parameters(), lr=2e-3, weight_decay=0.01)
    named = dict(small.model.named_parameters())
    stream: dict[str, list[torch.Tensor]] = {name: [] for name in MATRICES}
    for _, (ids, labels) in zip(range(steps), small.batches(), strict=False):
        optimizer.zero_grad()
        small.loss(ids, labels).backward()
        torch.nn.utils.clip_grad_norm_(small.model.parameters(), 1.0)
        for name in MATRICES:
            stream[name].append(
                named[name].grad.flatten()[: named[name].numel() // 4096 * 4096].clone()
            )  # whole blocks
        optimizer.step()
    return stream


class Float:
    """States in 8 bits: ``nearest`` decides between dithered and nearest rounding."""

    def __init__(self, numel: int, block: int, m_code: FloatCode, v_code: FloatCode, dithered: bool) -> None:
        self.codes = (m_code, v_code)
        self.dithered = dithered
        self.kept = [(torch.zeros(numel // block, block, dtype=torch.uint8), torch.zeros(numel // block)) for _ in "mv"]

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        m, root = (code.decode(*kept) for code, kept in zip(self.codes, self.kept, strict=True))
        return m.flatten(), root.flatten()

    def write(self, m: torch.Tensor, root: torch.Tensor, step: int) -> None:
        shape = self.kept[0][0].shape
        noise = dither(step, 0, *shape) if self.dithered else None
        for code, kept, value in zip(self.codes, self.kept, (m, root), strict=True):
            code.encode(value.view(shape), *kept, noise)


class Bitsandbytes:
    """Its dynamic code books, nearest rounding, v and not its root."""

    def __init__(self, numel: int, block: int) -> None:
        from bitsandbytes.functional import create_dynamic_map

        self.block = block
        self.books = [create_dynamic_map(signed=True), create_dynamic_map(signed=False)]
        self.kept: list[Any] = [None, None]
        self.numel = numel

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        from bitsandbytes.functional import dequantize_blockwise

        if self.kept[0] is None:
            return torch.zeros(self.numel), torch.zeros(self.numel)
        m, v = (dequantize_blockwise(code, state) for code, state in self.kept)
        return m, v.sqrt()

    def write(self, m: torch.Tensor, root: torch.Tensor, step: int) -> None:
        from bitsandbytes.functional import quantize_blockwise

        values = (m, root.square())
        self.kept = [
            quantize_blockwise(value, code=book, blocksize=self.block)
            for value, book in zip(values, self.books, strict=True)
        ]


def follow(stream: list[torch.Tensor], state: Float | Bitsandbytes) -> tuple[float, float]:
    """Mean relative error of the updates, and the last one's relative length."""
    exact_m = torch.zeros_like(stream[0], dtype=torch.float64)
    exact_v = exact_m.clone()
    errors, length = [], 1.0
    for step, gradient in enumerate(stream, 1):
        exact_m.lerp_(gradient.double(), 1 - BETA1)
        exact_v.mul_(BETA2).addcmul_(gradient.double(), gradient.double(), value=1 - BETA2)
        exact = _update(exact_m, exact_v.sqrt(), step)
        m, root = state.read()
        m.lerp_(gradient, 1 - BETA1)
        root = root.square_().mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2).sqrt_()
        ours = _update(m, root, step).double()
        state.write(m, root, step)
        errors.append(((ours - exact).norm() / exact.norm()).item())
        length = (ours.norm() / exact.norm()).item()
    return statistics.mean(errors), length


def _update(m: torch.Tensor, root: torch.Tensor, step: int) -> torch.Tensor:
    return m / (1 - BETA1**step) / (root / (1 - BETA2**step) ** 0.5 + EPS)


def run(*, quick: bool) -> dict[str, Any]:
    """One row per code and block size: the mean over the matrices, and the error of each."""
    steps = 50 if quick else 200
    streams = record(steps)
    rows = []
    for block in BLOCKS[1:2] if quick else BLOCKS:
        for name, (m_code, v_code, dithered) in CODES.items():
            found = [follow(s, Float(s[0].numel(), block, m_code, v_code, dithered)) for s in streams.values()]
            rows.append(_row(name, block, found))
        rows.append(
            _row("bitsandbytes", block, [follow(s, Bitsandbytes(s[0].numel(), block)) for s in streams.values()])
        )
    return {"steps": steps, "matrices": MATRICES, "rows": rows}


def _row(name: str, block: int, found: list[tuple[float, float]]) -> dict[str, Any]:
    error, length = (statistics.mean(each) for each in zip(*found, strict=True))
    each = [round(one, 4) for one, _ in found]
    return {"code": name, "block": block, "error": round(error, 4), "length": round(length, 4), "errors": each}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="50 steps, one block size")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = run(quick=options.quick)
    if options.json:
        json.dump(result, sys.stdout, indent=1)
        print()
        return
    for row in result["rows"]:
        print(f"{row['code']:<48} block {row['block']:>4}: error {row['error']:.4f}, length {row['length']:.4f}")


if __name__ == "__main__":
    main()
