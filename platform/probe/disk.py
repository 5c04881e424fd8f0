"""The NVMe tier: is a directory on a disk, can it be written, how fast is it without the page cache."""

from __future__ import annotations

import errno
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_RAM_BACKED = frozenset({"tmpfs", "ramfs", "devtmpfs"})
_CHUNK_BYTES = 8 * 2**20
_REASONS = {
    errno.ENOENT: "unavailable (missing)",
    errno.ENOTDIR: "unavailable (not a directory)",
    errno.EACCES: "unavailable (permission)",
    errno.EPERM: "unavailable (permission)",
    errno.EROFS: "unavailable (read-only)",
    errno.ENOSPC: "unavailable (full)",
    errno.EDQUOT: "unavailable (quota)",
}


@dataclass(frozen=True)
class DiskTier:
    """What a planner may know of a directory; everything is zero unless ``available``."""

    path: Path
    available: bool
    reason: str
    """Empty when available, otherwise why the tier is left out."""
    free_bytes: int = 0
    read_bytes_s: float = 0.0
    write_bytes_s: float = 0.0


def probe_disk(
    path: str | Path,
    *,
    size_bytes: int = 64 * 2**20,
    seconds: float = 1.0,
    filesystem: Callable[[Path], str] | None = None,
) -> DiskTier:
    """Write, sync, read back, compare and delete a file of up to ``size_bytes`` in ``path``.

    Writing stops after ``seconds`` so that a slow disk does not hold everything up. The kernel is told to drop the
    pages before the file is read back. Nothing is raised: a directory that does not work is a tier with a reason.
    """
    directory = Path(path)
    kind = (filesystem or filesystem_of)(Path(os.path.realpath(directory)))  # unlike resolve(), never raises
    if kind in _RAM_BACKED:
        return DiskTier(directory, False, "refused (RAM-backed)")
    try:
        return _measure(directory, size_bytes, seconds)
    except OSError as error:
        reason = _REASONS.get(error.errno or 0, f"unavailable ({error.strerror or error})")
        return DiskTier(directory, False, reason)


def _measure(directory: Path, size_bytes: int, seconds: float) -> DiskTier:
    free = _free_bytes(directory)
    chunk = os.urandom(_CHUNK_BYTES)
    descriptor, name = tempfile.mkstemp(prefix=".lazytrain-probe-", dir=directory)
    try:
        written, write_s = _write(descriptor, chunk, min(size_bytes, free // 2), seconds)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        read_s = _read_back(descriptor, chunk, written)
    finally:
        os.close(descriptor)
        Path(name).unlink()
    return DiskTier(directory, True, "", free, written / read_s, written / write_s)


def _write(descriptor: int, chunk: bytes, size_bytes: int, seconds: float) -> tuple[int, float]:
    start = time.perf_counter()
    written = 0
    while written == 0 or (written < size_bytes and time.perf_counter() - start < seconds):
        if os.write(descriptor, chunk) != len(chunk):
            raise OSError(errno.ENOSPC, "short write")
        os.fsync(descriptor)
        written += len(chunk)
    return written, time.perf_counter() - start


def _read_back(descriptor: int, chunk: bytes, written: int) -> float:
    os.lseek(descriptor, 0, os.SEEK_SET)
    start = time.perf_counter()
    wrong = sum(os.read(descriptor, len(chunk)) != chunk for _ in range(written // len(chunk)))
    took = time.perf_counter() - start
    if wrong:
        raise OSError(errno.EIO, "the bytes read are not the bytes written")
    return took


def _free_bytes(directory: Path) -> int:
    stat = os.statvfs(directory)
    return stat.f_bavail * stat.f_frsize


def filesystem_of(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Type of the file system that holds ``path``, for example ``ext4`` or ``tmpfs``; empty when it is not known."""
    try:
        lines = mounts.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    best, kind = -1, ""
    for line in lines:
        fields, _, rest = line.partition(" - ")
        # Blanks in a mount point are written as \040 in mountinfo.
        point = Path(fields.split()[4].replace("\\040", " "))
        if path.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), rest.split()[0]
    return kind
