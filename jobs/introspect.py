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
from torch.utils._pytree import tree_leaves, tree_map_only
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
        trace = _Trace(model, structure, units, in_chunks=in_chunks)
        trace.run(micro_batch, sequence_length)
        head = trace.head_facts(micro_batch * sequence_length)
    before, layers, after = trace.in_order()
    return ModelFacts(
        architecture=type(model).__name__,
        dtype=dtype,
        micro_batch=micro_batch,
        sequence_length=sequence_length,
        hidden_size=trace.hidden_size,
        vocabulary=trace.vocabulary,
        parameters=sum(unit.parameters for unit in (*before, *layers, *after, head) if not unit.shares_weights_with),
        side_bytes=trace.side_bytes + SCALARS_BYTES * (len(trace.in_order()[1]) + 1),
        summed_bytes=trace.summed_bytes,
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
    """Measures every unit at the moment the model calls it.

    What the model does between its units (sums of embeddings, dropout) records a graph, as in training, so that what
    that keeps for backward counts as lying beside the units.
    """

    def __init__(self, model: PreTrainedModel, structure: Structure, units: Alike, *, in_chunks: bool) -> None:
        """``in_chunks`` says whether the loss is made from the last hidden states, chunk by chunk."""
        self.model, self.structure = model, structure
        self._units, self._in_chunks = units, in_chunks
        self.side_bytes = self.summed_bytes = self.hidden_size = self.vocabulary = 0
        self.input_stays = False
        self._input: Callable[[], torch.UntypedStorage | None] = lambda: None  # that of the first layer
        self._tracker = StorageTracker()
        self._measured: list[UnitFacts] = []
        self._calls: Counter[str] = Counter()
        self._known: dict[tuple[Any, ...], Measured] = {}
        self._held: list[Any] = []  # arguments of units that stay until their backward
        self._beside: list[int] = []  # for each unit, bytes that are alive beside it while it runs forward
        self._sums: dict[int, int] = {}  # bytes of gradients that are added up, by what they are of
        self._replaced: set[int] = set()  # loose parameters whose gradient takes their place
        self._early: set[int] = set()  # those that may be there before the backward of the last layer
        self._anchor = torch.zeros((), requires_grad=True)
        self._owner_of: dict[int, str] = {}
        self._places = {path: Places(module, structure.loose) for path, module in structure.modules.items()}
        read = (name for call in structure.calls for name in self._places[path_of(call)].names)
        self._readers = Counter(id(structure.loose[name]) for name in read)

    def run(self, rows: int, length: int) -> None:
        """One forward pass, on a batch that lies on the device too."""
        if self.structure.loose:
            self._measured.append(self._loose_facts())
            self._beside.append(0)
        modules = self.structure.modules
        for path, module in modules.items():
            module.forward = self._measuring(path, module, module.forward)
        try:
            with torch.enable_grad(), self._tracker:
                text = text_batch(self.model, rows, length)
                labels, targets = torch.ones_like(text["input_ids"]), torch.empty((2, rows, length), dtype=torch.int64)
                output = self._forward(text, labels)
        finally:
            for module in modules.values():
                del module.forward
        if tuple(unit.name for unit in self._measured if unit.name != LOOSE) != self.structure.calls[:-1]:
            raise ModelError(f"{type(self.model).__name__} calls its parts in another order for rows of another length")
        graph = [leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        logits = _logits_of(output, self.model)
        self.vocabulary, self._logit_bytes = logits.shape[-1], logits.element_size()
        del output, logits, targets
        self._settle(self._tracker.live_bytes)
        graph.clear()
        self._held.clear()

    def _forward(self, text: dict[str, Any], labels: torch.Tensor) -> Any:
        """What the model returns; the logits are those of no token where the loss is made in chunks."""
        if not self._in_chunks:
            return self.model(**text)
        return forward_in_chunks(self.model, self.model.forward, lambda states, _: states.sum(), (), text, labels)

    def _settle(self, stays_bytes: int) -> None:
        """What stays when the forward is over lies beside the units all along, the rest beside those that it ran with.

        Loose parameters lie there too, and gradients that are added up.
        """
        *passing, self._beside_head = (max(0, beside - stays_bytes) for beside in self._beside)
        self._measured = [_with_more_forward(unit, more) for unit, more in zip(self._measured, passing, strict=True)]
        loose = sum(bytes_of(parameter) for parameter in self.structure.loose.values())
        self.summed_bytes = sum(size for key, size in self._sums.items() if key not in self._early)
        self.side_bytes = stays_bytes + loose + sum(self._sums.values())

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

    def head_facts(self, tokens: int) -> UnitFacts:
        """The head with every token supervised: the largest it can be."""
        name = self.structure.calls[-1]
        module = self.structure.modules[path_of(name)]
        if self._in_chunks:
            facts = measure_head(self.model, name, tokens)
            more = facts.forward_workspace_bytes + self._beside_head
            facts = facts.model_copy(update={"forward_workspace_bytes": more, "backward_workspace_bytes": more})
        else:
            elements = tokens * self.vocabulary
            size, in_float32 = elements * self._logit_bytes, 4 * elements
            copied = 0 if size == in_float32 else size  # the gradient is converted back
            whole = size + 2 * in_float32 + copied  # the logits, their logarithms, the gradient
            forward = max(self._head.forward_workspace_bytes + size, whole) + self._beside_head
            facts = self._head.model_copy(
                update={
                    "kind": "head", "output_bytes": 0, "saved_bytes": 0, "saved_matmul_bytes": 0,
                    "forward_workspace_bytes": forward,
                    "backward_workspace_bytes": self._head.backward_workspace_bytes + size,
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
            given = [tensor for tensor in call.tensors() if tensor.requires_grad]
            call.leaves = [self._apart(name, leaf) for leaf in call.leaves]
            boundary = bytes_of(call.leaves[call.boundary]) if call.boundary >= 0 else 0
            self._look_around(name, call, boundary)
            if name == self.structure.calls[-1]:
                self.hidden_size = call.leaves[call.boundary].shape[-1]
                if self._in_chunks:
                    with torch.no_grad():
                        outcome = call.forward()
                    return apply(self._made_like(outcome, given), args, kwargs)
            with torch.no_grad():
                known = self._measured_once(name, module, call)
            self._note(name, module, boundary, known)
            self._hold(name, call)
            return apply(self._made_like(known.outcome, given), args, kwargs)

        return run

    def _hold(self, name: str, call: Call) -> None:
        """A unit's arguments stay until its backward; the boundaries of layers, and what follows, have their homes.

        Of what several units get beside their boundary, autograd adds the gradients up, and keeps those of loose
        parameters to the end.
        """
        has_home = not self._beyond and (self._was_layer() or self._is_layer(name))
        beside = [leaf for i, leaf in enumerate(call.leaves) if not has_home or i != call.boundary]
        self._held.append([leaf for leaf in beside if isinstance(leaf, torch.Tensor)])
        read = [leaf for leaf in call.leaves if isinstance(leaf, nn.Parameter) and leaf.requires_grad]
        for leaf in (*call.beside(), *read):
            key = leaf.untyped_storage()._cdata
            self._sums[key] = 0 if key in self._replaced else bytes_of(leaf)
            if not self._is_layer(name) or isinstance(leaf, nn.Parameter):
                self._early.add(key)

    def _made_like(self, outcome: Any, given: list[torch.Tensor]) -> Any:
        """What a unit returns, in the graph of what it was given."""
        return tree_map_only(torch.Tensor, lambda like: _Made.apply(self._anchor, like, *given), outcome)

    def _apart(self, name: str, leaf: Any) -> Any:
        """An argument without its graph, to which nothing that is measured adds.

        A loose parameter that only one unit reads is left: its gradient is handed on, as those of units' own are. That
        of the head takes the place of the parameter, which goes when the head's backward is over.
        """
        is_own = isinstance(leaf, nn.Parameter) and self._readers[id(leaf)] == 1
        if is_own and name == self.structure.calls[-1]:
            self._replaced.add(leaf.untyped_storage()._cdata)
            is_own = False
        return leaf.detach() if isinstance(leaf, torch.Tensor) and not is_own else leaf

    def _look_around(self, name: str, call: Call, boundary: int) -> None:
        """Note what is alive when a unit is called.

        What the layer before has returned beside this unit's boundary was its own while it ran, and is the model's now:
        if it is alive, it is among that.
        """
        seen = self._was_layer() or self._is_layer(name)
        self._beside.append(self._bytes_beside(name, call, boundary) if seen else 0)
        after = self._was_layer() and not self._is_layer(name)
        self._beyond = max(0, boundary - self._measured[-1].output_bytes) if after else 0
        rest = self._measured[-1].output_bytes - boundary if self._was_layer() and boundary else 0
        if rest > 0:
            wider = _with_more_forward(self._measured[-1], rest)
            self._measured[-1] = wider.model_copy(update={"output_bytes": boundary})

    def _note(self, name: str, module: nn.Module, boundary: int, known: Measured) -> None:
        more = known.facts.backward_workspace_bytes + self._beyond  # the program has room for the output before
        facts = known.facts.model_copy(update={"name": name, "backward_workspace_bytes": more})
        if name == self.structure.calls[-1]:
            self._head = facts
            return
        before = self._measured[-1].output_bytes if self._measured else 0
        self._measured.append(
            facts.model_copy(
                update={
                    "shares_weights_with": self.owner(name, module),
                    "input_bytes": 0 if boundary == before or not self._was_layer() else boundary,
                }
            )
        )

    def _bytes_beside(self, name: str, call: Call, boundary: int) -> int:
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
        return self._tracker.live_bytes - boundary - beside

    def _is_layer(self, name: str) -> bool:
        return name.startswith(f"{self.structure.layers}.")

    def _was_layer(self) -> bool:
        return any(self._is_layer(unit.name) for unit in self._measured)

    _inside = False
    _beyond = 0  # bytes by which the unit's input is larger than what the unit before has returned

    def _measured_once(self, name: str, module: nn.Module, call: Call) -> Measured:
        key = self._units.key(name, module, call)
        if key not in self._known:
            self._inside = True
            with untracked():
                self._known[key] = measure(name, variety_of(module), self._own(module), call)
            self._inside = False
        return self._known[key]


def _with_more_forward(unit: UnitFacts, passing: int) -> UnitFacts:
    """The unit with so many bytes more that are alive while it runs forward, whatever it keeps."""
    if not passing:
        return unit
    changes: dict[str, Any] = {"forward_workspace_bytes": unit.forward_workspace_bytes + passing}
    for field in ("keeping_matmuls_bytes", "keeping_all_bytes"):
        if measured := getattr(unit, field):
            changes[field] = (measured[0] + passing, measured[1])
    return unit.model_copy(update=changes)


def _logits_of(output: Any, model: PreTrainedModel) -> torch.Tensor:
    logits = getattr(output, "logits", None)
    if not isinstance(logits, torch.Tensor):
        raise ModelError(f"{type(model).__name__} returns no logits, so it is no causal language model")
    return logits


class _Made(torch.autograd.Function):
    """A tensor like the one given, as what a unit returns has it: with a gradient, and saving nothing."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, like: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        made = torch.empty_like(like)
        if not made.is_floating_point():
            ctx.mark_non_differentiable(made)
        return made
