"""GSM8K trained twice from one start on the same rows in the same order: streamed by lazytrain, and by HF's Trainer.

    python tests/benchmarks/gsm8k.py [--quick] [--json] [--picture FILE] [--data FOLDER]

A Qwen3 of about two million parameters with a tokenizer made from the questions, everything in float32, AdamW with the
same schedule and clipping. ``largest_difference`` is that of the losses of any step; the target is 1e-4. The streamed
run has its boundaries on the host, recomputed and on the device in turn, two micro-batches a step.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from lazytrain.jobs.data import collate, order, pad_id, prepare
from lazytrain.jobs.introspect import model_facts
from lazytrain.jobs.policy import Policy
from lazytrain.jobs.schedule import learning_rate
from lazytrain.jobs.spec import JobSpec, load_spec
from lazytrain.jobs.tracking import read_metrics
from lazytrain.jobs.train import train

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
STEPS, QUICK_STEPS, BATCH, LENGTH = 120, 4, 16, 256
JOB = """\
name: gsm8k
model: {{path: model, dtype: float32}}
data:
  train: [{{path: {data}/gsm8k-train.jsonl}}]
  eval: [{{path: {data}/gsm8k-test.jsonl}}]
  max_length: {length}
  packing: false
train: {{batch: {batch}, max_steps: {steps}, learning_rate: 1e-3, warmup: 0.1, weight_decay: 0.1, seed: 7}}
optimizer: {{name: adamw}}
evaluate: {{answer: "####", limit: {limit}, max_new_tokens: 64, every: 0.1}}
output: {{dir: run, save_every: 50}}
"""


def write_inputs(folder: Path, data: Path, steps: int, limit: int) -> Path:
    """Tokenizer, model and job file."""
    from tokenizers import ByteLevelBPETokenizer

    core = ByteLevelBPETokenizer()
    with (data / "gsm8k-train.jsonl").open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    core.train_from_iterator(
        (f"{row['question']}\n{row['answer']}" for row in rows), vocab_size=2048,
        special_tokens=["<pad>", "<end>"], show_progress=False,
    )  # fmt: skip
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core._tokenizer, eos_token="<end>", pad_token="<pad>")
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=2048, hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=48, tie_word_embeddings=True, bos_token_id=None, eos_token_id=1,
        pad_token_id=0, max_position_embeddings=1024,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder / "model")
    job = folder / "job.yaml"
    job.write_text(JOB.format(data=data, batch=BATCH, steps=steps, length=LENGTH, limit=limit))
    return job


def ours(spec: JobSpec) -> dict[str, Any]:
    """The streamed run."""
    model = AutoModelForCausalLM.from_pretrained(spec.model.path)
    longest = prepare(spec.data, AutoTokenizer.from_pretrained(spec.model.path)).train.longest
    facts = model_facts(model, micro_batch=BATCH // 2, sequence_length=longest, dtype="float32")
    policy = Policy.from_homes(facts, ["host", "recompute", "host", "gpu", "gpu"], accumulation=2)
    started = time.perf_counter()
    result = train(spec, policy=policy, device="cpu")
    rows = read_metrics(Path(result.run_dir) / "metrics.jsonl")
    return {
        "seconds": time.perf_counter() - started,
        "losses": [row["loss"] for row in rows if "loss" in row],
        "eval_losses": [[row["step"], row["eval_loss"]] for row in rows if "eval_loss" in row],
        "exact_match_before": result.exact_match_before,
        "exact_match": result.exact_match,
        "parameters": facts.parameters,
    }


class Losses(TrainerCallback):
    """What Trainer logs, step by step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))


