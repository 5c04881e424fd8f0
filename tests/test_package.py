"""The package as people install it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
VERSION = importlib.metadata.version("lazytrain")
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


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by the script that makes releases: from the sources' archive, which holds the files that git knows."""
    if missing := [tool for tool in ("git", "g++") if shutil.which(tool) is None]:
        pytest.skip(f"a release is built with {' and '.join(missing)}")
    out = tmp_path_factory.mktemp("release")
    tools = {"PYTHON": sys.executable, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        [ROOT / "deploy" / "release" / "build.sh", out], capture_output=True, text=True, env={**os.environ, **tools}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return next(out.glob("*.whl"))


@pytest.mark.slow
def test_a_release_is_sources_a_wheel_and_their_checksums(wheel: Path) -> None:
    assert re.fullmatch(rf"lazytrain-{VERSION}-cp310-abi3-manylinux_\d+_\d+_\w+\.whl", wheel.name), wheel.name
    sums = (wheel.parent / "SHA256SUMS").read_text(encoding="utf-8").split()
    assert sums[1::2] == [wheel.name, f"lazytrain-{VERSION}.tar.gz"]
    assert sums[0] == hashlib.sha256(wheel.read_bytes()).hexdigest()


@pytest.mark.slow
def test_the_wheel_holds_what_the_tree_holds(wheel: Path) -> None:
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")}
    assert {f"lazytrain-{VERSION}.dist-info/licenses/{name}" for name in ("LICENSE", "NOTICE")} <= packed
    product = {name for name in packed if not name.startswith(("lazytrain-", "lazytrain.libs/"))}
    compiled = {name for name in product if name.startswith("lazytrain/jobs/optim/_kernel.")}
    assert product - compiled == sources()


@pytest.mark.slow
def test_the_wheel_works_in_an_environment_of_its_own(wheel: Path, tmp_path: Path) -> None:
    """Its dependencies are those of this environment, lazytrain itself is not."""
    home = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    python = home / "bin" / "python"
    install = ["install", "--quiet", "--no-deps", "--no-index", "--no-compile", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), *install], check=True, capture_output=True)
    (site,) = home.glob("lib/python3*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"], encoding="utf-8")
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def said(*command: str | Path) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    shape = ["--model", "qwen2.5-3b", "--gpu", "RTX3090", "--batch", "8", "--length", "512"]
    plan = ["plan", *shape, "--planner", "every_layer", "--json"]
    script = (
        "import lazytrain.jobs.optim.native as n, lazytrain.platform.cli.app as c\n"
        f"print(n.__file__, n.available(), flush=True); raise SystemExit(c.run({plan!r}))"
    )
    assert said(home / "bin" / "lazytrain", "--version") == f"lazytrain {VERSION}"
    first, _, answer = said(python, "-c", script).partition("\n")
    assert first == f"{site / 'lazytrain/jobs/optim/native.py'} True"
    assert json.loads(answer)["feasible"] is True


def test_the_changelog_begins_with_this_version() -> None:
    heading = re.search(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert heading is not None
    assert re.fullmatch(rf"{re.escape(VERSION)} \((unreleased|\d{{4}}-\d\d-\d\d)\)", heading[1])


@pytest.mark.slow
def test_extras_add_little_to_what_every_machine_has(wheel: Path) -> None:
    metadata = zipfile.ZipFile(wheel).read(f"lazytrain-{VERSION}.dist-info/METADATA").decode()
    lines = [requires(line) for line in re.findall(r"^Requires-Dist: (.+)$", metadata, re.M)]
    names = {extra: {name for name, of in lines if of == extra} for _, extra in lines}
    assert names["server"] == {"psycopg"}, "Postgres; SQLite needs nothing"
    assert names["worker"] == names["lora"] == {"peft"}
    assert not names[""] & (names["server"] | names["worker"])
    assert names["docs"] <= names["test"]


def requires(line: str) -> tuple[str, str]:
    """Name and extra of a requirement in the package's metadata."""
    extra = re.search(r'extra == "(.+)"', line)
    return re.split(r"[^A-Za-z0-9-]", line)[0].lower(), extra[1] if extra else ""


def test_what_others_wrote_comes_with_their_licence() -> None:
    shipped = [path for part in PARTS for path in (ROOT / part).rglob("*.min.*")]
    for path in shipped:
        assert path.with_name(f"{path.name.split('.')[0]}.LICENSE.txt").is_file(), path
