"""What `lazytrain demo` trains on, made on the spot: problems, tokenizer, model and job file."""

from .inputs import write_inputs
from .problems import Problems, make_problems

__all__ = ["Problems", "make_problems", "write_inputs"]