class InOrder(Trainer):
    """Trainer with the steps in the order in which they are given."""

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def theirs(spec: JobSpec, steps: int, folder: Path) -> dict[str, Any]:
    """HF's Trainer with torch's AdamW."""
    tokenizer = AutoTokenizer.from_pretrained(spec.model.path)
    rows = prepare(spec.data, tokenizer).train
    chosen = order(rows, batch=BATCH, seed=spec.train.seed, epoch=0, buckets=True)[:steps]
    batches = [collate(rows, batch, pad_id(tokenizer)).inputs() for batch in chosen]
    model = AutoModelForCausalLM.from_pretrained(spec.model.path)
    section = spec.train
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": section.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=section.learning_rate, betas=spec.optimizer.betas, eps=spec.optimizer.eps)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: learning_rate(section, min(done + 1, steps), steps) / section.learning_rate
    )
    arguments = TrainingArguments(
        output_dir=str(folder / "hf"), per_device_train_batch_size=1, max_steps=steps, logging_steps=1,
        max_grad_norm=section.max_grad_norm or 0.0, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
        seed=section.seed, logging_nan_inf_filter=False,
    )  # fmt: skip
    heard = Losses()
    trainer = InOrder(
        model=model, args=arguments, train_dataset=batches, data_collator=lambda items: items[0],
        optimizers=(optimizer, schedule), callbacks=[heard],
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)  # it writes to stdout
    started = time.perf_counter()
    trainer.train()
    return {"seconds": time.perf_counter() - started, "losses": heard.losses}


def run(*, quick: bool, data: Path) -> dict[str, Any]:
    """Both runs and their difference."""
    steps = QUICK_STEPS if quick else STEPS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spec = load_spec(write_inputs(folder, data, steps, 4 if quick else 50))
        mine = ours(spec)
        other = theirs(spec, steps, folder)
    differences = [abs(a - b) for a, b in zip(mine["losses"], other["losses"], strict=True)]
    return {
        "largest_difference": max(differences),
        "mean_difference": sum(differences) / len(differences),
        "steps": steps,
        "batch": BATCH,
        "parameters": mine["parameters"],
        "first_loss": mine["losses"][0],
        "last_loss": mine["losses"][-1],
        "exact_match_before": mine["exact_match_before"],
        "exact_match": mine["exact_match"],
        "seconds": {"lazytrain": round(mine["seconds"], 1), "trainer": round(other["seconds"], 1)},
        "lazytrain": mine["losses"],
        "trainer": other["losses"],
        "eval_losses": mine["eval_losses"],
        "machine": {"processor": platform.processor() or platform.machine(), "threads": torch.get_num_threads()},
        "versions": {"python": platform.python_version(), **{p: version(p) for p in ("torch", "transformers")}},
    }


def draw(result: dict[str, Any], path: Path) -> None:
    """Both curves, and their difference below."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    steps = range(1, result["steps"] + 1)
    figure, (above, below) = plt.subplots(2, 1, figsize=(7, 6), sharex=True, height_ratios=(2, 1))
    above.plot(steps, result["trainer"], label="HF Trainer", linewidth=3, alpha=0.4)
    above.plot(steps, result["lazytrain"], label="lazytrain", linewidth=1)
    above.plot(*zip(*result["eval_losses"], strict=True), "k.", label="lazytrain, test rows")
    above.set(ylabel="loss", title=f"GSM8K, {result['parameters'] / 1e6:.1f} M parameters, float32")
    above.legend()
    pairs = zip(result["lazytrain"], result["trainer"], strict=True)
    below.semilogy(steps, [max(abs(a - b), 1e-9) for a, b in pairs], linewidth=1)
    below.axhline(1e-4, color="grey", linestyle="--")
    below.set(xlabel="step", ylabel="difference")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} steps")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--picture", type=Path, help="file for the curves")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of gsm8k-train.jsonl and gsm8k-test.jsonl")
    chosen = parser.parse_args()
    result = run(quick=chosen.quick, data=chosen.data)
    if chosen.picture:
        draw(result, chosen.picture)
    if chosen.json:
        json.dump(result, sys.stdout, indent=1)
        print()
        return
    print(
        f"{result['steps']} steps: loss {result['first_loss']:.3f} -> {result['last_loss']:.3f}, largest difference to "
        f"Trainer {result['largest_difference']:.1e}; {result['seconds']}"
    )


if __name__ == "__main__":
    main()
