"""Step times that no policy of a whole family beats: the timing of `timing` with what differs within it left out.

A family is a range of weight slots, staging slots and numbers of resident layers. It waits like its member that waits
least, and has the memory of the one that takes least. At the turn from forward to backward a member finds at most as
many layers loaded as it has slots and residents; here any layers may be those, and only the others load after it. The
recomputes of a block are taken as one, and neither they nor their loads wait for each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ...jobs.policy.lowering import NVME_STAGING
from ..costs import LINK_RATES, backward_forwards
from .choices import Choices
from .linear import fast_sum
from .problem import Shape
from .ring import Ring
from .timing import Micro, Timing
from .variables import Term


@dataclass(frozen=True, slots=True)
class Family:
    """Policies by the fewest and the most of what they have; both ends belong to it."""

    weights: tuple[int, int]
    """Weight slots."""
    staging: tuple[int, int]
    """Staging slots."""
    residents: tuple[int, int] = (0, 0)
    """Resident layers."""
    nvme: tuple[int, int] = (0, 0)
    """Boundaries on NVMe."""
    blocks: tuple[int, int] = (0, 0)
    """Blocks that recompute."""
    parked: tuple[int, int] = (0, 0)
    """0 and 1: no optimizer state or gradient is on NVMe; some is, and gives back host memory."""

    @property
    def smallest(self) -> Shape:
        """The shape whose memory no member goes below."""
        return Shape(self.weights[0], self.staging[0])


class LooseTiming(Timing):
    """Adds to the model of ``choices`` the least times of any member of ``family``."""

    def __init__(self, choices: Choices, family: Family) -> None:
        self.family = family
        self.slots = family.weights[1] + choices.residents
        self.near = Ring(len(choices.facts.layers), family.weights[1], frozenset())
        self.moved_until: Term = 0.0
        self.loaded_since: Term = 0.0
        self.stays: list[Term] = []
        self.turn: Term = 0.0  # from the last micro-batch's forward to its backward
        self.most_slots = family.weights[1] + family.residents[1]
        super().__init__(choices, Shape(self.most_slots, family.staging[1], parked=choices.problem.shape.parked))
        self._add_parking()

    # ---- optimizer state and gradients on NVMe

    def _add_updates(self) -> None:
        """Boundaries and gradients are written after all states: these wait for their reads, and stand first."""
        super()._add_updates()
        self.states_written: Term = 0.0
        if self.choices.parked:
            states, _ = self.choices.parked
            last, reads = states.least * states.some, states.moved + self._gradients_read_early()
            after_reads = self._parked_seconds("nvme_read", reads) + self._parked_seconds("nvme_write", last)
            after_writes = self._parked_seconds("nvme_write", states.moved) + self._parked_seconds("nvme_read", last)
            self.states_written = self.last["nvme_write"] = self._end(0.0, after_reads, after_writes)

    def _gradients_read_early(self) -> Term:
        """Gradients that are read before the last state is written: all but those of layers after that one.

        Such layers have no state on NVMe, so there are no more of them than what is left of all states allows for.
        """
        states, gradients = self.choices.parked
        read = self.model.add_variable(lb=0.0)
        later = (states.total - states.moved) * (gradients.most / states.least)
        self.model.add_linear_constraint(read >= gradients.moved - later)
        return read

    def _add_parking(self) -> None:
        """What is parked is read and written in every step, gradients once for each micro-batch."""
        if not self.choices.parked:
            return
        states, gradients = self.choices.parked
        each_time = self.problem.micro_batches * gradients.moved
        for stream in ("nvme_read", "nvme_write"):
            both = fast_sum([*self.lasting[stream], self._parked_seconds(stream, states.moved + each_time)])
            self.model.add_linear_constraint(self.step >= both)
        after_states = fast_sum([*self.lasting["nvme_write"], self._parked_seconds("nvme_write", each_time)])
        self.model.add_linear_constraint(self.step >= self.states_written + after_states)
        written = self.begun + self.turn + self._first_gradient * gradients.some
        self.model.add_linear_constraint(self.step >= written + self._parked_seconds("nvme_write", gradients.moved))

    def _parked_seconds(self, stream: str, moved: Term) -> Term:
        rate: float = getattr(self.profile, LINK_RATES[stream])
        return self.choices.unit * self._per_byte(rate) * moved

    @cached_property
    def _first_gradient(self) -> float:
        """From the last layer's forward until a layer's gradient is on the host."""
        layers, head = self.facts.layers, self.facts.head
        loss = (1 + backward_forwards(head, self.profile)) * self._forward(head)
        compute = min(backward_forwards(layer, self.profile) * self._forward(layer) for layer in layers)
        size = min(layer.gradient_bytes for layer in layers if layer.gradient_bytes)
        return loss + compute + size * self._per_byte(self.profile.d2h_bytes_s)

    def _add_forward(self, micro: Micro) -> None:
        """The last layer of which something was parked has its load and its forward after all of those reads."""
        super()._add_forward(micro)
        self.turn = micro.forwards[-1]
        if self.choices.parked and not micro.number:
            layers = [layer for layer in self.facts.layers if layer.gradient_bytes]
            least = min(
                self._forward(layer) + layer.weight_bytes * self._per_byte(self.profile.h2d_bytes_s) for layer in layers
            )
            moved = fast_sum(part.moved for part in self.choices.parked)
            self.model.add_linear_constraint(self.turn >= self._parked_seconds("nvme_read", moved) + least)
            self._add_late_forwards()

    def _add_late_forwards(self) -> None:
        """Boundaries on NVMe but the first leave for staging buffers that are full until all states are written.

        So do the forwards of all layers after the next such boundary, as far as copies out have no slots for it.
        """
        on_nvme = [variable for variable in self.choices.nvme if variable is not None]
        if on_nvme:
            states, _ = self.choices.parked
            layers = fast_sum(on_nvme) - NVME_STAGING - self.family.staging[1]
            each = min(self._forward(layer) for layer in self.facts.layers)
            read = self._parked_seconds("nvme_read", states.moved)
            self.model.add_linear_constraint(self.turn >= read + each * layers)

    @property
    def _slots_ahead(self) -> int:
        return self.family.weights[1]

    @property
    def _has_residents(self) -> bool:
        return bool(self.family.residents[1])

    def _held(self, count: int) -> list[Term]:
        """For each layer, how much of it is still there; of all layers together as much as there are slots."""
        held = [self.model.add_variable(lb=0.0, ub=1.0) for _ in range(count)]
        self.model.add_linear_constraint(fast_sum(held) <= self.slots)
        return held

    def _load_forward(self, micro: Micro, i: int) -> list[Term]:
        if not i:
            self.stays = self._held(self.layers) if micro.number else [0.0] * self.layers
        after = self.ring.forward_after(i)
        freed = [micro.forwards[after]] if after is not None else []
        seconds = self.facts.layers[i].weight_bytes * self._per_byte(self.profile.h2d_bytes_s)
        return [self._on("h2d", seconds * (1 - self.stays[i]), self.updated[self.first + i], *freed)]

    def _add_offload(self, micro: Micro, i: int) -> None:
        if not self.choices.has_away:
            return
        per_byte = self.choices.sizes[i] * self._per_byte(self.profile.d2h_bytes_s)
        offload = self._on("d2h", per_byte * self.choices.away[i], *self.mains[-1:])
        micro.offloads.append(offload)
        nvme = self.choices.nvme[i]
        if nvme is not None:
            per_byte = self.choices.sizes[i] * self._per_byte(self.profile.nvme_write_bytes_s)
            self._on("nvme_write", per_byte * nvme, offload)

    def _add_reads(self, micro: Micro) -> None:
        """Reads from NVMe, one after the other; none of a boundary before all of them are written."""
        for i in range(self.layers - 1, -1, -1):
            nvme = self.choices.nvme[i]
            if nvme is not None:
                seconds = self.choices.sizes[i] * self._per_byte(self.profile.nvme_read_bytes_s) * nvme
                micro.reads[i] = self._on("nvme_read", seconds)
        if self.choices.some_on_nvme is not None:
            reads = fast_sum(self.lasting["nvme_read"][-len(micro.reads) :])
            self._wait(self.last["nvme_read"], reads, self.last["nvme_write"], self.choices.some_on_nvme)

    def _add_layer_backward(self, micro: Micro, i: int, copies: list[Term]) -> None:
        end, per_byte = i + 1, self._per_byte(self.profile.h2d_bytes_s)
        if end == self.layers:
            self.stays, self.moved_until = self._held(self.layers), 0.0
            self.loaded_since = micro.forwards[-1]
        moved = per_byte * self._moved(i)
        near, far = (ring.held(end)[0] for ring in (self.near, self.ring))
        since = [micro.uses[near]] if near is not None else []
        self.moved_until = self._end(moved, self.moved_until, *since)
        if i in micro.reads:
            self.model.add_linear_constraint(self.moved_until >= micro.reads[i])
        load = per_byte * (self.facts.layers[i].weight_bytes * (1 - self.stays[i]) + self._loaded_again(end))
        before = self.last["h2d"]
        loaded = self._on("h2d", load + moved, before)
        if far is not None:
            both = load if self.family.residents[1] else load + moved
            self.model.add_linear_constraint(loaded >= micro.uses[far] + both)
        late = load + moved if end <= self.layers - self.family.weights[1] else load
        self.loaded_since = self._end(late, self.loaded_since)
        self._on("compute", self._recomputed_seconds(end), self.moved_until, *self._gradients_due(), *copies)
        self._add_backward_compute(micro, i, loaded, self.loaded_since, self.moved_until, *copies)

    def _moved(self, i: int) -> Term:
        """Bytes of boundary and internals that come back before the backward of layer ``i``."""
        bytes_in = [self.choices.kept_bytes(i, "host")]
        if self.choices.has_away:
            arriving = self.choices.arriving[i + 1]
            bytes_in += [self.choices.sizes[edge[0]] * self.choices.edges[edge][1] for edge in arriving]
        return fast_sum(bytes_in)

    def _loaded_again(self, end: int) -> Term:
        """Bytes of weights that the block before ``end`` loads twice: of those beyond the slots."""
        return fast_sum(
            (last - first - self.most_slots)
            * min(layer.weight_bytes for layer in self.facts.layers[first:last])
            * self.choices.chosen[first, last]
            for first, last in self.choices.arriving[end]
            if last - first > self.most_slots
        )

    def _recomputed_seconds(self, end: int) -> Term:
        return fast_sum(
            sum(self._forward(layer) + self._overhead for layer in self.facts.layers[first : last - 1])
            * self.choices.chosen[first, last]
            for first, last in self.choices.arriving[end]
        )
