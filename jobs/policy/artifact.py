"""The policy: every decision a planner takes about one job on one machine, as a small JSON file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, Field, ValidationError

from ..errors import InputError, ProgramError
from ..frozen import Frozen
from ..model_facts import ModelFacts
from ..optimizer_bytes import DEFAULT_OPTIMIZER, OptimizerOptions

Home = Literal["gpu", "host", "nvme", "recompute"]
SCHEMA = 1


class Boundary(Frozen):
    """Where the input of layer ``index`` waits between forward and backward."""

    index: int
    home: Home


class LayerPolicy(Frozen):
    """What is kept of layer ``index`` beside its boundary."""

    index: int
    internals: Literal["none", "matmuls", "all"] = "none"
    internals_home: Literal["gpu", "host"] = "gpu"
    resident: bool = False
    """Whether its weights stay on the GPU for the whole step."""
    optimizer_home: Literal["host", "nvme"] = "host"
    """Where its master's low halves and its optimizer states wait between updates; the streamed weights stay on the
    host."""
    gradient_home: Literal["host", "nvme"] = "host"
    """Where its gradient waits from backward to the update."""


class Certificate(Frozen):
    """How good the solver proved the policy to be."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    planner: str
    backend: str = ""
    status: str = ""
    objective_s: float | None = None
    bound_s: float | None = None
    gap: float | None = None


class Predicted(Frozen):
    """What the simulator expects of one optimizer step."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    step_s: float
    tokens_per_s: float
    tflops_6n: float
    """6 x parameters x tokens / step time, in 1e12 (the accounting of the LazyTrain paper)."""
    compute_units: float
    """Layer compute per micro-batch in units of one forward: 3 keeps everything, 4 recomputes every layer once."""
    peak_gpu_bytes: int
    peak_host_bytes: int
    nvme_bytes: int
    host_bytes_per_parameter: float
    exposed_s: dict[str, float]
    """Seconds per step for which compute waits for each link."""


class Policy(Frozen):
    """All decisions for one job on one machine. Equal inputs give byte-equal files."""

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)

    format: int = Field(default=SCHEMA, alias="schema")
    model_digest: str
    hardware_digest: str = ""
    micro_batch: int = Field(ge=1)
    accumulation: int = Field(default=1, ge=1)
    """Micro-batches of one optimizer step."""
    sequence_length: int = Field(ge=1)
    boundaries: tuple[Boundary, ...]
    """Boundaries 0..L; the first and the last are never recomputed, the last is always on the GPU."""
    layers: tuple[LayerPolicy, ...]
    weight_slots: int = Field(default=2, ge=2)
    """Layer-sized weight buffers on the GPU; one computes while the others load."""
    staging_slots: int = Field(default=2, ge=1)
    """Compute operations that a copy out of the GPU may take; and gradients that may be on their way out at once."""
    direct_nvme: bool = False
    """Whether boundaries on NVMe go there from GPU memory, and back, with no stop on the host (GPUDirect Storage)."""
    optimizer_home: Literal["host", "nvme"] = "host"
    """``nvme`` if it is that of any layer."""
    gradient_home: Literal["host", "nvme"] = "host"
    """``nvme`` if it is that of any layer."""
    optimizer: OptimizerOptions = DEFAULT_OPTIMIZER
    """For which options of the optimizer host memory was reckoned."""
    predicted: Predicted | None = None
    certificate: Certificate | None = None

    @classmethod
    def from_homes(
        cls, facts: ModelFacts, homes: list[Home] | tuple[Home, ...], *, accumulation: int = 1, weight_slots: int = 2
    ) -> Policy:
        """A policy for ``facts`` with the given home of each boundary 0..L and everything else at its default."""
        return cls(
            model_digest=facts.digest,
            micro_batch=facts.micro_batch,
            accumulation=accumulation,
            sequence_length=facts.sequence_length,
            boundaries=tuple(Boundary(index=i, home=home) for i, home in enumerate(homes)),
            layers=tuple(LayerPolicy(index=i) for i in range(len(facts.layers))),
            weight_slots=weight_slots,
        )

    @property
    def homes_of_state(self) -> tuple[tuple[str, str], ...]:
        """Where optimizer state and gradients of each layer are kept."""
        return tuple((layer.optimizer_home, layer.gradient_home) for layer in self.layers)

    def parked(self, *, optimizer: Collection[int] = (), gradients: Collection[int] = ()) -> Policy:
        """This policy with the optimizer state and the gradients of exactly these layers on NVMe."""
        homes: dict[bool, Literal["host", "nvme"]] = {False: "host", True: "nvme"}
        layers = tuple(
            layer.model_copy(
                update={
                    "optimizer_home": homes[layer.index in optimizer],
                    "gradient_home": homes[layer.index in gradients],
                }
            )
            for layer in self.layers
        )
        tops = {"optimizer_home": homes[bool(optimizer)], "gradient_home": homes[bool(gradients)]}
        return self.model_copy(update={"layers": layers, **tops})

    @property
    def homes(self) -> tuple[Home, ...]:
        """Home of boundary 0..L."""
        return tuple(boundary.home for boundary in self.boundaries)

    def count_homes(self) -> dict[str, int]:
        """How many boundaries have each home."""
        count = Counter(self.homes)
        return {home: count[home] for home in ("gpu", "host", "nvme", "recompute")}

    def check(self, facts: ModelFacts) -> None:
        """Raise ProgramError unless this policy was made for exactly this model and batch shape."""
        if self.model_digest != facts.digest:
            raise ProgramError(
                f"the policy was made for model {self.model_digest} with batch {self.micro_batch} x "
                f"{self.sequence_length}, not for {facts.digest} with {facts.micro_batch} x {facts.sequence_length}",
                hint="plan again for this model and batch: lazytrain plan SPEC --out policy.json",
            )
        layers = len(facts.layers)
        if [b.index for b in self.boundaries] != list(range(layers + 1)):
            raise ProgramError(f"the policy must list boundaries 0..{layers} in order")
        if [layer.index for layer in self.layers] != list(range(layers)):
            raise ProgramError(f"the policy must list layers 0..{layers - 1} in order")
        if self.homes[0] == "recompute" or self.homes[-1] != "gpu":
            raise ProgramError("boundary 0 cannot be recomputed, and the last boundary is always on the GPU")
        recomputed = [x.index for x in self.layers if x.internals != "none" and self.homes[x.index + 1] == "recompute"]
        if recomputed:
            raise ProgramError(f"layers {recomputed} keep internals, yet are run again to recompute a boundary")
        self._check_parked(facts)

    def _check_parked(self, facts: ModelFacts) -> None:
        for what in ("optimizer_home", "gradient_home"):
            parked = [layer.index for layer in self.layers if getattr(layer, what) == "nvme"]
            if (getattr(self, what) == "nvme") != bool(parked):
                raise ProgramError(
                    f"the policy's {what} is {getattr(self, what)}, that of layers {parked} is nvme",
                    hint="the policy's own says nvme exactly when that of a layer does",
                )
            shared = [index for index in parked if facts.layers[index].shares_weights_with]
            if shared:
                raise ProgramError(
                    f"{what} of layers {shared} is nvme, but their weights are those of other layers",
                    hint="give the layer that owns the weights another home",
                )

    def to_json(self) -> str:
        """The policy file's text."""
        return json.dumps(self.model_dump(mode="json", by_alias=True), indent=1) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the policy file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Policy:
        """Read a policy file. Raises InputError naming the file and what is wrong with it."""
        try:
            policy = cls.model_validate_json(Path(path).read_bytes(), strict=True)
        except OSError as error:
            raise InputError(f"cannot read policy {path}: {error.strerror}") from error
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            raise InputError(f"{path} is not a policy: {place}: {first['msg']}") from error
        if policy.format > SCHEMA:
            raise InputError(f"{path} has policy schema {policy.format}; this version reads up to {SCHEMA}")
        return policy
