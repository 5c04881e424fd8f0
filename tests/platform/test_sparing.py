"""What a process that only measures does without: in a process of its own, for nothing of it can be taken back."""

import json
import subprocess
import sys

from lazytrain.jobs.model_facts import ModelFacts
from lazytrain.platform.models import facts_of

CONFIGS = [
    {
        "model_type": name, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    }
    for name in ("llama", "qwen3_moe")
]  # fmt: skip
SCRIPT = """
import importlib.util, json, sys
from pathlib import Path
from lazytrain.platform.models import facts_of
from lazytrain.platform.sparing import spare_imports

spare_imports()
assert importlib.util.find_spec("scipy") is None and "torch" not in sys.modules
for config in json.loads(sys.argv[1]):
    print(facts_of(config, batch=2, length=16).model_dump_json())
for name in ("torch._dynamo.convert_frame", "torch.distributed.checkpoint", "torch.distributed.tensor._ops", "scipy"):
    assert sys.modules.get(name) is None, name

import transformers
from transformers.utils import import_utils

models = str(Path(transformers.__file__).parent / "models" / "__init__.py")
read = import_utils.create_import_structure_from_path(models)
assert import_utils.define_import_structure(models) == import_utils.spread_import_structure(read)
"""


def test_facts_are_the_same_without_what_is_spared() -> None:
    command = [sys.executable, "-c", SCRIPT, json.dumps(CONFIGS)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    spared = [ModelFacts.model_validate_json(line) for line in ended.stdout.splitlines()]
    assert spared == [facts_of(config, batch=2, length=16) for config in CONFIGS]
