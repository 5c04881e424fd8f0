"""Settings of every test: nothing is fetched, and tiny tensors do not pay for threads."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path
from typing import Any

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells have it for what runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["RAY_AUTH_MODE"] = "disabled"
# Also for the processes that tests start: two tests run at a time, and threads that wait spinning would stop the other
# one. Trainings with two threads, while all cores are busy, take a tenth of the time with threads that wait asleep.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

import pytest
import torch
from packaging.requirements import Requirement

gc.disable()  # until all tests are imported: nothing of them is garbage

IMAGES = Path(__file__).parents[1] / "deploy" / "images"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The demo first: it takes minutes, and whoever runs it last lets the other worker wait."""
    items.sort(key=lambda item: item.path.name != "test_demo.py")


def pytest_collection_finish() -> None:
    """A million objects of imported modules are there to the end: each full collection would look at all of them."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def facts_are_measured_once() -> Iterator[None]:
    """Facts are a pure function of model and shape: the many plans and runs of one tiny model measure them once."""
    from lazytrain.jobs import introspect
    from lazytrain.jobs.train import setup

    measure, known = introspect.model_facts, dict[str, Any]()

    def facts(source: Any, **shape: Any) -> Any:
        key = json.dumps([_described(source), shape], sort_keys=True, default=str)
        if key not in known:
            known[key] = measure(source, **shape)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(introspect, "model_facts", facts)
        patch.setattr(setup, "model_facts", facts)
        yield


def _described(source: Any) -> Any:
    """What facts depend on of a configuration or a model."""
    if isinstance(source, dict):
        return source
    if not hasattr(source, "named_parameters"):
        return source.to_dict()
    return [source.config.to_dict(), [(name, p.shape, p.requires_grad) for name, p in source.named_parameters()]]


HIDE = """
import sys
from importlib.machinery import PathFinder
from importlib.metadata import DistributionFinder

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if path is None and name in {modules!r}:  # Ray brings some packages of its own
            path = [entry for entry in sys.path if not entry.endswith("-packages")]
        return super().find_spec(name, path, target)

    @classmethod
    def find_distributions(cls, context=DistributionFinder.Context()):
        hidden = context.name and context.name.lower().replace("_", "-") in {packages!r}
        return iter(()) if hidden else super().find_distributions(context)

sys.meta_path[:] = [Finder if finder is PathFinder else finder for finder in sys.meta_path]
"""


@pytest.fixture(scope="session")
def only(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, str]]:
    """The environment of processes that find only the packages of a role's image, and none of ``without``."""

    def environment(role: str, *without: str) -> dict[str, str]:
        there = needed((IMAGES / f"{role}.txt").read_text(encoding="utf-8").splitlines()) | {"lazytrain"}
        owners = {name: {_plain(owner) for owner in of} for name, of in packages_distributions().items()}
        modules = {name for name, of in owners.items() if not there & of} | set(without)
        packages = {package for of in owners.values() for package in of} - there
        folder = tmp_path_factory.mktemp(role)
        # Python imports a module of this name when it starts, also in the processes that a process starts.
        (folder / "sitecustomize.py").write_text(HIDE.format(modules=modules, packages=packages), encoding="utf-8")
        return {**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), *filter(None, sys.path)))}

    return environment


def needed(lines: Iterable[str]) -> set[str]:
    """Names of the packages that pip would install for a file of requirements, as far as they are installed here."""
    asked = [Requirement(line) for line in lines if line and not line.startswith("#")]
    found: dict[str, set[str]] = {}
    while asked:
        one = asked.pop()
        name, extras = _plain(one.name), found.setdefault(_plain(one.name), set())
        if extras >= {"", *one.extras}:
            continue
        extras |= {"", *one.extras}
        try:
            wanted = distribution(name).requires or []
        except PackageNotFoundError:
            continue
        for each in map(Requirement, wanted):
            if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in extras):
                asked.append(each)
    return set(found)


def _plain(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")
