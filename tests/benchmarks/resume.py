"""Results kept case by case, so that a long benchmark that was ended goes on where it stopped."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Kept:
    """One JSON line per finished case in ``path``; nothing is kept without one."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[str, dict[str, Any]] = {}
        if path is not None and path.is_file():
            for line in path.read_text(encoding="utf-8").splitlines():
                entry = json.loads(line)
                self._known[entry["case"]] = entry["result"]

    def has(self, case: object) -> bool:
        """Whether there is a result of ``case``."""
        return json.dumps(case, sort_keys=True) in self._known

    def result(self, case: object, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The kept result of ``case``, or a new one."""
        key = json.dumps(case, sort_keys=True)
        if key not in self._known:
            self._known[key] = make()
            if self._path is not None:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"case": key, "result": self._known[key]}) + "\n")
        return self._known[key]
