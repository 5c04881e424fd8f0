"""Text from a causal language model of transformers, a streamed one included."""

from .generate import generate
from .sampling import GREEDY, Sampling

__all__ = ["GREEDY", "Sampling", "generate"]
