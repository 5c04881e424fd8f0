"""TRL's trainers on a streamed model, as they are, against the same trainers on the plain model."""

from __future__ import annotations

import contextlib

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from lazytrain.jobs.executor import Emulated, stream
from lazytrain.jobs.introspect import model_facts
from lazytrain.jobs.optim import HybridAdamW
from lazytrain.jobs.policy import Policy

HOMES = ["host", "recompute", "gpu", "nvme", "recompute", "gpu"]
VOCABULARY, LENGTH, LR = 50, 17, 2e-3


@pytest.fixture(scope="module")
def tokenizer():
    words = models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w3")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1", pad_token="w2", bos_token="w0")


def sentence(generator, low, high):
    length = int(torch.randint(low, high, (), generator=generator))
    return " ".join(f"w{i}" for i in torch.randint(4, VOCABULARY, (length,), generator=generator).tolist())


def completions(count):
    generator = torch.Generator().manual_seed(5)
    return Dataset.from_list(
        [{"prompt": sentence(generator, 2, 6), "completion": " " + sentence(generator, 3, 10)} for _ in range(count)]
    )


def plain_adamw(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR, weight_decay=0.0)


@contextlib.contextmanager
def streaming(model, rows=3):
    facts = model_facts(model, micro_batch=rows, sequence_length=LENGTH, dtype="float32")
    optimizer = HybridAdamW(lr=LR, state_bits=32)
    policy = Policy.from_homes(facts, HOMES)
    with stream(model, policy, device=Emulated(memory_bytes=1 << 30), optimizer=optimizer, facts=facts) as streamed:
        yield streamed


COMMON = {
    "per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "max_steps": 9, "max_grad_norm": 1.35,
    "logging_steps": 1, "save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True, "bf16": False,
    "warmup_steps": 3,
}  # fmt: skip


def values(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def assert_same_run(got, wanted, *names):
    for name in ("loss", "grad_norm", "learning_rate", *names):
        assert len(values(wanted, name)) > 2, name
        rounding = 1e-5 if name == "rewards/margins" else 1e-7  # a difference of sums over rows
        assert values(got, name) == pytest.approx(values(wanted, name), rel=1e-5, abs=rounding), name


def run_sft(model, optimizer, directory, tokenizer, **options):
    args = SFTConfig(str(directory), **{**COMMON, "max_length": LENGTH, **options})
    trainer = SFTTrainer(
        model, args, train_dataset=completions(39), eval_dataset=completions(6), processing_class=tokenizer,
        optimizers=(optimizer, None),
    )  # fmt: skip
    trainer.train()
    return trainer


def test_sft_with_its_own_head_and_metrics(make_model, tokenizer, tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 3}
    reference, model = (make_model("qwen3", seed=1) for _ in range(2))
    wanted = run_sft(reference, plain_adamw(reference), tmp_path, tokenizer, **options)
    with streaming(model) as streamed:
        got = run_sft(streamed.model, streamed.trainer_optimizer(), tmp_path, tokenizer, **options)
        assert_same_run(got, wanted, "eval_loss", "entropy", "mean_token_accuracy")


def preferences(count):
    generator = torch.Generator().manual_seed(6)
    return Dataset.from_list(
        [
            {
                "prompt": sentence(generator, 2, 6),
                "chosen": " " + sentence(generator, 3, 9),
                "rejected": " " + sentence(generator, 3, 9),
            }
            for _ in range(count)
        ]
    )


def run_dpo(model, reference, optimizer, directory, tokenizer, **options):
    args = DPOConfig(str(directory), **{**COMMON, "max_length": LENGTH, "max_grad_norm": 3.0, "beta": 0.5, **options})
    trainer = DPOTrainer(
        model, reference, args, train_dataset=preferences(39), processing_class=tokenizer, optimizers=(optimizer, None)
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize("reference_is", ["streamed", "computed before"])
def test_dpo(reference_is, make_model, tokenizer, tmp_path):
    plain, model, reference, other = (make_model("qwen3", seed=1) for _ in range(4))
    options = {"precompute_ref_log_probs": reference_is == "computed before"}
    wanted = run_dpo(
        plain, None if options["precompute_ref_log_probs"] else reference, plain_adamw(plain), tmp_path, tokenizer,
        **options,
    )  # fmt: skip
    with streaming(model, rows=6) as streamed, streaming(other, rows=6) as frozen:
        given = None if options["precompute_ref_log_probs"] else frozen.model
        got = run_dpo(streamed.model, given, streamed.trainer_optimizer(), tmp_path, tokenizer, **options)
        assert_same_run(got, wanted, "rewards/margins", "rewards/accuracies", "logps/chosen", "entropy")
