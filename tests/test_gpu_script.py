"""`tests/benchmarks/gpu.py` must run from the source tree where only torch, transformers, numpy and pydantic are."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "benchmarks" / "gpu.py"
BASE = ("torch", "transformers", "numpy", "pydantic", "setuptools")  # torch brings setuptools where Python has it not
BLOCKED_RUN = """
import runpy, sys
blocked = set(sys.argv[1].split(","))
finders = list(sys.meta_path)
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in blocked:
            specs = (finder.find_spec(name, path, target) for finder in finders if hasattr(finder, "find_spec"))
            return next((spec for spec in specs if spec is not None), None)
    def find_distributions(self, *args, **kwargs):
        for finder in finders:
            if hasattr(finder, "find_distributions"):
                yield from finder.find_distributions(*args, **kwargs)
sys.meta_path[:] = [Finder()]
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def with_dependencies(names: tuple[str, ...]) -> set[str]:
    """Distributions that installing ``names`` brings, by canonical name."""
    found: set[str] = set()
    waiting = [re.sub(r"[-_.]+", "-", name).lower() for name in names]
    while waiting:
        name = waiting.pop()
        try:
            requires = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        found.add(name)
        needed = [text for text in requires if "extra ==" not in text]
        needed = [re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", text)[0]).lower() for text in needed]
        waiting += [name for name in needed if name not in found]
    return found


@pytest.mark.parametrize("device", ["emulated"])
def test_the_script_runs_with_nothing_but_what_gpu_images_have(tmp_path, device):
    allowed = with_dependencies(BASE)
    others = {
        module
        for module, owners in metadata.packages_distributions().items()
        if not {re.sub(r"[-_.]+", "-", owner).lower() for owner in owners} & allowed
    } - {"lazytrain"}
    assert {"ray", "ortools", "mlflow", "datasets", "bitsandbytes"} <= others
    out = tmp_path / "gpu.json"
    options = [str(SCRIPT), "--device", device, "--quick", "--out", str(out)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED_RUN, ",".join(sorted(others)), *options],
        capture_output=True, text=True, timeout=200, check=False, cwd=tmp_path, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text())
    assert {"device", "copy_gbps", "matmul_tflops", "parity", "runs"} <= found.keys()
    assert found["parity"]["bit_equal"]
    names = [entry["policy"] for entry in found["runs"]]
    assert names == ["every_layer", "ours", "megatrain", "plain_hf", "megatrain_overlapped"]
    for entry in found["runs"]:
        assert "skipped" not in entry
        assert entry["tokens_per_s"] > 0 and entry["tflops_6n"] > 0
        promised = entry.get("promised_gpu_bytes", entry["peak_gpu_bytes"])
        assert entry["peak_gpu_bytes"] == pytest.approx(promised, rel=0.1)
