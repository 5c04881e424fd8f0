"""Loading: what is wrong with the weights is named, and no more memory is taken than what stays and one layer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from lazytrain.jobs.errors import ModelError
from lazytrain.jobs.model import describe_model, empty_model, load_model
from lazytrain.jobs.spec import Model

LAYERS = 6


def write(folder: Path, *, width: int = 32, layers: int = LAYERS, form: str = "safetensors") -> Model:
    """A Qwen3 in float32 as one safetensors file, as several, or as several pickled ones."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=1000, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers, head_dim=16,
        num_attention_heads=2, num_key_value_heads=1, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    core = Tokenizer(models.WordLevel({"<pad>": 0, "<end>": 1, "a": 2}, unk_token="<pad>"))
    describe_model(model, PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>"), folder)
    if form != "bin":
        model.save_pretrained(folder, max_shard_size="50GB" if form == "safetensors" else "100KB")
        return Model(path=str(folder), dtype="float32")
    weights, where = model.state_dict(), {}
    for number in range(3):
        part = {name: weights[name].clone() for name in list(weights)[number::3]}
        torch.save(part, folder / f"pytorch_model-{number}.bin")
        where |= dict.fromkeys(part, f"pytorch_model-{number}.bin")
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return Model(path=str(folder), dtype="float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", ["safetensors", "shards", "bin"])
def test_every_form_gives_the_same_weights(tmp_path: Path, form: str, dtype: str) -> None:
    section = write(tmp_path, form=form).model_copy(update={"dtype": dtype})
    torch.manual_seed(0)
    expected = Qwen3ForCausalLM(Qwen3Config.from_pretrained(tmp_path)).state_dict()
    loaded = load_model(section)[0].state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name].to(tensor.dtype)) for name, tensor in loaded.items())
    assert loaded["lm_head.weight"].dtype == getattr(torch, dtype)


NAME = "model.layers.2.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda w: w.pop(NAME), f"misses weights: {NAME}"),
        (lambda w: w.update({"model.layers.9.x": torch.zeros(2)}), "has unexpected weights: model.layers.9.x"),
        (lambda w: w.update({NAME: torch.zeros(3, 5)}), rf"wrongly shaped weights: {NAME} \(\(3, 5\) instead of"),
        (lambda w: w[NAME].view(-1)[7].fill_(float("nan")), f"not finite: {NAME}"),
        (lambda w: w[NAME].view(-1)[7].fill_(float("inf")), f"not finite: {NAME}"),
    ],
    ids=["missing", "unexpected", "shape", "nan", "inf"],
)
def test_what_is_wrong_with_a_weight_is_named(tmp_path: Path, change: object, why: str) -> None:
    section = write(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    change(weights)  # type: ignore[operator]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=why):
        load_model(section)


def test_a_damaged_file_and_a_pickle_that_runs_code_are_refused(tmp_path: Path) -> None:
    section = write(tmp_path / "a")
    file = tmp_path / "a" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ModelError, match="cannot load"):
        load_model(section)
    section = write(tmp_path / "b", form="bin")

    class Evil:
        def __reduce__(self):
            return print, ("this ran",)

    torch.save({"model.norm.weight": Evil()}, tmp_path / "b" / "pytorch_model-0.bin")
    with pytest.raises(ModelError, match="cannot load"):
        load_model(section)


def test_a_description_makes_the_same_model_without_weights(tmp_path: Path) -> None:
    section = write(tmp_path / "model")
    model, tokenizer = load_model(section)
    describe_model(model, tokenizer, tmp_path / "start")
    assert not list((tmp_path / "start").glob("*.safetensors"))
    empty, again = empty_model(section, tmp_path / "start")
    assert {n: p.shape for n, p in empty.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}
    assert torch.equal(empty.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    assert again.get_vocab() == tokenizer.get_vocab()
    for tied in (False, True):
        model.config.tie_word_embeddings = tied
        describe_model(model, tokenizer, tmp_path / "tied")
        made, _ = empty_model(section, tmp_path / "tied")
        assert (made.lm_head.weight is made.model.embed_tokens.weight) is tied
    assert empty_model(section, tmp_path / "start", device="meta")[0].device.type == "meta"


MEMORY = """
import json, os, sys, threading, time
import torch
torch.set_num_threads(1)
from lazytrain.jobs.executor import stream
from lazytrain.jobs.introspect import model_facts
from lazytrain.jobs.model import load_model
from lazytrain.jobs.optim import HybridAdamW
from lazytrain.jobs.policy import Policy
from lazytrain.jobs.spec import Model

def own_bytes():
    "Memory of this process that is in no file."
    line = next(line for line in open("/proc/self/status") if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024

def watch():
    while True:
        peak[0] = max(peak[0], own_bytes())
        time.sleep(0.0005)

def streamed(path, dtype):
    model, _ = load_model(Model(path=path, dtype=dtype))
    facts = model_facts(model, micro_batch=1, sequence_length=8, dtype=dtype)
    policy = Policy.from_homes(facts, ["host"] * len(facts.layers) + ["gpu"])
    return facts, stream(model, policy, device="cpu", optimizer=HybridAdamW(lr=1e-3), facts=facts)

def measure(path, dtype):
    streamed(warm, dtype)
    global peak
    peak = [own_bytes()]
    before = peak[0]
    threading.Thread(target=watch, daemon=True).start()
    facts, result = streamed(path, dtype)
    unit = 4 * max(unit.parameters for unit in facts.units)
    weights = result.host_bytes()["weights_and_state"]
    print(json.dumps({"peak": peak[0] - before, "final": own_bytes() - before, "weights": weights, "unit": unit}))

warm, *cases = json.loads(sys.argv[1])
for path, dtype in cases:
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            measure(path, dtype)
            sys.stdout.flush()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.slow
def test_loading_takes_what_stays_and_a_layer(tmp_path: Path) -> None:
    """Seven million parameters, 28 MB in the file, of which no more than a layer's worth is ever there in vain."""
    cases = [("shards", "bfloat16"), ("bin", "bfloat16"), ("safetensors", "float32")]
    write(tmp_path / "small")
    for form, _ in cases:
        write(tmp_path / form, width=256, layers=8, form=form)
    given = json.dumps([str(tmp_path / "small"), *((str(tmp_path / form), dtype) for form, dtype in cases)])
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, given], check=True, capture_output=True, text=True, timeout=200
    )
    measured = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(measured) == len(cases)
    for one in measured:
        assert one["weights"] > 35e6
        # A layer as it was loaded and in float32; and what an allocator cannot give back at once.
        assert one["peak"] <= one["final"] + 2 * one["unit"] + (4 << 20), one


def test_an_attention_that_is_not_installed_is_named(tmp_path: Path) -> None:
    section = write(tmp_path, layers=1).model_copy(update={"attention": "flash_attention_2"})
    with pytest.raises(ModelError, match=r"(?i)flash"):
        load_model(section)
