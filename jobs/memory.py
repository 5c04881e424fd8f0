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
        self._alive = AliveBytes()

    @property
    def live_bytes(self) -> int:
        """What is alive now."""
        return self._alive.bytes

    @property
    def peak_bytes(self) -> int:
        """The most that was, since `reset_peak`."""
        return self._alive.peak_bytes

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
        storage, budget = tensor.untyped_storage(), self.budget_bytes
        if not self._alive.add(storage, budget) and budget is not None:
            raise OutOfMemory(
                tier="gpu", requested_bytes=storage.nbytes(), used_bytes=self.live_bytes, budget_bytes=budget
            )

    def reset_peak(self) -> None:
        """Start a new peak from what is alive now."""
        self._alive.peak_bytes = self.live_bytes


class AliveBytes:
    """Bytes of storages until they are freed, by whatever thread.

    A weak reference's callback runs wherever something is freed, and a Ctrl-C that arrives in one is lost. So these run
    no Python code: they note that something was freed, and it is counted when somebody asks.
    """

    def __init__(self) -> None:
        self.peak_bytes = self._bytes = 0
        self._known: dict[int, _Storage] = {}
        self._freed: deque[_Storage] = deque()
        self._lock = threading.RLock()

    def add(self, storage: torch.UntypedStorage, budget_bytes: int | None = None) -> bool:
        """Count a storage, once; False, and it is not counted, where all would be more than ``budget_bytes``."""
        key, size = id(storage), storage.nbytes()
        with self._lock:  # two threads may add at once, what is freed by then is not there any more
            used = self.bytes
            if key in self._known or not size:
                return True
            if budget_bytes is not None and used + size > budget_bytes:
                return False
            held = self._known[key] = _Storage(storage, self._freed.append)
            held.key, held.size = key, size
            self._bytes += size
            self.peak_bytes = max(self.peak_bytes, self._bytes)
            return True

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
