"""What a layer keeps from its forward to its backward: outputs of its products, or everything autograd saves.

`Products` lets backward run the forward again without its products: their outputs are recorded in the first run and
handed out in the second, in order. `Graph` keeps the graph of the first run itself; since the slot holds another
layer's weights by the time backward comes, a saved weight is remembered by its place in the slot and looked up there.

Either can move to the host and back: ``storages`` are what it keeps, in a fixed order. A torch operation takes the host
some microseconds, and a layer keeps dozens of tensors: what stays on the device is kept without any that can be spared.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ..errors import ProgramError
from ..memory import unseen
from ..replay import PRODUCTS, Call, Gradients, Graphed


@dataclass(frozen=True, slots=True)
class View:
    """A tensor as a place in a storage."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    """Elements from the start of the storage."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> View:
        return cls(tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def on(self, memory: torch.UntypedStorage) -> torch.Tensor:
        """The same view of another storage."""
        tensor = torch.empty(0, dtype=self.dtype, device=memory.device)
        return tensor.set_(memory, self.offset, self.size, self.stride)


def whole(memory: torch.UntypedStorage) -> torch.Tensor:
    """A storage as a flat byte tensor."""
    with unseen():
        return torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)


@dataclass(slots=True)
class Storage:
    """A kept storage's memory on the device; None while it is on the host."""

    memory: torch.UntypedStorage | None


class Internals(ABC):
    """What is kept of one call of a layer.

    Whoever reads a storage holds it, so that backward frees each one as soon as it has used it.
    """

    def __init__(self, *, swapped: bool = False) -> None:
        """``swapped`` says whether what is kept moves to the host and back."""
        self.storages: list[Storage] = []
        self._swapped = swapped

    @abstractmethod
    def forward(self, call: Call, boundary: torch.Tensor, slot: torch.Tensor) -> Any:
        """Run the layer, whose weights are in ``slot``, and keep its internals."""

    @abstractmethod
    def backward(
        self,
        call: Call,
        boundary: torch.Tensor,
        slot: torch.Tensor,
        output_gradients: Sequence[torch.Tensor | None],
        parameters: Sequence[torch.nn.Parameter],
    ) -> Gradients:
        """Differentiate the layer, whose weights are now in ``slot``, with the help of what was kept."""


class Products(Internals):
    """Outputs of matrix products and of attention."""

    def __init__(self, *, swapped: bool = False) -> None:
        super().__init__(swapped=swapped)
        self._recorded: list[tuple[Any, Any]] = []  # operation, and its result with a place in `storages` per tensor

    def forward(self, call: Call, boundary: torch.Tensor, slot: torch.Tensor) -> Any:
        with _Recording(self._record, self._save):
            return call.forward(boundary)

    def backward(
        self,
        call: Call,
        boundary: torch.Tensor,
        slot: torch.Tensor,
        output_gradients: Sequence[torch.Tensor | None],
        parameters: Sequence[torch.nn.Parameter],
    ) -> Gradients:
        results = [(func, tree_map_only(Kept, Kept.tensor, result)) for func, result in self._recorded]
        self._recorded.clear()
        self.storages.clear()
        with _Replaying(results):
            graphed = call.forward_with_graph(boundary)
        return call.differentiate(graphed, output_gradients, parameters)

    def _save(self, written: torch.Tensor) -> None:
        """Keep a copy of a recorded product that the layer is about to write into."""
        for storage in self.storages:
            if storage.memory is not None and storage.memory.data_ptr() == written.untyped_storage().data_ptr():
                storage.memory = whole(storage.memory).clone().untyped_storage()

    def _record(self, func: Any, result: Any) -> None:
        kept = tree_map_only(torch.Tensor, lambda tensor: Kept.of(tensor, self.storages), result)
        self._recorded.append((func, kept))


class Graph(Internals):
    """Everything autograd saved in the forward, with the graph itself."""

    def __init__(self, *, swapped: bool = False) -> None:
        super().__init__(swapped=swapped)
        self._graphed: Graphed | None = None
        self._slot, self._boundary = Storage(None), Storage(None)

    def forward(self, call: Call, boundary: torch.Tensor, slot: torch.Tensor) -> Any:
        known = {_start(slot): self._slot, _start(boundary): self._boundary}
        others = {_start(tensor) for tensor in call.tensors()}
        storages, swapped = self.storages, self._swapped  # not `self`: the graph that it has would hold it for good

        def pack(tensor: torch.Tensor) -> Kept | torch.Tensor:
            start = _start(tensor)
            if start in others:
                return tensor.detach()  # masks and rotary tables: alive anyway, though not in the graph's own inputs
            if start not in known:
                if not swapped:
                    return tensor.detach()
                known[start] = Kept.of(tensor, storages).storage
            return Kept(known[start], View.of(tensor))

        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            self._graphed = call.forward_with_graph(boundary)
        known.clear()  # the graph holds `pack`, and would keep every storage through it until all of backward is done
        output = tree_map_only(torch.Tensor, torch.Tensor.detach, self._graphed.output)
        self._graphed.drop_values()
        return output

    def backward(
        self,
        call: Call,
        boundary: torch.Tensor,
        slot: torch.Tensor,
        output_gradients: Sequence[torch.Tensor | None],
        parameters: Sequence[torch.nn.Parameter],
    ) -> Gradients:
        assert self._graphed is not None
        self._slot.memory, self._boundary.memory = slot.untyped_storage(), boundary.untyped_storage()
        graphed, self._graphed = self._graphed, None
        self.storages.clear()
        return call.differentiate(graphed, output_gradients, parameters)


@dataclass(frozen=True, slots=True)
class Kept:
    """A kept tensor: its storage, and its place there."""

    storage: Storage
    view: View

    @classmethod
    def of(cls, tensor: torch.Tensor, storages: list[Storage]) -> Kept:
        """Keep a tensor by adding its storage to ``storages``."""
        storages.append(Storage(tensor.untyped_storage()))
        return cls(storages[-1], View.of(tensor))

    def tensor(self) -> torch.Tensor:
        assert self.storage.memory is not None, "internals are used only while they are on the device"
        with unseen():
            return self.view.on(self.storage.memory)


def _start(tensor: torch.Tensor) -> int:
    """Address of the tensor's storage."""
    return tensor.untyped_storage().data_ptr()


def _unpack(packed: Kept | torch.Tensor) -> torch.Tensor:
    return packed if isinstance(packed, torch.Tensor) else packed.tensor()


class _Recording(TorchDispatchMode):
    def __init__(self, record: Any, save: Any) -> None:
        super().__init__()
        self._record, self._save = record, save

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            for declared, value in zip(func._schema.arguments, args, strict=False):
                if declared.is_write and isinstance(value, torch.Tensor):
                    self._save(value)
        result = func(*args, **(kwargs or {}))
        if func in PRODUCTS:
            self._record(func, result)
        return result


class _Replaying(TorchDispatchMode):
    def __init__(self, results: list[tuple[Any, Any]]) -> None:
        super().__init__()
        results.reverse()
        self._results = results  # taken from the end, so that each is held no longer than it is needed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in PRODUCTS:
            return func(*args, **(kwargs or {}))
        recorded, result = self._results.pop() if self._results else (None, None)
        if recorded is not func:
            raise ProgramError(
                f"a layer runs {func} in its second forward where the first ran {recorded}",
                hint="plan with internals: none for this model",
            )
        return result
