"""Durable files: written once, hashed on the way, synced before anybody is told about them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import CheckpointError

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class Written:
    """What a manifest says of a file: its name beside the manifest, its size and its SHA-256."""

    file: str
    bytes: int
    sha256: str


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> Written:
    """Write a safetensors file of the tensors, straight from their memory: no second copy of them is made."""
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))
    return _write(path, (part for parts in (_header(ordered), _payload(ordered)) for part in parts))


def write_bytes(path: Path, content: bytes) -> Written:
    """Write ``content`` durably."""
    return _write(path, [content])


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(_CHUNK_BYTES):
            digest.update(part)
    return digest.hexdigest()


def _write(path: Path, parts: Iterable[bytes | memoryview]) -> Written:
    digest, size = hashlib.sha256(), 0
    with path.open("xb", buffering=0) as file:
        for part in parts:
            digest.update(part)
            size += len(part)
            _write_all(file.fileno(), memoryview(part))
        os.fsync(file.fileno())
    return Written(path.name, size, digest.hexdigest())


def _write_all(descriptor: int, part: memoryview) -> None:
    while part:
        part = part[os.write(descriptor, part) :]


def _header(tensors: Mapping[str, torch.Tensor]) -> Iterable[bytes]:
    """The start of a safetensors file: header length (8 bytes), JSON header padded to 8 bytes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise CheckpointError(f"tensor {name!r} has dtype {tensor.dtype}, which checkpoints do not hold")
        stop = offset + tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text


def _payload(tensors: Mapping[str, torch.Tensor]) -> Iterable[memoryview]:
    for tensor in tensors.values():
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        for start in range(0, flat.numel(), _CHUNK_BYTES):
            yield flat[start : start + _CHUNK_BYTES].numpy().data
