"""An actor on each node that says what is there: versions, the shared folder, GPUs and who uses them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..inspection import list_devices, versions


class Inspector:
    """Holds nothing and touches no GPU: it asks the driver's own tool."""

    def look(self, token_file: str) -> dict[str, Any]:
        """Values of `runs.NodeReport`."""
        return {
            "versions": versions(),
            "token": _token(Path(token_file)),
            "devices": [vars(device) for device in list_devices()],
        }


def _token(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
