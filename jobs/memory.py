"""Counts the bytes of tensors that are alive, as a GPU's allocator would, on any device and on fake tensors too."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .errors import OutOfMemory


class StorageTracker(TorchDispatchMode):
    """While entered, counts every storage that an operation of this thread allocates, until it is freed.

    ``live_bytes`` and ``peak_bytes`` go on counting what was allocated inside after the mode is left. Passing
    ``budget_bytes`` raises OutOfMemory, as on a GPU.
    """

    def __init__(self, budget_bytes: int | None = None) -> None:
        super().__init__()
        self.budget_bytes = budget_bytes
        self.peak_bytes = 0
        self._alive = AliveBytes()

    @property
    def live_bytes(self) -> int:
        """What is alive now."""
        return self._alive.bytes

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled in here, and torch's guard for it costs as much as the counting

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not _returns_an_argument(func):
            for leaf in (result,) if isinstance(result, torch.Tensor) else tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    self.watch(leaf)
        return result

    def watch(self, tensor: torch.Tensor) -> None:
        """Count the storage of ``tensor`` until it is freed. Raises OutOfMemory when the budget is passed."""
        storage = tensor.untyped_storage()
        if storage in self._alive:
            return
        size, used = storage.nbytes(), self.live_bytes
        if self.budget_bytes is not None and used + size > self.budget_bytes:
            raise OutOfMemory(tier="gpu", requested_bytes=size, used_bytes=used, budget_bytes=self.budget_bytes)
        self._alive.add(storage)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def reset_peak(self) -> None:
        """Start a new peak from what is alive now."""
        self.peak_bytes = self.live_bytes


class AliveBytes:
    """Bytes of storages until they are freed, by whatever thread.

    A weak reference's callback runs wherever something is freed, and a Ctrl-C that arrives in one is lost. So these run
    no Python code: they note that something was freed, and it is counted when somebody asks.
    """

    def __init__(self) -> None:
        self._bytes, self._known = 0, dict[int, _Storage]()
        self._freed: deque[_Storage] = deque()
        self._lock = threading.Lock()

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        return self.bytes > 0 and id(storage) in self._known

    def add(self, storage: torch.UntypedStorage) -> None:
        """Count a storage that is not counted yet."""
        size = storage.nbytes()
        if size:
            with self._lock:
                held = self._known[id(storage)] = _Storage(storage, self._freed.append)
                held.key, held.size = id(storage), size
                self._bytes += size

    @property
    def bytes(self) -> int:
        """Of all storages that were added and are alive."""
        with self._lock:
            while self._freed:
                freed = self._freed.popleft()
                del self._known[freed.key]
                self._bytes -= freed.size
            return self._bytes


class _Storage(weakref.ref[torch.UntypedStorage]):
    """A storage, and what is known of it when it is no more."""

    key: int
    size: int


def unseen() -> AbstractContextManager[object]:
    """While entered, no dispatch mode sees what this thread does: for views and empty tensors, which allocate nothing.

    An operation that a mode looks at takes the host ten times as long as one of these does by itself.
    """
    return torch._C._DisableTorchDispatch()


@cache
def _returns_an_argument(func: Any) -> bool:
    """Whether the operation gives back views of its arguments or the arguments themselves, so nothing is allocated."""
    return any(returned.alias_info is not None for returned in func._schema.returns)
