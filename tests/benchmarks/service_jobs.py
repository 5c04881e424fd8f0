"""The jobs of `service`: tiny fine-tunes of mixed size, length and user; one is impossible and one has bad data."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from lazytrain.jobs.executor import Emulated
from lazytrain.jobs.policy import Policy
from lazytrain.jobs.spec import JobSpec, load_spec
from lazytrain.jobs.train import train
from lazytrain.platform.artifacts import JobFiles
from lazytrain.platform.cluster.runs import RunOrder
from lazytrain.platform.demo import inputs

USERS = ("ada", "ben", "cleo")
SIZES = {"small": (32, 2), "medium": (48, 4), "large": (96, 8)}
"""Width and layers."""
RULES = (
    "train.batch=4",
    "train.epochs=100",
    "plan.nvme=null",
    "plan.planner=every_layer",
    "evaluate.limit=1",
    "evaluate.every=1.0",
    "evaluate.max_new_tokens=4",
)
URGENT = 95
"""Priority of the job that others make room for."""


@dataclass(frozen=True)
class Wanted:
    """A job, and how it has to end."""

    user: str
    spec: JobSpec
    ends: str = "SUCCEEDED"
    reason: str = "done"


class Catalogue:
    """Writes models and rows into a folder, and makes jobs of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        inputs._TRAIN_ROWS, inputs._EVAL_ROWS = 240, 4
        self._job = inputs.write_inputs(folder, seed=0)
        tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        for name, (width, layers) in SIZES.items():
            tokenizer.save_pretrained(folder / name)
            _model(folder / "model", width, layers).save_pretrained(folder / name)
        (folder / "bad.jsonl").write_text(json.dumps({"nothing": 1}) + "\n")

    def mixed(self, count: int) -> list[Wanted]:
        """``count`` jobs that have nothing to do with each other, two of which cannot run."""
        draw = random.Random(7)
        good = [
            self.job(f"mixed-{i}", draw.choice(list(SIZES)), draw.choice((10, 20, 40)), draw.choice((45, 50, 55)), i)
            for i in range(count - 2)
        ]
        impossible = self.job("impossible", "small", 10, 50, 0, "plan.host_memory=20kB")
        bad = self.job("bad-data", "small", 10, 50, 0, f"data.train.0.path={self._folder / 'bad.jsonl'}")
        return [
            *good,
            Wanted("ada", impossible.spec, "REJECTED", "does_not_fit"),
            Wanted("ben", bad.spec, "REJECTED", "invalid_data"),
        ]

    def job(self, name: str, size: str, steps: int, priority: int, seed: int, *rules: str) -> Wanted:
        """A job that can run."""
        own = (f"name={name}", f"model.path={self._folder / size}", f"train.max_steps={steps}", f"train.seed={seed}")
        save = f"output.save_every={max(5, steps // 20)}"
        spec = load_spec(self._job, (*RULES, *own, save, f"queue.priority={priority}", *rules))
        return Wanted(USERS[seed % len(USERS)], spec)


def _model(like: Path, width: int, layers: int) -> Qwen3ForCausalLM:
    """The demo's model with another shape."""
    known = Qwen3Config.from_pretrained(like)
    config = Qwen3Config(
        vocab_size=known.vocab_size, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=256,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=known.eos_token_id, pad_token_id=known.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(width)
    return Qwen3ForCausalLM(config)


def loss_alone(run_dir: str, folder: Path) -> float | None:
    """Last loss when the job of ``run_dir`` is trained again by itself, as its first attempt was told to."""
    torch.set_num_threads(1)  # as many as a run of the service has
    order = RunOrder.from_dict(json.loads(JobFiles(run_dir).attempt(1).order.read_text()))
    device = Emulated(**{name: value for name, value in order.device.items() if name != "kind"})
    spec, policy = JobSpec.model_validate(order.spec), Policy.model_validate(order.policy)
    return train(spec, policy=policy, device=device, run_dir=folder / order.job).loss
