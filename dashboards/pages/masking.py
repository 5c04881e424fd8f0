"""Job files as people may see them: what looks like a secret is not shown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

HIDDEN = "••••••"
_SECRET_WORDS = {"token", "secret", "password", "passwd", "credential", "credentials", "apikey", "auth"}
_SECRET_KEY = re.compile(r"(api|access|private|secret)[_-]?key", re.IGNORECASE)
_IN_TEXT = (
    re.compile(r"(?<=://)[^/@\s]+(?=@)"),
    re.compile(r"\b(hf|ghp|gho|github_pat|sk|xox[abp]|glpat)[_-][A-Za-z0-9_-]{16,}"),
    re.compile(r"\bAKIA[A-Z0-9]{16}\b"),
    re.compile(r"(?<=[?&])(token|key|sig|signature|password)=[^&\s]+", re.IGNORECASE),
)


def masked_yaml(spec: Mapping[str, Any]) -> str:
    """The job file's text with secrets hidden."""
    return yaml.safe_dump(masked(spec), sort_keys=False, allow_unicode=True)


def masked(value: Any, key: str = "") -> Any:
    """The value with everything hidden that its key, or its own form, gives away as a secret."""
    if isinstance(value, Mapping):
        return {name: masked(inner, str(name)) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [masked(inner, key) for inner in value]
    if not isinstance(value, str) or not value:
        return value
    if _SECRET_WORDS.intersection(re.split(r"[^a-z]+", key.lower())) or _SECRET_KEY.search(key):
        return HIDDEN
    for pattern in _IN_TEXT:
        value = pattern.sub(HIDDEN, value)
    return value
