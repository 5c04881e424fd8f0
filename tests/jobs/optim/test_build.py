"""The package installs with a compiler and without one."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lazytrain.jobs.layout import Layout
from lazytrain.jobs.optim import HybridAdamW, native

ROOT = Path(__file__).resolve().parents[3]
setuptools = pytest.importorskip("setuptools", minversion="77")


def build(target: Path, **environment: str) -> list[Path]:
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(target), "--build-temp", str(target)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, check=True, capture_output=True)
    return [path for path in target.rglob("_kernel*") if path.suffix != ".o"]


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def test_without_a_compiler_the_build_goes_on_without_the_kernel(tmp_path: Path) -> None:
    assert build(tmp_path, CC="/no/compiler", CXX="/no/compiler") == []


@needs_compiler
def test_a_compiler_without_openmp_gives_a_kernel_without_threads(tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\nfor word; do [ "$word" = -fopenmp ] && exit 1; done\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    assert len(build(tmp_path / "out", CC=str(compiler), CXX=str(compiler))) == 1


@needs_compiler
def test_processors_that_are_not_x86_get_a_kernel_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = build(tmp_path, CC="g++ -DX86=0", CXX="g++ -DX86=0")
    library, reason = native._open(path)
    assert reason == ""
    monkeypatch.setattr(native, "_load", lambda: (library, ""))
    assert native.instruction_sets() == ("baseline",)
    layout = Layout.of({"w": (65, 131), "bias": (77,)})
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(layout.numel, generator=generator) for _ in range(5)]
    assert HybridAdamW().squares(gradients[0]) == pytest.approx(gradients[0].double().square().sum().item())
    states = []
    for kernel in ("auto", "torch"):
        unit = HybridAdamW(kernel=kernel, weight_decay=0.1).unit(layout, gradients[0], torch.bfloat16)
        for step, gradient in enumerate(gradients, 1):
            unit.update(gradient, step=step, scale=0.5, lr=1e-2)
        states.append(unit.state())
    for name, tensor in states[0].items():
        assert torch.equal(tensor.view(torch.uint8), states[1][name].view(torch.uint8)), name
