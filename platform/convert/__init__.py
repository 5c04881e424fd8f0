"""Job files out of the files of other trainers; every key without a counterpart is named, with its line."""

from .detect import convert, convert_text
from .draft import Conversion, Note

__all__ = ["Conversion", "Note", "convert", "convert_text"]
