"""The step time of the lowered policy, exactly, as linear constraints on the choices.

Every stream runs its operations in a fixed order, so the step time is the longest path through the program, and an
operation that is not chosen lasts zero: one variable for the end of each operation, one constraint for each that it
waits for. Order and waits are those of `jobs.policy.lowering`; times are in units of the problem's horizon.

Before the backward of layer e - 1 there is room for the recomputes of the longest block that may end at boundary e; a
shorter block leaves the first of them empty. What a load waits for depends on the block (`ring`): the later the wait,
the longer the block, so each wait is switched on by the edges that are at least that long.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property

from ...jobs.model_facts import UnitFacts
from ...jobs.policy.lowering import HEAD_AHEAD
from ..costs import backward_forwards
from .choices import Choices
from .linear import fast_sum
from .problem import Shape
from .ring import Access, Ring, Use
from .stalls import add_backward_stalls, add_forward_stalls
from .streams import Streams
from .variables import Edge, Term


@dataclass(slots=True)
class _Pair:
    """What frees the two staging buffers of NVMe: the end of their last use, and of the one before it."""

    last: Term = 0.0
    second: Term = 0.0


@dataclass(slots=True)
class Micro:
    """What one micro-batch's backward needs of its forward."""

    number: int
    staged: _Pair = field(default_factory=_Pair)
    forwards: list[Term] = field(default_factory=list)
    after_forward: list[Term] = field(default_factory=list)
    offloads: list[Term] = field(default_factory=list)
    swaps: list[Term] = field(default_factory=list)
    writes: list[Term] = field(default_factory=list)
    reads: dict[int, Term] = field(default_factory=dict)
    reloads: dict[int, Term] = field(default_factory=dict)
    uses: dict[Use, Term] = field(default_factory=dict)


