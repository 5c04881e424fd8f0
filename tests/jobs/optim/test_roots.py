"""The AVX-512 kernel's own square root, over all numbers there are."""

import shutil
import subprocess
from pathlib import Path

import pytest

from lazytrain.jobs.optim import native

PROGRAM = Path(__file__).with_name("roots.cpp")
KERNEL = Path(native.__file__).with_name("kernel")


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.skipif("avx512" not in native.instruction_sets(), reason="this processor has no AVX-512")
def test_every_root_is_the_correctly_rounded_one(tmp_path: Path) -> None:
    flags = ["-std=c++17", "-O2", "-ffp-contract=off", "-fopenmp-simd", f"-I{KERNEL}"]
    subprocess.run(["g++", *flags, str(PROGRAM), "-o", str(tmp_path / "roots")], check=True)
    assert subprocess.check_output([tmp_path / "roots"], text=True) == "0\n"
