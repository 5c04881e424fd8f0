"""Loading: what is wrong with the weights is named, and no more memory is taken than what stays and one layer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import GptOssConfig, GptOssForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from lazytrain.jobs.errors import ModelError
from lazytrain.jobs.introspect import model_facts
from lazytrain.jobs.model import describe_model, empty_model, load_model
from lazytrain.jobs.model_facts import ModelFacts
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


def test_an_id_beyond_the_embedding_is_refused_also_where_ids_have_gaps(tmp_path: Path) -> None:
    section = write(tmp_path)
    core = Tokenizer(models.WordLevel({"<pad>": 0, "<end>": 1, "far": 1000}, unk_token="<pad>"))
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="token 'far' has the id 1,000, the model's embedding only 1,000 rows"):
        load_model(section)


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


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 0}, {"hidden_size": "wide"}, {"vocab_size": 0}, {"head_dim": 0}, {"layer_types": 3},
        {"num_attention_heads": 0}, {"rope_parameters": "none"},
    ],
    ids=lambda changes: next(iter(changes)),
)  # fmt: skip
def test_a_configuration_that_makes_no_model_is_refused_with_what_is_wrong(tmp_path: Path, changes: object) -> None:
    section = write(tmp_path, layers=1)
    config = json.loads((tmp_path / "config.json").read_text()) | changes  # type: ignore[operator]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError) as caught:
        load_model(section)
    assert str(tmp_path) in caught.value.message and caught.value.hint
    with pytest.raises(ModelError):
        facts_of(config)


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

def streamed(path, dtype, optimizer):
    model, _ = load_model(Model(path=path, dtype=dtype))
    facts = model_facts(model, micro_batch=1, sequence_length=8, dtype=dtype)
    policy = Policy.from_homes(facts, ["host"] * len(facts.layers) + ["gpu"])
    trained = HybridAdamW(lr=1e-3) if optimizer else None
    return facts, stream(model, policy, device="cpu", optimizer=trained, facts=facts)

def measure(path, dtype, optimizer):
    streamed(warm, dtype, optimizer)
    global peak
    peak = [own_bytes()]
    before = peak[0]
    threading.Thread(target=watch, daemon=True).start()
    facts, result = streamed(path, dtype, optimizer)
    unit = max(unit.weight_bytes for unit in facts.units)
    weights = result.host_bytes()["weights_and_state"]
    print(json.dumps({"peak": peak[0] - before, "final": own_bytes() - before, "weights": weights, "unit": unit}))

warm, *cases = json.loads(sys.argv[1])
for path, dtype, optimizer in cases:
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            measure(path, dtype, optimizer)
            sys.stdout.flush()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.slow
def test_loading_takes_what_stays_and_a_layer(tmp_path: Path) -> None:
    """15 million parameters, 60 MB in the file; resident bytes of the process, without those mapped from files.

    Tensors are smaller here than a real model's, which go back to the system as soon as they are freed; the
    environment has the allocator do the same with these.
    """
    cases = [("shards", "bfloat16", True), ("bin", "float32", True), ("safetensors", "bfloat16", False)]
    write(tmp_path / "small")
    for form in ("shards", "bin", "safetensors"):
        write(tmp_path / form, width=384, layers=8, form=form)
    given = json.dumps([str(tmp_path / "small"), *((str(tmp_path / form), *how) for form, *how in cases)])
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, given], check=True, capture_output=True, text=True, timeout=200,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
    )  # fmt: skip
    measured = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(measured) == len(cases)
    for case, one in zip(cases, measured, strict=True):
        assert one["unit"] > 3e6
        assert one["peak"] <= one["final"] + one["unit"] + (1 << 20), (case, one)


def quantised(folder: Path, **section: object) -> Model:
    model = write(folder, layers=1)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": section}))
    return model


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "fp8", "something new"])
def test_a_quantised_model_is_refused_when_planned_and_when_loaded(tmp_path: Path, method: str) -> None:
    section = quantised(tmp_path, quant_method=method, bits=4, load_in_4bit=True)
    for ask in (lambda: load_model(section), lambda: facts_of(json.loads((tmp_path / "config.json").read_text()))):
        with pytest.raises(ModelError, match=rf"quantised \({method}\)") as raised:
            ask()
        assert "made from" in raised.value.hint


def facts_of(config: dict[str, object]) -> ModelFacts:
    return model_facts(config, micro_batch=1, sequence_length=8)


def test_a_model_in_4_bits_is_planned_and_loaded_with_all_that_it_expands_to(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Experts as gpt-oss has them: pairs of e2m1 numbers in bytes, and a power of two for each 32."""
    tiny = GptOssConfig(
        vocab_size=16, hidden_size=32, intermediate_size=32, num_hidden_layers=1, head_dim=16, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=2, num_experts_per_tok=1, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    model = GptOssForCausalLM(tiny).to(torch.bfloat16)
    core = Tokenizer(models.WordLevel({"<pad>": 0, "<end>": 1, "a": 2}, unk_token="<pad>"))
    describe_model(model, PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>"), tmp_path)
    weights = {name: tensor for name, tensor in model.state_dict().items() if not name.endswith("_proj")}
    for part, rows in (("gate_up_proj", 64), ("down_proj", 32)):
        name = f"model.layers.0.mlp.experts.{part}"
        weights[f"{name}_blocks"] = torch.full((2, rows, 1, 16), 0x2A, dtype=torch.uint8)  # -1, 1, -1, 1 ...
        weights[f"{name}_scales"] = torch.full((2, rows, 1), 128, dtype=torch.uint8)  # x 2
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    plain = facts_of(config)
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert facts_of(config).layers[0].weight_bytes == plain.layers[0].weight_bytes
    loaded, _ = load_model(Model(path=str(tmp_path), dtype="bfloat16", attention="eager"))
    assert "published in 4 bits" in caplog.text
    experts = loaded.model.layers[0].mlp.experts.gate_up_proj
    assert (experts.shape, experts.dtype) == (model.model.layers[0].mlp.experts.gate_up_proj.shape, torch.bfloat16)
    assert torch.equal(experts.reshape(-1).abs(), torch.full((experts.numel(),), 2.0, dtype=torch.bfloat16))
    describe_model(loaded, core_tokenizer(core), tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def core_tokenizer(core: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>")


def test_two_weights_in_the_same_memory_are_refused(tmp_path: Path) -> None:
    """As a pickle can say, of an embedding and a head that the configuration does not tie."""
    section = write(tmp_path, layers=1, form="bin")
    where = json.loads((tmp_path / "pytorch_model.bin.index.json").read_text())
    weights = {}
    for file in {*where["weight_map"].values()}:
        weights |= torch.load(tmp_path / file)
        (tmp_path / file).unlink()
    (tmp_path / "pytorch_model.bin.index.json").unlink()
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    torch.save(weights, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"same memory.*lm_head.weight") as raised:
        load_model(section)
    assert "tie_word_embeddings" in raised.value.hint


def test_an_attention_that_is_not_installed_is_named(tmp_path: Path) -> None:
    section = write(tmp_path, layers=1).model_copy(update={"attention": "flash_attention_2"})
    with pytest.raises(ModelError, match=r"(?i)flash"):
        load_model(section)
