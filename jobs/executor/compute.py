"""What compute operations do: run a unit, with its weights in place, forward, again, or backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..errors import ProgramError
from ..head_loss import Logits, RowLoss, Targets, loss_with_gradients, row_loss_with_gradients
from ..model_facts import ModelFacts
from ..policy import Op, Policy
from ..replay import Call, RngState, output_tensors
from .buffers import as_before
from .devices import Device
from .internals import Graph, Internals, Products
from .stores import ActivationStore, HostUnit
from .transfers import InFlight, Key, Transfers
from .weights import DeviceWeights

KEEP: dict[str, type[Internals]] = {"matmuls": Products, "all": Graph}


class Compute:
    """Runs units on the caller's thread; what they need is on the device."""

    def __init__(
        self,
        facts: ModelFacts,
        policy: Policy,
        units: Sequence[HostUnit],
        device: Device,
        weights: DeviceWeights,
        transfers: Transfers,
    ) -> None:
        self._facts, self._policy, self._units = facts, policy, units
        self._device, self._weights, self._transfers = device, weights, transfers
        self._first_layer, self._head = len(facts.before), len(units) - 1
        self._last_output = 0  # address of what the unit before returned

    @property
    def _in_flight(self) -> InFlight:
        return self._transfers.in_flight

    @property
    def _store(self) -> ActivationStore:
        return self._transfers.store

    # ---- forward

    def infer(self, op: Op, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a unit and keep nothing."""
        with self._weights.bound(op):
            return run(*args, **kwargs)

    def forward(self, op: Op, call: Call, boundary: torch.Tensor) -> Any:
        """Run a unit on its boundary; keep what the policy says."""
        key = (op.unit, op.micro)
        with self._weights.bound(op) as slot, self._noting(op, call):
            if op.internals == "none":
                output = call.forward(boundary)
            else:
                kept = self._in_flight.kept[key] = KEEP[op.internals](swapped=self._swaps(op.unit))
                output = kept.forward(call, boundary, slot)
        if self._home(op.unit) != "gpu":
            self._store.drop(key)
        self._in_flight.calls[key] = call
        self._last_output = next((tensor.data_ptr() for tensor in output_tensors(output)), 0)
        return output

    def forward_whole(self, op: Op, call: Call) -> Any:
        """Run the head, whose logits go to a loss that is not the engine's."""
        with self._weights.bound(op) as flat, self._noting(op, call):
            output = call.forward()
        self._weights.keep_for_head(op.micro, flat)
        self._in_flight.calls[self._head, op.micro] = call
        return output

    def recompute(self, op: Op) -> None:
        """Run a unit's forward once more, for the boundary after it."""
        key = (op.unit, op.micro)
        call = self._in_flight.calls[key]
        with self._weights.bound(op), self._replaying(op, call), torch.no_grad():
            output = call.forward(self._store.get(key))
        self._store.put((op.unit + 1, op.micro), output_tensors(output)[0])

    def take_boundary(self, key: Key, call: Call) -> torch.Tensor:
        """Give the unit's input to the store, so that the call itself does not keep it alive."""
        unit = key[0]
        if call.boundary < 0:
            boundary = torch.zeros(1, device=self._device.torch_device)  # stands for an input that is not kept
        else:
            boundary = call.leaves[call.boundary].detach()
        self._check_size(unit, boundary)
        if self._home(unit) == "recompute" and boundary.data_ptr() != self._last_output:
            raise ProgramError(
                f"the model changes what {self._units[unit - 1].name} returns before {self._units[unit].name} reads "
                "it, so that boundary cannot be recomputed",
                hint="give this boundary another home",
            )
        if call.boundary >= 0:
            call.leaves[call.boundary] = None
        self._store.put(key, boundary)
        return boundary

    # ---- loss and backward

    def loss(
        self, op: Op, logits: Logits, states: torch.Tensor, targets: Targets, normaliser: float | torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of flat ``states`` and its gradient for them; those of the head's parameters wait to be scaled."""
        host = self._units[self._head]
        with self._weights.bound(op):
            total, gradient, parameters = loss_with_gradients(
                logits, states, targets.rows, targets.tokens, normaliser, list(host.parameters.values())
            )
        self._in_flight.outgoing[self._head, op.micro] = dict(zip(host.parameters, parameters, strict=True))
        return total, gradient

    def row_loss(
        self, op: Op, logits: Logits, states: torch.Tensor, targets: Targets, row_loss: RowLoss
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same for a loss of the rows' log-probabilities."""
        host = self._units[self._head]
        with self._weights.bound(op):
            total, gradient, parameters = row_loss_with_gradients(
                logits, states, *targets, row_loss, list(host.parameters.values())
            )
        self._in_flight.outgoing[self._head, op.micro] = dict(zip(host.parameters, parameters, strict=True))
        return total, gradient

    def scale_loss(self, op: Op, state_gradient: torch.Tensor, scale: torch.Tensor) -> None:
        """Scale the head's gradients by that of the loss.

        By one too: it changes no bit, and to look whether it is one, the host would have to wait for the GPU.
        """
        for gradient in (state_gradient, *self._in_flight.outgoing[self._head, op.micro].values()):
            if gradient is not None:
                gradient.mul_(scale)

    def backward(self, op: Op, call: Call, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Run a unit again with a graph; its parameters' gradients wait to leave, those of its inputs are returned."""
        key, host = (op.unit, op.micro), self._units[op.unit]
        del self._in_flight.calls[key]
        wanted = list(host.parameters.values())
        boundary = None if op.unit == self._head else self._store.get(key)
        self._store.drop(key)
        with self._weights.bound(op) as slot, self._replaying(op, call):
            if op.internals == "none":
                inputs, parameters = call.backward(boundary, gradients, wanted)
            else:
                assert boundary is not None
                inputs, parameters = self._in_flight.kept.pop(key).backward(call, boundary, slot, gradients, wanted)
        self._in_flight.outgoing[key] = dict(zip(host.parameters, parameters, strict=True))
        return inputs

    def skip_forward(self, op: Op) -> None:
        """Do a forward that the model leaves out."""
        with self._weights.bound(op):
            pass  # they were loaded for nothing

    def skip_backward(self, op: Op) -> None:
        """Do a backward that autograd leaves out: the loss does not depend on the unit, all its gradients are zero."""
        key = (op.unit, op.micro)
        self._store.drop(key)
        self._in_flight.calls.pop(key, None)
        self._in_flight.kept.pop(key, None)
        if op.unit == self._head:
            self._weights.drop_for_head(op.micro)
        else:
            with self._weights.bound(op):
                pass  # they were loaded for nothing
        self._in_flight.outgoing[key] = dict.fromkeys(self._units[op.unit].parameters)

    # ---- helpers

    def _check_size(self, unit: int, boundary: torch.Tensor) -> None:
        layer = unit - self._first_layer
        if 0 <= layer < len(self._facts.layers) and boundary.nbytes > self._facts.boundary_bytes[layer]:
            raise ProgramError(
                f"the batch has activations of {boundary.nbytes:,} bytes a layer, the policy is for "
                f"{self._policy.micro_batch} x {self._policy.sequence_length} tokens: "
                f"{self._facts.boundary_bytes[layer]:,} bytes",
                hint="use a smaller micro-batch, or plan for the larger one",
            )

    def _home(self, unit: int) -> str:
        layer = unit - self._first_layer
        return self._policy.homes[layer] if 0 <= layer < len(self._facts.layers) else "gpu"

    def _swaps(self, unit: int) -> bool:
        return self._policy.layers[unit - self._first_layer].internals_home == "host"

    @contextmanager
    def _noting(self, op: Op, call: Call) -> Iterator[None]:
        """Note what the unit's first run does to random generators and buffers."""
        before, buffers = RngState.now(self._device.torch_device), self._units[op.unit].buffers
        buffers_before = buffers.before()
        yield
        call.rng = before.unless_unchanged(self._device.torch_device)
        if changed := buffers.changed(buffers_before):
            self._in_flight.buffers[op.unit, op.micro] = changed

    @contextmanager
    def _replaying(self, op: Op, call: Call) -> Iterator[None]:
        """Set random generators and buffers to what they were when the unit first ran, then back."""
        with as_before(self._in_flight.buffers.get((op.unit, op.micro), ())):
            if call.rng is None:
                yield
                return
            now = RngState.now(self._device.torch_device)
            call.rng.restore(self._device.torch_device)
            try:
                yield
            finally:
                now.restore(self._device.torch_device)
