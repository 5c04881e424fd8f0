"""The package as people install it."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARTS = ("platform", "jobs", "schedulers", "dashboards")


def sources() -> set[str]:
    """Product files in the tree, as they are called in the wheel."""
    kinds = (".py", ".json", ".html", ".css", ".js", ".svg", ".txt")
    kept = (path for part in PARTS for path in (ROOT / part).rglob("*") if path.suffix in kinds)
    return {f"lazytrain/{path.relative_to(ROOT)}" for path in kept}


def test_no_folder_hides_a_module_of_python():
    assert not (ROOT / "__init__.py").exists()
    assert not any((ROOT / part / "__init__.py").exists() for part in PARTS)
    assert all((ROOT / ".links" / "lazytrain" / part).resolve() == ROOT / part for part in PARTS)
    code = "import platform; print(platform.system())"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
def test_the_wheel_holds_what_the_tree_holds(tmp_path):
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        (tree / name).write_bytes((ROOT / name).read_bytes())
    for part in PARTS:
        for path in (ROOT / part).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                target = tree / path.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(path.read_bytes())
    links = tree / ".links" / "lazytrain"
    links.mkdir(parents=True)
    for part in PARTS:
        (links / part).symlink_to(Path("..") / ".." / part)
    code = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=tree, capture_output=True, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if not name.startswith("lazytrain-")}
    compiled = {name for name in packed if name.startswith("lazytrain/jobs/optim/_kernel.")}
    assert packed - compiled == sources()
