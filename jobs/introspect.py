"""Facts of any Hugging Face decoder at one batch shape, measured on fake tensors: no weights, no GPU.

The model's own forward runs under FakeTensorMode, where tensors have shapes but no memory. Each unit it calls is
measured the way the executor will run it (see `measuring`). Units of equal structure are measured once.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only
from transformers import PretrainedConfig, PreTrainedModel

from .alike import Alike
from .effects import Places, apply, unit_call
from .errors import ModelError
from .fake_model import build, check_positions, config_of, positions_of, refusing, text_batch
from .head_loss import Logits, forward_in_chunks
from .measuring import Measured, bytes_of, measure, measure_head, untracked, variety_of, weights_of
from .memory import StorageTracker
from .model_facts import ModelFacts, UnitFacts, UnitKind
from .replay import Call
from .structure import LOOSE, Structure, find_structure, own_parameters, path_of

SCALARS_BYTES = 16
"""Of each layer and of the loss: numbers that stand for tensors which were freed, and sums."""
DType = Literal["float32", "bfloat16"]


def model_facts(
    model_or_config: PreTrainedModel | PretrainedConfig | dict[str, Any],
    *,
    micro_batch: int,
    sequence_length: int,
    dtype: DType = "bfloat16",
) -> ModelFacts:
    """Measure a causal language model, given as a model, a configuration or a configuration dict.

    Raises ModelError for a model that cannot be streamed, with the reason.
    """
    config = config_of(model_or_config)
    torch_dtype: torch.dtype = getattr(torch, dtype)
    with FakeTensorMode(), torch.no_grad(), refusing(config, micro_batch, sequence_length):
        model = build(model_or_config, torch_dtype)
        check_positions(model, sequence_length)
        units, few_tokens = Alike(), text_batch(model, 2, min(8, sequence_length))
        with units.once_each(_elements_of_lists(model), {}):
            structure = find_structure(model, lambda: model(**few_tokens))
        in_chunks = _loss_in_chunks(model, structure, units, few_tokens)
        trace = _Trace(model, structure, units, measures_head=not in_chunks)
        logits = trace.run(text_batch(model, micro_batch, sequence_length))
        head = trace.head_facts(micro_batch * sequence_length, logits, in_chunks=in_chunks)
    before, layers, after = trace.in_order()
    return ModelFacts(
        architecture=type(model).__name__,
        dtype=dtype,
        micro_batch=micro_batch,
        sequence_length=sequence_length,
        hidden_size=trace.hidden_size,
        vocabulary=logits.shape[-1],
        parameters=sum(unit.parameters for unit in (*before, *layers, *after, head) if not unit.shares_weights_with),
        side_bytes=trace.side_bytes + SCALARS_BYTES * (len(trace.in_order()[1]) + 1),
        input_stays=trace.input_stays,
        loose=tuple(structure.loose),
        loss="chunks" if in_chunks else "whole",
        positions=positions_of(config),
        before=before,
        layers=layers,
        after=after,
        head=head,
    )


def _elements_of_lists(model: nn.Module) -> dict[str, nn.Module]:
    """What may be a layer: of those that are alike, one is enough to see which parameters they read."""
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    outer = [(n, m) for n, m in lists if not any(n.startswith(f"{other}.") for other, _ in lists)]
    return {f"{name}.{i}": module for name, elements in outer for i, module in enumerate(elements)}


def _loss_in_chunks(model: PreTrainedModel, structure: Structure, units: Alike, text: dict[str, Any]) -> bool:
    """Whether the head is all that follows the base model, and the model's loss is that of its logits."""
    head, base = model.get_output_embeddings(), model.base_model
    path = structure.calls[-1]
    inside = {id(module) for module in base.modules()} if base is not model else set()
    if structure.modules.get(path) is not head or type(head) is not nn.Linear or Places(head, structure.loose).names:
        return False
    if any(id(module) not in inside for name, module in structure.modules.items() if name != path):
        return False
    labels = text["input_ids"].clone()
    try:
        with units.once_each(structure.modules, structure.loose):
            forward_in_chunks(model, model.forward, lambda states, labels: states.sum(), (), text, labels)
        Logits(model, model.forward, head.out_features)(torch.empty((2, head.in_features), dtype=head.weight.dtype))
    except Exception:  # whatever the model's code raises when there are no tokens: then all logits are made
        return False
    return True


