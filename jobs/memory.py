"""Counts the bytes of tensors that are alive, as a GPU's allocator would, on any device and on fake tensors too."""

from __future__ import annotations

import threading
import weakref
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
        self.live_bytes = 0
        self.peak_bytes = 0
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._lock = threading.RLock()  # a storage may be freed by any thread, even inside `watch`

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
        key, size = id(storage), storage.nbytes()
        with self._lock:
            if key in self._known or not size:
                return
            if self.budget_bytes is not None and self.live_bytes + size > self.budget_bytes:
                raise OutOfMemory(
                    tier="gpu", requested_bytes=size, used_bytes=self.live_bytes, budget_bytes=self.budget_bytes
                )
            self._known[key] = (weakref.ref(storage, lambda _: self._forget(key)), size)
            self.live_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def reset_peak(self) -> None:
        """Start a new peak from what is alive now."""
        self.peak_bytes = self.live_bytes

    def _forget(self, key: int) -> None:
        with self._lock:
            _, size = self._known.pop(key)
            self.live_bytes -= size


def unseen() -> AbstractContextManager[object]:
    """While entered, no dispatch mode sees what this thread does: for views and empty tensors, which allocate nothing.

    An operation that a mode looks at takes the host ten times as long as one of these does by itself.
    """
    return torch._C._DisableTorchDispatch()


@cache
def _returns_an_argument(func: Any) -> bool:
    """Whether the operation gives back views of its arguments or the arguments themselves, so nothing is allocated."""
    return any(returned.alias_info is not None for returned in func._schema.returns)
