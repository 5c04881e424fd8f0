"""The ``lazytrain`` command. Each command imports what it needs when it runs, so that ``--help`` answers at once."""

from .app import main

__all__ = ["main"]
