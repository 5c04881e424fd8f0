"""What the libraries that read models raise for files and configurations that are not what they should be."""

from __future__ import annotations

from pickle import UnpicklingError  # only its name: nothing is unpickled
from typing import Final

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

FOREIGN: Final = (
    *(OSError, ValueError, ImportError, RuntimeError, EOFError, SafetensorError, UnpicklingError),
    *(TypeError, AttributeError, LookupError, ArithmeticError, StrictDataclassError),  # JSON, but not what it should be
)


def words_of(error: BaseException) -> str:
    """What an error says, on one line of bounded length; its class where it says nothing."""
    return " ".join(str(error).split())[:300] or type(error).__name__
