"""The process that is a local Ray for others: started by ``lazytrain up``, it lives until it is told to end.

python -m lazytrain.platform.cluster.head ADDRESS_FILE KIND DEVICE GPUS [CPUS]
"""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

from ...jobs.run_directory import write_atomically
from ..settings import Settings
from .local import LocalRay


def main(arguments: list[str]) -> None:
    """Start Ray, write its address, wait for SIGTERM, stop Ray."""
    address_file, kind, device, gpus = Path(arguments[0]), arguments[1], arguments[2], int(arguments[3])
    cpus = int(arguments[4]) if len(arguments) > 4 else None
    told = threading.Event()
    address_file.unlink(missing_ok=True)
    with LocalRay(Settings.read(), kind=kind, device=device, cpus=cpus, gpus=gpus) as local:
        # Only now: Ray puts handlers of its own in place when it starts.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda _number, _frame: told.set())
        address_file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(address_file, local.address)
        told.wait()
        address_file.unlink(missing_ok=True)


if __name__ == "__main__":
    main(sys.argv[1:])