class _Trace:
    """Measures every unit at the moment the model calls it."""

    def __init__(self, model: PreTrainedModel, structure: Structure, units: Alike, *, measures_head: bool) -> None:
        self.model, self.structure = model, structure
        self._units, self._measures_head = units, measures_head
        self.side_bytes = self.hidden_size = 0
        self.input_stays = False
        self._input: Callable[[], torch.UntypedStorage | None] = lambda: None  # that of the first layer
        self._tracker = StorageTracker()
        self._measured: list[UnitFacts] = []
        self._calls: Counter[str] = Counter()
        self._known: dict[tuple[Any, ...], Measured] = {}
        self._owner_of: dict[int, str] = {}
        self._places = {path: Places(module, structure.loose) for path, module in structure.modules.items()}

    def run(self, text: dict[str, Any]) -> torch.Tensor:
        """One forward pass; its logits."""
        if self.structure.loose:
            self._measured.append(self._loose_facts())
        modules = self.structure.modules
        for path, module in modules.items():
            module.forward = self._measuring(path, module, module.forward)
        try:
            with self._tracker:
                output = self.model(**text)
        finally:
            for module in modules.values():
                del module.forward
        if tuple(unit.name for unit in self._measured if unit.name != LOOSE) != self.structure.calls[:-1]:
            raise ModelError(f"{type(self.model).__name__} calls its parts in another order for rows of another length")
        if not isinstance(getattr(output, "logits", None), torch.Tensor):
            raise ModelError(f"{type(self.model).__name__} returns no logits, so it is no causal language model")
        self.side_bytes += sum(bytes_of(parameter) for parameter in self.structure.loose.values())
        logits: torch.Tensor = output.logits
        return logits

    def in_order(self) -> tuple[tuple[UnitFacts, ...], ...]:
        """What runs before the layers, the layers with all that runs between them, and what runs after them."""
        inside = [i for i, unit in enumerate(self._measured) if unit.name.startswith(f"{self.structure.layers}.")]
        if not inside:
            raise ModelError(f"{type(self.model).__name__} has no layers that run before its head")
        first, last = inside[0], inside[-1]
        kinds: list[UnitKind] = ["before" if i < first else "layer" if i <= last else "after" for i in range(last + 1)]
        kinds += ["after"] * (len(self._measured) - len(kinds))
        units = [unit.model_copy(update={"kind": kind}) for unit, kind in zip(self._measured, kinds, strict=True)]
        return tuple(units[:first]), tuple(units[first : last + 1]), tuple(units[last + 1 :])

    def owner(self, name: str, module: nn.Module) -> str:
        """Name of the earlier unit that has this unit's parameters too, or ""."""
        owners = {self._owner_of.setdefault(id(p), name) for p in self._own(module)}
        return "" if owners == {name} else owners.pop()

    def head_facts(self, tokens: int, logits: torch.Tensor, *, in_chunks: bool) -> UnitFacts:
        """The head with every token supervised: the largest it can be."""
        name = self.structure.calls[-1]
        module = self.structure.modules[path_of(name)]
        if in_chunks:
            facts = measure_head(self.model, name, tokens)
        else:
            size, in_float32 = bytes_of(logits), 4 * logits.numel()
            copied = 0 if size == in_float32 else size  # the gradient is converted back
            whole = size + 2 * in_float32 + copied  # the logits, their logarithms, the gradient
            facts = self._head.model_copy(
                update={
                    "kind": "head", "output_bytes": 0, "saved_bytes": 0, "saved_matmul_bytes": 0,
                    "forward_workspace_bytes": max(self._head.forward_workspace_bytes + size, whole),
                    "backward_workspace_bytes": self._head.backward_workspace_bytes + 2 * size,
                }
            )  # fmt: skip
        return facts.model_copy(update={"shares_weights_with": self.owner(name, module)})

    def _own(self, module: nn.Module) -> list[nn.Parameter]:
        return list(own_parameters(module, self.structure.loose).values())

    def _loose_facts(self) -> UnitFacts:
        return UnitFacts(
            name=LOOSE,
            kind="before",
            variety=LOOSE,
            **weights_of(list(self.structure.loose.values())),
            forward_flops=0.0,
            output_bytes=0,
            saved_bytes=0,
            saved_matmul_bytes=0,
            forward_workspace_bytes=0,
            backward_workspace_bytes=0,
        )

    def _measuring(self, path: str, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return forward(*args, **kwargs)
            self._calls[path] += 1
            name = path if self._calls[path] == 1 else f"{path}#{self._calls[path]}"
            call = unit_call(self._places[path], forward, self.structure.loose, args, kwargs)
            if name == self.structure.calls[-1]:
                self.hidden_size = call.leaves[call.boundary].shape[-1]
                if not self._measures_head:
                    return apply(call.forward(), args, kwargs)
            known = self._measured_once(name, module, call)
            self._note(name, module, call, known)
            return apply(tree_map_only(torch.Tensor, torch.empty_like, known.outcome), args, kwargs)

        return run

    def _note(self, name: str, module: nn.Module, call: Call, known: Measured) -> None:
        if name == self.structure.calls[-1]:
            self._head = known.facts.model_copy(update={"name": name})
            return
        boundary = bytes_of(call.leaves[call.boundary]) if call.boundary >= 0 else 0
        if self._was_layer() or self._is_layer(name):
            self._note_side(name, call, boundary)
        before = self._measured[-1].output_bytes if self._measured else 0
        self._measured.append(
            known.facts.model_copy(
                update={
                    "name": name,
                    "shares_weights_with": self.owner(name, module),
                    "input_bytes": 0 if boundary == before or not self._was_layer() else boundary,
                }
            )
        )

    def _note_side(self, name: str, call: Call, boundary: int) -> None:
        """What is alive beside the unit's input: the first layer's input, if the model's code holds it, and the rest.

        Where nothing comes before the layers, no operation makes their input, and it belongs to the rest.
        """
        given = call.leaves[call.boundary].untyped_storage() if call.boundary >= 0 else None
        if not self._was_layer() and given is not None and self._measured:
            self._input = weakref.ref(given)
        stays = self._input()
        beside = stays.nbytes() if stays is not None and stays is not given else 0
        if self._is_layer(name):
            self.input_stays = beside > 0
        self.side_bytes = max(self.side_bytes, self._tracker.live_bytes - boundary - beside)

    def _is_layer(self, name: str) -> bool:
        return name.startswith(f"{self.structure.layers}.")

    def _was_layer(self) -> bool:
        return any(self._is_layer(unit.name) for unit in self._measured)

    _inside = False

    def _measured_once(self, name: str, module: nn.Module, call: Call) -> Measured:
        key = self._units.key(name, module, call)
        if key not in self._known:
            self._inside = True
            with untracked():
                self._known[key] = measure(name, variety_of(module), self._own(module), call)
            self._inside = False
        return self._known[key]
