"""The package installs with a compiler and without one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
setuptools = pytest.importorskip("setuptools", minversion="77")


def build(target: Path, **environment: str) -> list[str]:
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(target), "--build-temp", str(target)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, check=True, capture_output=True)
    return [path.name for path in target.rglob("_kernel*") if path.suffix != ".o"]


def test_without_a_compiler_the_build_goes_on_without_the_kernel(tmp_path: Path) -> None:
    assert build(tmp_path, CC="/no/compiler", CXX="/no/compiler") == []


def test_a_compiler_without_openmp_gives_a_kernel_without_threads(tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\nfor word; do [ "$word" = -fopenmp ] && exit 1; done\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    if subprocess.run(["which", "g++"], capture_output=True).returncode:
        pytest.skip("needs g++")
    assert len(build(tmp_path / "out", CC=str(compiler), CXX=str(compiler))) == 1
