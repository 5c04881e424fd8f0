from collections.abc import Iterator
from pathlib import Path

import pytest

from lazytrain.platform.cluster.local import LocalRay
from lazytrain.platform.settings import Settings

KIND = "test-gpu"


@pytest.fixture(scope="module")
def local_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRay]:
    """A Ray with one emulated GPU, for the tests of one module."""
    with LocalRay(Settings(home=tmp_path_factory.mktemp("home"), ray_auth="disabled"), kind=KIND, cpus=2) as ray:
        yield ray


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"
