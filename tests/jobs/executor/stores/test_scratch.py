"""Every kind of scratch file keeps the same promises."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
import threading

import pytest
import torch

from lazytrain.jobs.errors import InputError, OutOfMemory, StorageError
from lazytrain.jobs.executor.devices import CpuDevice
from lazytrain.jobs.executor.devices.host import page_aligned
from lazytrain.jobs.executor.stores import nvme
from lazytrain.jobs.executor.stores.gpudirect import GpuDirectFile
from lazytrain.jobs.executor.stores.nvme import REQUEST_BYTES, NvmeFile, direct_io_problem
from lazytrain.jobs.executor.stores.scratch import ALIGNMENT


def buffered(directory):
    nvme._tried.cache_clear()
    nvme._direct_problem, kept = (lambda path: "the test says so"), nvme._direct_problem
    try:
        return NvmeFile(directory)
    finally:
        nvme._direct_problem = kept
        nvme._tried.cache_clear()


@pytest.fixture(params=["direct", "buffered", "gpudirect"])
def make(request, gpudirect, tmp_path):
    kinds = {"direct": NvmeFile, "buffered": buffered, "gpudirect": lambda path: GpuDirectFile(path, CpuDevice())}
    made = []

    def make(directory=tmp_path):
        made.append(kinds[request.param](directory))
        return made[-1]

    yield make
    for file in made:
        file.close()


def noise(numel, seed=0):
    return page_aligned(numel).random_(generator=torch.Generator().manual_seed(seed))


class TestEveryScratchFile:
    @pytest.mark.parametrize("size", [1, ALIGNMENT - 1, ALIGNMENT, 3 * ALIGNMENT + 7, 2 * REQUEST_BYTES + 4097])
    def test_what_was_written_is_read(self, make, size):
        file = make()
        offsets = [file.reserve(size) for _ in range(3)]
        for seed, offset in enumerate(offsets):
            file.write(offset, noise(size, seed))
        for seed, offset in enumerate(offsets):
            into = page_aligned(size)
            file.read(offset, into)
            assert torch.equal(into, noise(size, seed))

    def test_any_dtype_and_memory_that_is_not_aligned(self, make):
        file, values = make(), torch.randn(3000)
        offset = file.reserve(values.nbytes)
        file.write(offset, values[1:].view(1, -1))
        into = torch.empty(2999)
        file.read(offset, into)
        assert torch.equal(into, values[1:])

    def test_regions_are_aligned_and_room_is_taken_before_anything_is_written(self, make):
        file = make()
        offsets = [file.reserve(5000) for _ in range(3)]
        assert offsets == [0, 8192, 16384]
        assert os.fstat(file._fd).st_blocks * 512 >= file.size == 24576

    def test_transfers_from_several_threads(self, make):
        file, size = make(), 3 * ALIGNMENT + 100
        offsets = [file.reserve(size) for _ in range(8)]
        threads = [threading.Thread(target=file.write, args=(o, noise(size, i))) for i, o in enumerate(offsets)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for seed, offset in enumerate(offsets):
            into = page_aligned(size)
            file.read(offset, into)
            assert torch.equal(into, noise(size, seed))

    def test_it_has_no_name(self, make, tmp_path):
        file = make()
        file.write(file.reserve(10), noise(10))
        assert list(tmp_path.iterdir()) == []

    def test_reading_past_the_end_is_a_typed_error(self, make):
        file = make()
        file.reserve(ALIGNMENT)
        with pytest.raises(StorageError, match="nvme") as caught:
            file.read(0, page_aligned(2 * ALIGNMENT))
        assert (caught.value.tier, caught.value.nbytes) == ("nvme", 2 * ALIGNMENT)

    def test_a_missing_directory_is_refused_by_name(self, make, tmp_path):
        with pytest.raises(InputError, match="no-such"):
            make(tmp_path / "no-such")


def test_a_full_disk_says_how_much_was_wanted(tmp_path, monkeypatch):
    file = NvmeFile(tmp_path)
    file.reserve(ALIGNMENT)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OutOfMemory, match="out of memory on nvme") as caught:
        file.reserve(10_000)
    assert (caught.value.tier, caught.value.requested_bytes, caught.value.used_bytes) == ("nvme", 12288, 4096)
    assert str(tmp_path) in caught.value.hint
    file.close()


def test_trying_a_directory_draws_no_random_number(tmp_path):
    before = torch.get_rng_state()
    NvmeFile(tmp_path).close()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("code", "kind"), [(errno.EIO, StorageError), (errno.ENOSPC, OutOfMemory)])
def test_a_disk_that_fails_while_writing(tmp_path, monkeypatch, code, kind):
    file = NvmeFile(tmp_path)
    offset = file.reserve(2 * REQUEST_BYTES)

    def fail(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwritev", fail)
    with pytest.raises(kind) as caught:
        file.write(offset, page_aligned(2 * REQUEST_BYTES))
    assert caught.value.tier == "nvme"
    file.close()


def test_a_write_that_moves_less_goes_on_until_all_has_moved(tmp_path, monkeypatch):
    file, data, calls = NvmeFile(tmp_path), noise(4 * ALIGNMENT), []
    whole = os.pwritev

    def short(descriptor, views, offset):
        calls.append(offset)
        return whole(descriptor, [views[0][:ALIGNMENT]], offset)

    monkeypatch.setattr(os, "pwritev", short)
    offset = file.reserve(data.nbytes)
    file.write(offset, data)
    into = page_aligned(data.nbytes)
    file.read(offset, into)
    assert torch.equal(into, data)
    assert len(calls) == 4
    file.close()


def test_a_large_transfer_is_several_requests_on_the_direct_descriptor(tmp_path, monkeypatch):
    if direct_io_problem(tmp_path):
        pytest.skip("this file system has no direct I/O")
    file, seen = NvmeFile(tmp_path), []
    whole = os.pwritev

    def watched(descriptor, views, offset):
        seen.append((descriptor == file._direct, len(views[0]), offset % ALIGNMENT, threading.current_thread().name))
        return whole(descriptor, views, offset)

    monkeypatch.setattr(os, "pwritev", watched)
    size = 3 * REQUEST_BYTES + ALIGNMENT + 5
    file.write(file.reserve(size), page_aligned(size))
    assert sorted((direct, length) for direct, length, _, _ in seen) == sorted(
        [(True, REQUEST_BYTES)] * 3 + [(True, ALIGNMENT), (False, 5)]
    )
    assert all(name.startswith("lazytrain-io") for *_, name in seen)
    file.close()


def test_a_file_system_without_direct_io_is_said_so_once(tmp_path, monkeypatch, caplog):
    real = os.open

    def refusing(path, flags, *rest):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", refusing)
    nvme._tried.cache_clear()
    try:
        files = [NvmeFile(tmp_path) for _ in range(2)]
    finally:
        nvme._tried.cache_clear()
    assert files[0].how == "buffered I/O, because the file system refuses O_DIRECT (Invalid argument)"
    assert len([record for record in caplog.records if "buffered" in record.getMessage()]) == 1
    for file in files:
        file.close()


def test_a_read_only_directory_is_refused(tmp_path, monkeypatch):
    def refuse(**_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    with pytest.raises(InputError, match=r"nvme in .*Read-only file system") as caught:
        NvmeFile(tmp_path)
    assert "plan.nvme" in caught.value.hint


def test_nothing_is_left_after_a_kill(tmp_path):
    code = (
        "import sys, os, signal; from pathlib import Path; import torch\n"
        "from lazytrain.jobs.executor.stores.nvme import NvmeFile\n"
        "f = NvmeFile(Path(sys.argv[1])); f.write(f.reserve(10**6), torch.zeros(10**6, dtype=torch.uint8))\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=120)
    assert ended.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []
