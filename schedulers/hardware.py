"""Machines: what a GPU and the node around it can hold and move.

``hardware("RTX3090")`` takes the facts of a known GPU from ``machines.json``, ``hardware("node.json")`` those that a
probe measured. A GPU that nobody knows is refused, never guessed. ``machines.json`` also knows some models' shapes by
name, so that planning for them needs no download.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from ..jobs.errors import HardwareError, ModelError
from ..jobs.frozen import Frozen, digest
from ..jobs.model_facts import Internals
from ..jobs.pinning import decide_pinning
from ..jobs.units import MOST_BYTES, parse_bytes
from .copies import CopyRates, Rate

GB = 1e9
MEASUREMENT: Final = 3
"""Edition of what a node's profile holds; one of an earlier edition is measured again. 2: all GPUs copy at once."""
BYTES_PER_UPDATE = 16
"""Host memory traffic of one parameter's update: split master, gradient and 8-bit states read, all but one written."""
CUDA_SHARE = 0.92
"""Share of a CUDA GPU's memory that a plan may use: the rest is the context and what the allocator rounds away."""


def _whole(value: object) -> object:
    """Whole numbers as people write large ones: ``64e9``."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Bytes = Annotated[int, BeforeValidator(_whole), Field(ge=0, le=MOST_BYTES)]
Size = Annotated[Bytes, Field(gt=0)]


class HardwareProfile(Frozen):
    """One GPU and its share of a node. Rates are per second; a link's rate holds for each direction on its own."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)

    name: str = Field(min_length=1)
    """What people call this machine."""
    kind: str = Field(min_length=1)
    """The GPU's model, as job files name it: ``H800``, ``RTX3090``."""
    device: Literal["cuda", "emulated", "cpu"] = "cuda"
    gpu_memory_bytes: Size
    matmul_flops: dict[str, Rate] = Field(min_length=1)
    """Dense matrix-product rate by dtype name (``bfloat16``, ``float32``), floating-point operations per second."""
    attention_flops: dict[str, Rate] = Field(default_factory=dict)
    """Rate of fused causal attention by dtype name, all pairs of tokens counted; where it is not known, products' is
    taken."""
    efficiency: float = Field(default=0.5, ge=1e-9, le=1)
    """Share of ``matmul_flops`` and ``attention_flops`` that whole layers reach."""
    operation_overhead_s: float = Field(default=0.0, ge=0, le=3600)
    """Seconds of each compute operation beside its arithmetic (Python, launches); matters for tiny models only."""
    backward_forwards: float = Field(default=2.0, gt=0, le=1e3)
    """Compute of a unit's gradients, in its forwards: one product for its input's, one for its weights'."""
    reforward_matmuls: float = Field(default=0.13, ge=0, le=1e3)
    """Forwards that backward repeats of a layer that kept its matrix products; measured on a Llama layer."""
    reforward_all: float = Field(default=0.0, ge=0, le=1e3)
    """Forwards' worth of time that it takes to keep everything and find it again; nothing but Python's, so that it
    counts for small layers only."""
    h2d_bytes_s: Rate
    d2h_bytes_s: Rate
    host_memory_bytes: Size
    """Host memory that the job may use."""
    pinned_limit_bytes: Bytes | None = None
    """Host memory that the system lets a process pin; None: as much as there is."""
    host_bytes_s: Rate
    """Bandwidth of host memory."""
    update_parameters_s: float = Field(ge=1e-2, le=1e24)
    """Parameters that the CPU optimizer updates per second."""
    nvme_bytes: Bytes = 0
    """Room for boundaries on NVMe; 0 means that there is none."""
    nvme_read_bytes_s: Rate = 2.83e9
    nvme_write_bytes_s: Rate = 3.35e9
    gpudirect: bool = False
    """Whether the GPU reaches files on NVMe itself (GPUDirect Storage)."""
    copies: Annotated[tuple[CopyRates, ...], Field(strict=False)] = ()
    """What each GPU of the node reaches when it copies, alone and with the others; empty where nobody has measured."""
    driver: str = ""
    """Version of the GPUs' driver when the node was measured; empty without one."""
    measurement: int = Field(default=0, ge=0)
    """`MEASUREMENT` when the node was measured; 0 for what is not the profile of a whole node."""

    @property
    def gpu_budget_bytes(self) -> int:
        """GPU memory that a plan may fill when nobody says otherwise."""
        return int(self.gpu_memory_bytes * CUDA_SHARE) if self.device == "cuda" else self.gpu_memory_bytes

    @property
    def digest(self) -> str:
        """Identifies the profile: plans made from equal profiles carry equal digests."""
        return digest(self.model_dump(mode="json"))

    def reforward(self, internals: Internals) -> float:
        """Forwards of a layer that its backward takes beside its gradients', by what was kept of it."""
        return {"none": 1.0, "matmuls": self.reforward_matmuls, "all": self.reforward_all}[internals]

    def flops(self, dtype: str) -> float:
        """Rate at which layers compute in ``dtype``, operations per second. Raises HardwareError if it is not known."""
        if dtype not in self.matmul_flops:
            raise HardwareError(
                f"the profile of {self.name} has no rate for {dtype}, only for {', '.join(sorted(self.matmul_flops))}",
                hint=f"measure it with lazytrain profile, or add matmul_flops.{dtype} to the profile",
            )
        return self.matmul_flops[dtype] * self.efficiency

    def attention(self, dtype: str) -> float:
        """FLOPs per second of attention within layers. Raises InputError for a dtype without a rate."""
        return self.efficiency * self.attention_flops[dtype] if dtype in self.attention_flops else self.flops(dtype)

    def faster(self, factor: float) -> dict[str, dict[str, float]]:
        """The rates of a device that computes ``factor`` times as fast, by the names of their fields."""
        return {
            field: {dtype: rate * factor for dtype, rate in rates.items()}
            for field, rates in (("matmul_flops", self.matmul_flops), ("attention_flops", self.attention_flops))
        }


class Budgets(Frozen):
    """Bytes that one job may fill in each tier."""

    gpu_bytes: int
    host_bytes: int
    nvme_bytes: int

    def by_tier(self) -> dict[str, int]:
        """The budgets by name of the tier: ``gpu``, ``host``, ``nvme``."""
        return {"gpu": self.gpu_bytes, "host": self.host_bytes, "nvme": self.nvme_bytes}

    @classmethod
    def of(
        cls,
        profile: HardwareProfile,
        *,
        gpu_memory: str | int | None = None,
        host_memory: str | int | None = None,
        nvme: str | int | None = None,
    ) -> Budgets:
        """What the machine offers, unless told otherwise (``"70GB"`` or bytes). Raises InputError for a bad amount.

        Where not all of the host's memory can be pinned, there is room left for the rings of pinned slabs.
        """
        host_bytes = profile.host_memory_bytes if host_memory is None else parse_bytes(host_memory)
        rings = decide_pinning(host_bytes, profile.pinned_limit_bytes).ring_bytes
        return cls(
            gpu_bytes=profile.gpu_budget_bytes if gpu_memory is None else parse_bytes(gpu_memory),
            host_bytes=max(0, host_bytes - rings),
            nvme_bytes=profile.nvme_bytes if nvme is None else parse_bytes(nvme),
        )


def hardware(
    name_or_path: str | Path,
    *,
    gpu_memory: str | int | None = None,
    host_memory: str | int | None = None,
    nvme: str | int | None = None,
    h2d_gbps: float | None = None,
    d2h_gbps: float | None = None,
    nvme_read_gbps: float | None = None,
    nvme_write_gbps: float | None = None,
    host_gbps: float | None = None,
    efficiency: float | None = None,
) -> HardwareProfile:
    """The profile of a known GPU, or of a profile file, with single facts replaced.

    ``name_or_path`` is a name of ``machines.json`` in any usual spelling (``"NVIDIA GeForce RTX 3090"``) or the path of
    a JSON file with the fields of `HardwareProfile`. Memory is text such as ``"70GB"`` or bytes; rates are 1e9 bytes
    per second. Raises HardwareError for an unknown GPU, a bad file or a bad value, InputError for a bad amount of
    memory.
    """
    text = str(name_or_path)
    is_file = text.endswith(".json") or ((path := what_is_at(text)) is not None and path.is_file())
    base = _read_profile(Path(text)) if is_file else _known(text)
    sizes = {"gpu_memory": gpu_memory, "host_memory": host_memory, "nvme": nvme}
    rates = {
        "h2d": h2d_gbps,
        "d2h": d2h_gbps,
        "nvme_read": nvme_read_gbps,
        "nvme_write": nvme_write_gbps,
        "host": host_gbps,
    }
    changes: dict[str, Any] = {f"{name}_bytes": parse_bytes(size) for name, size in sizes.items() if size is not None}
    changes |= {f"{name}_bytes_s": rate * GB for name, rate in rates.items() if rate is not None}
    if host_gbps is not None:
        changes["update_parameters_s"] = host_gbps * GB / BYTES_PER_UPDATE
    if efficiency is not None:
        changes["efficiency"] = efficiency
    return _validate(base.model_dump() | changes, text, changes) if changes else base


def what_is_at(text: str) -> Path | None:
    """The path that a text is; None where nothing is there, or it cannot be a path at all."""
    try:
        path = Path(text)
        return path if text and path.exists() else None
    except (OSError, ValueError):
        return None


def known_gpus() -> tuple[str, ...]:
    """Names of the GPUs that ``machines.json`` describes."""
    return tuple(_machines()["gpus"])


def same_gpu(one: str, other: str) -> bool:
    """Whether two names, each in any usual spelling, mean the same GPU; a GPU nobody knows is only itself."""
    spellings = _spellings()
    first, second = _spelling(one), _spelling(other)
    return spellings.get(first, first) == spellings.get(second, second)


def known_models() -> tuple[str, ...]:
    """Names of the model shapes that ``machines.json`` describes."""
    return tuple(_machines()["models"])


def model_config(name: str) -> dict[str, Any]:
    """The Hugging Face configuration of a model known by name, a new dict. Raises ModelError with the nearest names."""
    models = _machines()["models"]
    key = name.strip().lower()
    if key not in models:
        near = difflib.get_close_matches(key, models, n=3, cutoff=0.4)
        raise ModelError(
            f"no model shape is called {name!r}",
            hint=f"nearest: {', '.join(near)}" if near else f"known: {', '.join(models)}",
        )
    config: dict[str, Any] = json.loads(json.dumps(models[key]))
    return config


@cache
def _machines() -> dict[str, Any]:
    text = resources.files(__package__).joinpath("machines.json").read_text(encoding="utf-8")
    machines: dict[str, Any] = json.loads(text)
    return machines


def _spelling(name: str) -> str:
    """``NVIDIA GeForce RTX 3090`` and ``rtx-3090`` become ``rtx3090``."""
    words = re.sub(r"\b(nvidia|geforce|tesla|graphics|gpu)\b", " ", name.lower())
    return re.sub(r"[^a-z0-9]", "", words)


@cache
def _spellings() -> dict[str, str]:
    return {
        _spelling(spelling): name
        for name, gpu in _machines()["gpus"].items()
        for spelling in (name, *gpu["aliases"])
    }  # fmt: skip


def _known(name: str) -> HardwareProfile:
    spellings = _spellings()
    canonical = spellings.get(_spelling(name))
    if canonical is None:
        near = difflib.get_close_matches(_spelling(name), spellings, n=8, cutoff=0.3)
        names = list(dict.fromkeys(spellings[spelling] for spelling in near))[:4] or list(known_gpus())
        raise HardwareError(
            f"no GPU is called {name[:80]!r}",
            hint=f"nearest: {', '.join(names)}; for any other, name the file of a measured profile (lazytrain profile)",
        )
    machines = _machines()
    gpu, node = machines["gpus"][canonical], machines["node"]
    return HardwareProfile(
        name=canonical,
        kind=canonical,
        gpu_memory_bytes=gpu["gpu_memory_mib"] << 20,
        matmul_flops={dtype: tflops * 1e12 for dtype, tflops in gpu["tflops"].items()},
        efficiency=gpu["efficiency"],
        h2d_bytes_s=gpu["link_gb_s"] * GB,
        d2h_bytes_s=gpu["link_gb_s"] * GB,
        host_memory_bytes=gpu["host_memory_gib"] << 30,
        host_bytes_s=gpu["host_gb_s"] * GB,
        update_parameters_s=gpu["host_gb_s"] * GB / BYTES_PER_UPDATE,
        nvme_bytes=int(node["nvme_gb"] * GB),
        nvme_read_bytes_s=node["nvme_read_gb_s"] * GB,
        nvme_write_bytes_s=node["nvme_write_gb_s"] * GB,
    )


def _read_profile(path: Path) -> HardwareProfile:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise HardwareError(
            f"cannot read hardware profile {path}: {error.strerror}",
            hint="write one with lazytrain profile, or name a known GPU such as H800",
        ) from error
    except (ValueError, RecursionError) as error:
        raise HardwareError(
            f"{path} is not a hardware profile: not JSON ({error})", hint="lazytrain profile writes one"
        ) from error
    return _validate(fields, str(path))


def _validate(fields: Any, source: str, changes: Mapping[str, Any] | None = None) -> HardwareProfile:
    """The profile with these fields, of which ``changes`` were asked for. Raises HardwareError."""
    try:
        return HardwareProfile.model_validate(fields)
    except ValidationError as error:
        problems = {".".join(map(str, e["loc"])) or "file": _problem(e) for e in error.errors()}
        asked = [f"{name} {value:g} ({problems[name]})" for name, value in (changes or {}).items() if name in problems]
        if asked:
            raise HardwareError(
                f"{source} cannot have {', '.join(asked)}", hint="give another amount or rate"
            ) from error
        raise HardwareError(
            f"{source} is not a valid hardware profile: {'; '.join(f'{n}: {p}' for n, p in problems.items())}",
            hint="lazytrain profile writes a complete one",
        ) from error


def _problem(error: ErrorDetails) -> str:
    """What is wrong with a field, and what it is where it is short."""
    given = "" if error["type"] == "missing" or isinstance(error["input"], dict | list) else f", not {error['input']!r}"
    return f"{error['msg']}{given:.40}"
