"""Old tokenized rows go when a cache has grown too large; what was used lately never does."""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path

LARGEST_BYTES = 32 << 30
"""Size above which a cache is pruned."""
SAFE_S = 24 * 3600.0
"""A folder that was used within so many seconds stays: a process may be about to open it."""
_KEY = re.compile(r"[0-9a-f]{16}")


def used(folder: Path) -> None:
    """Note that a folder of the cache is in use."""
    try:
        os.utime(folder)
    except OSError:
        return  # a cache that is only read is not pruned from here


def prune(cache: Path, *, largest_bytes: int = LARGEST_BYTES, now: float | None = None) -> list[str]:
    """Remove the folders that were not used for longest until the rest is small enough; give their names.

    What a killed process left half-written goes too. Processes that have a removed file mapped go on reading it.
    """
    before = (time.time() if now is None else now) - SAFE_S
    removed, kept = [], []
    for folder in [path for path in cache.iterdir() if path.is_dir()]:
        half_written = re.fullmatch(rf"\.{_KEY.pattern}\..+", folder.name) is not None
        try:
            last_used, size = folder.stat().st_mtime, sum(f.stat().st_size for f in folder.iterdir())
        except FileNotFoundError:
            continue  # another process prunes the same cache
        if half_written and last_used < before:
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder.name)
        elif _KEY.fullmatch(folder.name):
            kept.append((last_used, folder, size))
    total = sum(size for _, _, size in kept)
    for last_used, folder, size in sorted(kept):
        if total <= largest_bytes or last_used >= before:
            break
        shutil.rmtree(folder, ignore_errors=True)
        removed.append(folder.name)
        total -= size
    return removed
