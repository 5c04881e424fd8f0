"""What a run was made with: versions of Python and its packages, the processor, and the state of the git checkouts."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from .frozen import Frozen

PACKAGES = (
    "lazytrain",
    "torch",
    "transformers",
    "datasets",
    "tokenizers",
    "safetensors",
    "peft",
    "bitsandbytes",
    "ray",
)
_PATIENCE_S = 5.0
"""For git, which may look at very many files on a slow disk."""


class Checkout(Frozen):
    """A git checkout as it was."""

    folder: str
    commit: str
    branch: str
    """Empty for a detached one."""
    dirty: bool
    """Whether files that git knows were changed."""


class Provenance(Frozen):
    """Of one process that works on a run."""

    python: str
    system: str
    packages: dict[str, str]
    """Versions by name, of those that are installed."""
    source: Checkout | None
    """Where this package's own source lies, if that is a checkout."""
    working_directory: Checkout | None
    """The checkout that the process was started in, if there is one."""

    @classmethod
    def here(cls) -> Provenance:
        """Of this process."""
        return cls(
            python=platform.python_version(),
            system=platform.platform(),
            packages={name: found for name in PACKAGES if (found := _version(name))},
            source=checkout_of(Path(__file__).resolve().parent),
            working_directory=checkout_of(Path.cwd()),
        )


def checkout_of(folder: Path) -> Checkout | None:
    """The git checkout that holds a folder; None where there is none, no git, or no answer within seconds."""
    try:
        top = _git(folder, "rev-parse", "--show-toplevel")
        commit, branch = _git(folder, "rev-parse", "HEAD"), _git(folder, "branch", "--show-current")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return Checkout(folder=top, commit=commit, branch=branch, dirty=bool(changed))


def _git(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), "--no-optional-locks", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=_PATIENCE_S).stdout.strip()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
