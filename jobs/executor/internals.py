"""What a layer keeps from its forward to its backward: outputs of its products, or everything autograd saves.

`Products` lets backward run the forward again without its products: their outputs are recorded in the first run and
handed out in the second, in order. `Graph` keeps the graph of the first run itself; since the slot holds another
layer's weights by the time backward comes, a saved weight is remembered by its place in the slot and looked up there.

Either can move to the host and back: ``storages`` are what it keeps, in a fixed order.
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
from ..replay import PRODUCTS, Call, Gradients, Graphed, output_tensors


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

    def on(self, storage: torch.Tensor) -> torch.Tensor:
        """The same view of ``storage``, a flat byte tensor (which may itself lie anywhere in a larger one)."""
        start = storage.storage_offset() * storage.element_size() // self.dtype.itemsize
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        return tensor.set_(storage.untyped_storage(), start + self.offset, self.size, self.stride)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The storage of ``tensor`` as a flat byte tensor."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


@dataclass(slots=True)
class Storage:
    """A kept storage as a flat byte tensor; None while it is on the host."""

    bytes: torch.Tensor | None


class Internals(ABC):
    """What is kept of one call of a layer.

    Whoever reads a storage holds it, so that backward frees each one as soon as it has used it.
    """

    def __init__(self) -> None:
        self.storages: list[Storage] = []

    def keep(self, tensor: torch.Tensor) -> Kept:
        """Keep a tensor's storage."""
        self.storages.append(Storage(whole(tensor)))
        return Kept(self.storages[-1], View.of(tensor))

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

    def __init__(self) -> None:
        super().__init__()
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
            if storage.bytes is not None and storage.bytes.data_ptr() == written.untyped_storage().data_ptr():
                storage.bytes = storage.bytes.clone()

    def _record(self, func: Any, result: Any) -> None:
        self._recorded.append((func, tree_map_only(torch.Tensor, self.keep, result)))


class Graph(Internals):
    """Everything autograd saved in the forward, with the graph itself."""

    def __init__(self) -> None:
        super().__init__()
        self._graphed: Graphed | None = None
        self._slot, self._boundary = Storage(None), Storage(None)

    def forward(self, call: Call, boundary: torch.Tensor, slot: torch.Tensor) -> Any:
        known = {whole(slot).data_ptr(): self._slot, whole(boundary).data_ptr(): self._boundary}
        others = {whole(tensor).data_ptr() for tensor in call.tensors()}

        def pack(tensor: torch.Tensor) -> Kept | torch.Tensor:
            start = whole(tensor).data_ptr()
            if start in others:
                return tensor.detach()  # masks and rotary tables: alive anyway, though not in the graph's own inputs
            if start not in known:
                known[start] = self.keep(tensor).storage
            return Kept(known[start], View.of(tensor))

        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            self._graphed = call.forward_with_graph(boundary)
        known.clear()  # the graph holds `pack`, and would keep every storage through it until all of backward is done
        output = tree_map_only(torch.Tensor, torch.Tensor.detach, self._graphed.output)
        for tensor in (*self._graphed.inputs, *output_tensors(self._graphed.output)):
            shape, one = tensor.shape, tensor.data.new_zeros(())
            tensor.data = one.expand(shape)  # the graph needs their shapes, not their values
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
        self._slot.bytes, self._boundary.bytes = whole(slot), whole(boundary)
        graphed, self._graphed = self._graphed, None
        self.storages.clear()
        return call.differentiate(graphed, output_gradients, parameters)


@dataclass(frozen=True, slots=True)
class Kept:
    """A kept tensor: its storage, and its place there."""

    storage: Storage
    view: View

    def tensor(self) -> torch.Tensor:
        assert self.storage.bytes is not None, "internals are used only while they are on the device"
        return self.view.on(self.storage.bytes)


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
