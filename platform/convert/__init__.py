"""Job files out of the files of other trainers; every key without a counterpart is named, with its line."""

from .detect import convert
from .draft import Conversion, Note

__all__ = ["Conversion", "Note", "convert"]
