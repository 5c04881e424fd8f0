"""The job file people write: strict YAML in, checked values out."""

from .document import read_yaml
from .load import check_text, load_spec
from .sections import (
    Data,
    Dpo,
    Evaluate,
    JobSpec,
    Lora,
    Model,
    Optimizer,
    Output,
    Plan,
    Queue,
    Resources,
    Section,
    Source,
    Split,
    Train,
)

__all__ = [
    "Data",
    "Dpo",
    "Evaluate",
    "JobSpec",
    "Lora",
    "Model",
    "Optimizer",
    "Output",
    "Plan",
    "Queue",
    "Resources",
    "Section",
    "Source",
    "Split",
    "Train",
    "check_text",
    "load_spec",
    "read_yaml",
]
