"""Models of different kinds, written unit by unit, are what `from_pretrained` makes of the folder: the same logits."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from lazytrain.jobs.checkpoint import export_weights
from lazytrain.jobs.executor import stream
from lazytrain.jobs.introspect import model_facts
from lazytrain.jobs.model import describe_model
from lazytrain.jobs.policy import Policy

families = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "families.py")))


class NoTokenizer:
    def save_pretrained(self, folder: Path) -> None:
        pass


@pytest.mark.parametrize(
    "architecture",
    ["gpt2", "bloom", "gemma3_text", "gpt_oss", "qwen3_5_text", "qwen3_moe", "mixtral", "phi3", "mamba"],
)
def test_what_is_exported_has_the_logits_of_the_model(architecture: str, tmp_path: Path) -> None:
    model = families.small_model(architecture).eval()
    ids = torch.arange(2, 10)[None]
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
    facts = model_facts(model, micro_batch=1, sequence_length=8, dtype="float32")
    policy = Policy.from_homes(facts, [*("host" for _ in facts.layers), "gpu"])
    with stream(model, policy, device="cpu", facts=facts) as streamed, export_weights(tmp_path / "out") as writer:
        describe_model(model, NoTokenizer(), writer.folder)
        for _, weights in streamed.named_weights():
            writer.add(model, weights)
        writer.add(model, streamed.rest())
    again, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(loading[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        assert torch.equal(again.eval()(input_ids=ids).logits, wanted)
