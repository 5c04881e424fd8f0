"""Whether a node has the same software as the head: what differs is found when it joins, not hours later in a job."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("lazytrain", "ray", "torch", "transformers")
_MUST_BE_EQUAL = ("lazytrain", "ray")
"""These talk to each other; of the others, as of Python, only major and minor version must be the same."""


@dataclass(frozen=True)
class Comparison:
    """What differs between a node and the head, in words."""

    problem: str = ""
    """The node cannot be used; empty if it can."""
    warning: str = ""
    """It can, and this should be known."""


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that matter; empty for one that is not installed."""
    return {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}


def compare(node: Mapping[str, str], head: Mapping[str, str]) -> Comparison:
    """The node's versions beside the head's. What the head does without, as a server does without torch, may be any."""
    unlike = {name: (node.get(name, ""), wanted) for name, wanted in head.items() if node.get(name, "") != wanted}
    differing = {name: pair for name, pair in unlike.items() if pair[1]}
    wrong = [name for name, pair in differing.items() if name in _MUST_BE_EQUAL or _minor(pair[0]) != _minor(pair[1])]
    return Comparison(_words(wrong, differing), _words([name for name in differing if name not in wrong], differing))


def _words(names: list[str], differing: Mapping[str, tuple[str, str]]) -> str:
    said = [f"{name} is {differing[name][0] or 'not installed'} there and {differing[name][1]} here" for name in names]
    return ", ".join(said)


def _minor(text: str) -> tuple[str, ...]:
    return tuple(text.split("+")[0].split(".")[:2])


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