class Timing(Streams):
    """Adds the times of ``choices`` to its model; ``step`` is the step time over the horizon."""

    def __init__(self, choices: Choices, shape: Shape | None = None) -> None:
        shape = shape or choices.problem.shape
        super().__init__(choices, shape)
        self.ring = Ring(self.layers, shape.weight_slots, shape.resident)
        self._add_updates()
        before = None
        for number in range(self.problem.accumulation):
            if number and self.problem.repeats:
                before = self._begin_again()
            self._add_micro_batch(Micro(number))
        self._add_step(before)
        self._add_host_memory()

    @cached_property
    def blocks(self) -> dict[Edge, list[Access]]:
        """The uses of layers within each block."""
        return {edge: self.ring.block(*edge) for edge in self.choices.edges}

    def _add_micro_batch(self, micro: Micro) -> None:
        self._add_forward(micro)
        self._add_backward(micro)

    # ---- forward

    def _load_unit(self, u: int, ahead: int) -> Term:
        """Load a unit that is no layer; one that may come before a micro-batch begins at time zero costs it nothing."""
        if self._began_again and len(self.mains) < ahead:
            return self.last["h2d"]
        freed = [self.mains[-ahead]] if len(self.mains) >= ahead else []
        seconds = self.units[u].weight_bytes * self._per_byte(self.profile.h2d_bytes_s)
        return self._on("h2d", seconds, self.updated[u], *freed)

    def _copies_due(self, micro: Micro, position: int) -> list[Term]:
        """Copies out that the compute operation ``position`` after the first layer's forward waits for.

        In later micro-batches a copy that is not chosen would stand behind the gradients of the one before, so there
        the wait ends at 0 for it.
        """
        i = position - self.staging
        if not 0 <= i < self.layers:
            return []
        made = i or self.first  # what the model is given stays where it is
        due = [(micro.offloads[i], self.choices.away[i])] if micro.offloads and made else []
        if self.choices.swaps(i):
            due.append((micro.swaps[i], self.choices.swapped(i)))
        return [end if not micro.number else end + chosen - 1 for end, chosen in due]

    def _add_forward(self, micro: Micro) -> None:
        for u in range(self.first):
            self._compute(1.0, self.units[u], self._load_unit(u, 2))
        for i in range(self.layers):
            load = self._load_forward(micro, i)
            self._add_offload(micro, i)
            end = self._compute(1.0, self.facts.layers[i], *load, *self._copies_due(micro, i))
            micro.forwards.append(end)
            micro.uses[Use("forward", i)] = end
            if self.choices.swaps(i):
                seconds = self.choices.kept_bytes(i, "host") * self._per_byte(self.profile.d2h_bytes_s)
                micro.swaps.append(self._on("d2h", seconds, end))
            else:
                micro.swaps.append(end)
        for u in range(self.first + self.layers, self.head + 1):
            load = [self._load_unit(u, HEAD_AHEAD)]
            forwards = 1.0 if u < self.head else 1.0 + backward_forwards(self.units[u], self.profile)
            self._compute(forwards, self.units[u], *load, *self._copies_due(micro, u - self.first))
        micro.after_forward = self.mains[-(self.head + 1 - self.first) + 1 :]
        self._add_reads(micro)
        add_forward_stalls(self.choices, self.scale, micro.forwards, self.staging)

    def _load_forward(self, micro: Micro, i: int) -> list[Term]:
        if micro.number and self.ring.stays_from_backward(i):
            return []
        after = self.ring.forward_after(i)
        freed = [micro.forwards[after]] if after is not None else []
        seconds = self.facts.layers[i].weight_bytes * self._per_byte(self.profile.h2d_bytes_s)
        return [self._on("h2d", seconds, self.updated[self.first + i], *freed)]

    def _add_offload(self, micro: Micro, i: int) -> None:
        """Copy a boundary out while its layer computes, and on to NVMe where it lives there."""
        if not self.choices.has_away:
            return
        size, nvme = self.choices.sizes[i], self.choices.nvme[i]
        seconds = size * self._per_byte(self.profile.d2h_bytes_s) * self.choices.away[i]
        offload = self._on("d2h", seconds, *self.mains[-1:])
        micro.offloads.append(offload)
        if nvme is None:
            micro.writes.append(offload)
            return
        self._wait(offload, seconds, micro.staged.second, nvme)
        written = self._on("nvme_write", size * self._per_byte(self.profile.nvme_write_bytes_s) * nvme, offload)
        micro.writes.append(written)
        self._advance(micro.staged, written, nvme)

    def _advance(self, pair: _Pair, end: Term, chosen: Term) -> None:
        """Note an operation that ends at ``end`` if it is chosen."""
        second, last = self._end(0.0, pair.second), self._end(0.0, pair.last)
        self._wait(second, 0.0, pair.last, chosen)
        self._wait(last, 0.0, end, chosen)
        pair.second, pair.last = second, last

    def _add_reads(self, micro: Micro) -> None:
        """Reads from NVMe, highest layer first, as soon as one of two staging buffers is empty.

        A reload from the host stands behind its boundary's read, which is not chosen then. So that one waits for no
        write, and for nothing that the stream did before: only for the reads above it, as the reload does anyway.
        """
        before, self.last["nvme_read"] = self.last["nvme_read"], 0.0
        for i in range(self.layers - 1, -1, -1):
            nvme = self.choices.nvme[i]
            if nvme is None:
                continue
            seconds = self.choices.sizes[i] * self._per_byte(self.profile.nvme_read_bytes_s) * nvme
            micro.reads[i] = self._on("nvme_read", seconds)
            for other in (before, micro.writes[i], micro.staged.second):
                self._wait(micro.reads[i], seconds, other, nvme)
            micro.reloads[i] = self._end(0.0)
            self._advance(micro.staged, micro.reloads[i], nvme)
        self.last["nvme_read"] = self._end(0.0, self.last["nvme_read"], before)

    # ---- backward

    def _add_backward(self, micro: Micro) -> None:
        position = self.head + 1 - self.first
        self._compute(0.0, self.facts.head, *self._copies_due(micro, position))
        self._add_gradient(self.head)
        for u in range(self.head - 1, self.first + self.layers - 1, -1):
            position += 1
            load = self._load_unit(u, 2)
            self._compute(self._again(self.units[u]), self.units[u], load, *self._copies_due(micro, position))
            self._add_gradient(u)
        for i in range(self.layers - 1, -1, -1):
            position += 1
            self._add_layer_backward(micro, i, self._copies_due(micro, position))
            self._add_gradient(self.first + i)
        for u in range(self.first - 1, -1, -1):
            self._compute(self._again(self.units[u]), self.units[u], self._load_unit(u, 2))
            self._add_gradient(u)
        backwards = [micro.uses[Use("backward", i)] for i in reversed(range(self.layers))]
        beside = not self._has_residents  # with none, a layer's weights come when its internals may
        add_backward_stalls(self.choices, self.scale, backwards, self._slots_ahead, with_weights=beside)

    def _add_layer_backward(self, micro: Micro, i: int, copies: list[Term]) -> None:
        """The recomputes of a block that ends after layer ``i``, and its backward."""
        end, choices = i + 1, self.choices
        for start in range(max(0, end - self.problem.longest_block), i):
            self._add_fetch(micro, start, end)
            exists = fast_sum(choices.chosen[e] for e in choices.arriving[end] if e[0] <= start)
            seconds = self._forward(self.facts.layers[start]) + self._overhead
            waits = [self.last["h2d"], *self._gradients_due(), *copies]
            micro.uses[Use("recompute", start)] = self._on("compute", seconds * exists, *waits)
        self._add_fetch(micro, i, end)
        self._add_backward_compute(micro, i, self.last["h2d"], *copies)

    def _add_backward_compute(self, micro: Micro, i: int, *after: Term) -> None:
        """A layer's backward, with the part of its forward that was not kept."""
        spared = fast_sum(
            (1 - self.profile.reforward(kept)) * variable for (_, kept, _), variable in self.choices.kept_of(i)
        )
        forwards = self._again(self.facts.layers[i]) - spared
        micro.uses[Use("backward", i)] = self._compute(forwards, self.facts.layers[i], *after)

    def _add_fetch(self, micro: Micro, layer: int, end: int) -> None:
        """All that comes to the GPU before ``layer`` first runs in the block that ends at ``end``."""
        if layer not in self.ring.resident:
            self._add_load(micro, layer, end)
        since = self.ring.oldest_of_all(end)
        if self.choices.has_away:
            self._add_reload(micro, layer, end, since)
        if layer == end - 1 and self.choices.swaps(layer):
            size = self.choices.kept_bytes(layer, "host")
            chosen = self.choices.swapped(layer)
            seconds = size * self._per_byte(self.profile.h2d_bytes_s)
            swap = self._on("h2d", seconds)
            self._wait_since(micro, swap, seconds, since, chosen)
            if since is None or since.kind == "forward":
                self._wait(swap, seconds, micro.after_forward[layer], chosen)
                self._wait(swap, seconds, micro.swaps[layer], chosen)

    def _wait_since(self, micro: Micro, end: Term, seconds: Term, since: Use | None, chosen: Term) -> None:
        """Wait for a use; one that is not chosen may wait too, unless resident layers let later loads pass it."""
        if since is None:
            return
        if self.ring.resident:
            self._wait(end, seconds, micro.uses[since], chosen)
        else:
            self.model.add_linear_constraint(end >= micro.uses[since] + seconds)

    def _add_reload(self, micro: Micro, layer: int, end: int, since: Use | None) -> None:
        edge = self.choices.edges[layer, end][1]
        seconds = self.choices.sizes[layer] * self._per_byte(self.profile.h2d_bytes_s) * edge
        reload = self._on("h2d", seconds)
        self._wait_since(micro, reload, seconds, since, edge)
        if since is None or since.kind == "forward":
            self._wait(reload, seconds, micro.forwards[layer], edge)
            self._wait(reload, seconds, micro.offloads[layer], edge)
        if layer in micro.reads:
            self._wait(reload, seconds, micro.reads[layer], edge)
            self._wait(micro.reloads[layer], 0.0, reload, edge)

    def _add_load(self, micro: Micro, layer: int, end: int) -> None:
        """The load for a layer's first use in the block, or, for the last layer of what may be a block, for any use."""
        choices, held = self.choices, self.ring.held(end)
        order = {use: rank for rank, use in enumerate(held)}
        waits: dict[Use | None, list[Edge]] = defaultdict(list)
        for edge in choices.arriving[end]:
            access = _first(self.blocks[edge], layer)
            if access is not None and access.loads:
                waits[access.after].append(edge)
        if layer == end - 1:
            waits[held[0]] += [e for e in self._around(layer) if _loads_backward(self.blocks[e], layer)]
        loading = [edge for edges in waits.values() for edge in edges]
        if not loading:
            return
        size = self.facts.layers[layer].weight_bytes * self._per_byte(self.profile.h2d_bytes_s)
        seconds = size * fast_sum(choices.chosen[edge] for edge in loading)
        load = self._on("h2d", seconds, *([micro.uses[held[0]]] if held[0] is not None else []))
        ranked = sorted(waits, key=lambda use: order.get(use, len(held)))
        for rank, use in enumerate(ranked):
            if use is not None and use != held[0] and use in micro.uses:
                later = fast_sum(choices.chosen[edge] for one in ranked[rank:] for edge in waits[one])
                self._wait(load, seconds, micro.uses[use], later)

    def _around(self, layer: int) -> list[Edge]:
        """Blocks of which the layer is neither the last nor outside."""
        longest = self.problem.longest_block
        starts = range(max(0, layer - longest + 2), layer + 1)
        return [(start, end) for start in starts for end in range(layer + 2, min(self.layers, start + longest) + 1)]

    def _again(self, unit: UnitFacts) -> float:
        """Forwards' worth of work in running a unit again and differentiating it."""
        return 1 + backward_forwards(unit, self.profile)

    # ---- for `stalls`

    @property
    def _slots_ahead(self) -> int:
        """Layers for which internals may come ahead, its own included."""
        return self.ring.slots

    @property
    def _has_residents(self) -> bool:
        return bool(self.ring.resident)


def _first(accesses: list[Access], layer: int) -> Access | None:
    return next((access for access in accesses if access.use.layer == layer), None)


def _loads_backward(accesses: list[Access], layer: int) -> bool:
    return any(access.loads for access in accesses if access.use == Use("backward", layer))
