"""What a run was made with."""

import subprocess
from pathlib import Path

import pytest
import torch

from lazytrain.jobs.provenance import Provenance, checkout_of
from lazytrain.jobs.run_directory import RunDirectory
from lazytrain.jobs.spec import load_spec
from lazytrain.jobs.train import train


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    (folder / "below").mkdir(parents=True)
    (folder / "file").write_text("1")
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q", "-b", "trunk"], ["add", "file"], [*who, "commit", "-q", "-m", "one"]):
        subprocess.run(["git", "-C", str(folder), *words], check=True)
    return folder


def test_a_checkout_is_found_from_below_and_knows_whether_it_was_changed(checkout: Path) -> None:
    found = checkout_of(checkout / "below")
    assert found is not None
    assert (found.folder, found.branch, found.dirty) == (str(checkout), "trunk", False)
    head = subprocess.check_output(["git", "-C", str(checkout), "rev-parse", "HEAD"], text=True)
    assert found.commit == head.strip()
    (checkout / "new").write_text("data are no change")
    assert checkout_of(checkout) == found
    (checkout / "file").write_text("2")
    changed = checkout_of(checkout)
    assert changed is not None
    assert changed.dirty


def test_no_checkout_and_no_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checkout_of(tmp_path) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert checkout_of(Path.cwd()) is None


def test_a_run_says_what_it_was_made_with(job: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkout)
    train(load_spec(job, ["train.max_steps=1"]), device="cpu")
    said = Provenance.model_validate_json(RunDirectory(job.parent / "run").provenance.read_bytes())
    assert said.packages["torch"] == torch.__version__
    assert said.working_directory == checkout_of(checkout)
    assert said == Provenance.here()
