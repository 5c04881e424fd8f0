"""The base of every value object: immutable, comparable, with a canonical JSON form and a digest of it."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """An immutable value. Fields that an older or newer version saved and this one does not know are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    def canonical_json(self) -> str:
        """Equal values give equal bytes."""
        return canonical_json(self.model_dump(mode="json"))


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no blanks, the same for equal values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(*values: Any) -> str:
    """First 16 hex digits of the SHA-256 of the values' canonical JSON."""
    text = "\n".join(canonical_json(value) for value in values)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
