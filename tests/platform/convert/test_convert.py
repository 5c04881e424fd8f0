"""Files of other trainers, written after their documented keys, become job files that validate; the rest is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from lazytrain.jobs.errors import InputError, SpecError
from lazytrain.jobs.spec import load_spec
from lazytrain.platform.convert import Conversion, convert, convert_text

FILES = Path(__file__).parent / "files"


def converted(name: str, **changes: Any) -> Conversion:
    return convert(FILES / name)


def why(conversion: Conversion) -> dict[str, str]:
    return {note.key: note.why for note in conversion.notes}


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "other.yaml"
    file.write_text(text, encoding="utf-8")
    return file


LLAMA_FACTORY = """
model_name_or_path: m
stage: sft
dataset: d
"""
AXOLOTL = "base_model: m\ndatasets: [{path: a.jsonl, type: alpaca}]\n"


@pytest.mark.parametrize("name", sorted(path.name for path in FILES.iterdir()))
def test_every_key_is_mapped_or_named_with_its_line(name: str, tmp_path: Path) -> None:
    """What is written loads as a job file, and each line of the file is in it or in the notes."""
    conversion = converted(name)
    file = tmp_path / "job.yaml"
    file.write_text(conversion.to_yaml(), encoding="utf-8")
    assert load_spec(file).name == Path(name).stem
    text = (FILES / name).read_text(encoding="utf-8").splitlines()
    for note in conversion.notes:
        assert note.key.rsplit(".", 1)[-1].split("[")[0] in text[note.line - 1]
    assert [note.line for note in conversion.notes] == sorted(note.line for note in conversion.notes)


def test_llama_factory() -> None:
    conversion = converted("qwen_full_sft.yaml")
    assert conversion.source == "LLaMA-Factory"
    assert conversion.job == {
        "name": "qwen_full_sft",
        "model": {
            "path": "Qwen/Qwen2.5-7B-Instruct",
            "trust_remote_code": True,
            "attention": "flash_attention_2",
            "dtype": "bfloat16",
        },
        "data": {
            "train": [{"path": "lab_data", "name": "metamath_demo"}, {"path": "lab_data", "name": "identity"}],
            "split": {"train": 0.9, "eval": 0.1},
            "max_length": 2048,
            "packing": True,
        },
        "train": {
            "epochs": 3,
            "batch": 32,
            "learning_rate": 1e-5,
            "schedule": "cosine",
            "warmup": 0.1,
            "max_grad_norm": None,
        },
        "optimizer": {"name": "adamw"},
        "output": {"dir": "saves/qwen2.5-7b/full/sft", "save_every": 250, "keep": 2},
    }
    told = why(conversion)
    assert "decided by the planner" in told["deepspeed"]
    assert "the tokenizer's own template" in told["template"]
    assert "epochs are whole: 3" in told["num_train_epochs"]
    assert told["per_device_train_batch_size"].startswith("train.batch 32 counts the rows of a step on one GPU")
    assert "resume_from_checkpoint" not in told, "null asks for nothing"
    assert {"max_samples", "eval_steps", "ddp_timeout", "report_to", "preprocessing_num_workers"} <= set(told)


def test_axolotl() -> None:
    conversion = converted("llama_full.yml")
    assert conversion.source == "Axolotl"
    job = conversion.job
    assert job["data"]["train"] == [
        {"path": "hf://mlabonne/FineTome-100k", "format": "messages", "part": "train"},
        {"path": "data/notes.jsonl", "format": "text", "columns": {"text": "body"}},
    ]
    assert job["data"]["split"] == {"train": 0.95, "eval": 0.05}
    assert (job["data"]["chat_template"], job["data"]["packing"], job["data"]["max_length"]) == ("chatml", True, 4096)
    assert job["train"] == {
        "epochs": 3,
        "batch": 8,
        "learning_rate": 2e-5,
        "warmup": 100,
        "weight_decay": 0.1,
        "patience": 4,
    }
    assert job["optimizer"] == {"name": "hybrid8bit", "betas": [0.9, 0.95]}
    told = why(conversion)
    assert "train.schedule knows constant, cosine, linear, wsd" in told["lr_scheduler"]
    assert {"datasets[0].field_messages", "datasets[0].roles_to_train", "special_tokens.pad_token"} <= set(told)
    assert not {"adapter", "load_in_8bit", "strict"} & set(told), "what is off needs no counterpart"


def test_megatrain() -> None:
    conversion = converted("megatrain_14b.yaml")
    assert conversion.source == "MegaTrain"
    job = conversion.job
    assert job["data"]["train"] == [
        {
            "path": "data/metamath.jsonl",
            "format": "query/response",
            "columns": {"query": "problem", "response": "solution"},
        }
    ]
    assert (job["train"]["batch"], job["train"]["max_steps"], job["train"]["max_grad_norm"]) == (96, 500, 1.0)
    assert job["optimizer"] == {"name": "adamw", "betas": [0.9, 0.98], "eps": 1e-8}
    told = why(conversion)
    assert "plan.planner: megatrain follows its rule" in told["memory.checkpoint_interval"]
    assert {"model.device", "memory.num_grad_slabs", "logging.log_interval", "dataset.num_workers"} <= set(told)


@pytest.mark.parametrize(
    ("text", "lora"),
    [
        (
            LLAMA_FACTORY + "finetuning_type: lora\nlora_rank: 4\nlora_dropout: 0.1\nlora_target: q_proj,v_proj\n",
            {"rank": 4, "alpha": 8, "dropout": 0.1, "target_modules": ["q_proj", "v_proj"]},
        ),
        (LLAMA_FACTORY + "lora_alpha: 24\nlora_target: all\n", {"rank": 8, "alpha": 24}),
        (LLAMA_FACTORY + "finetuning_type: full\n", None),
        (AXOLOTL + "adapter: qlora\nlora_r: 32\nlora_alpha: 16\nlora_target_linear: true\n", {"rank": 32, "alpha": 16}),
        (
            AXOLOTL + "adapter: lora\nlora_target_modules: [q_proj]\n",
            {"rank": 8, "alpha": 16, "target_modules": ["q_proj"]},
        ),
        (AXOLOTL, None),
    ],
)  # fmt: skip
def test_adapters_stay_adapters(tmp_path: Path, text: str, lora: dict[str, Any] | None) -> None:
    conversion = convert(written(tmp_path, text))
    assert conversion.job.get("lora") == lora
    assert conversion.notes == ()
    file = tmp_path / "job.yaml"
    file.write_text(conversion.to_yaml(), encoding="utf-8")
    assert (load_spec(file).lora is None) == (lora is None)


def test_what_adapters_cannot_be_is_named(tmp_path: Path) -> None:
    told = why(convert(written(tmp_path, LLAMA_FACTORY + "finetuning_type: freeze\nlora_rank: 8\n")))
    assert "plain LoRA" in told["finetuning_type"] and "all parameters are trained" in told["lora_rank"]
    told = why(convert(written(tmp_path, AXOLOTL + "adapter: qlora\nload_in_4bit: true\n")))
    assert "load_in_4bit" in told and "adapter" not in told


def test_an_unknown_key_is_named(tmp_path: Path) -> None:
    conversion = convert(written(tmp_path, LLAMA_FACTORY + "brand_new_option: 3\n"))
    note = next(note for note in conversion.notes if note.key == "brand_new_option")
    assert (note.line, note.value, note.why) == (5, 3, "has no counterpart")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: {path: a}\ndata: {train: [{path: b}]}\n", "no file of LLaMA-Factory, Axolotl or MegaTrain"),
        ("services: {web: {image: nginx}}\n", "no file of LLaMA-Factory"),
        ("model_name_or_path: m\nstage: kto\ndataset: d\n", "stage kto has no counterpart"),
        ("model_name_or_path: m\nstage: dpo\npref_loss: simpo\ndataset: d\n", "dpo with the loss simpo"),
        (AXOLOTL + "rl: grpo\n", "rl grpo has no counterpart"),
        ("- base_model: m\n", "mapping"),
        ("", "empty"),
        (AXOLOTL + "seed: [1, 2]\n", "train.seed"),
        (AXOLOTL + "learning_rate: .nan\n", "train.learning_rate"),
        ("base_model: m\ndatasets: [a.jsonl, 3]\n", "makes no job: data"),
        ("base_model: m\ndatasets: {path: a.jsonl}\n", "makes no job: data"),
        ("base_model: m\nbase_model: n\ndatasets: []\n", "base_model"),
        ("model: {name: m}\ntraining: {batch_size: 3}\n", "makes no job: data"),
        (LLAMA_FACTORY + "learning_rate: fast\n", "train.learning_rate"),
    ],
)
def test_files_that_cannot_be_converted(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words) as caught:
        convert(written(tmp_path, text))
    assert caught.value.exit_code == 2


def test_preferences_of_llama_factory() -> None:
    conversion = converted("mistral_dpo.yaml")
    job, told = conversion.job, why(conversion)
    assert job["train"]["objective"] == "dpo"
    assert job["train"]["dpo"] == {"beta": 0.2}
    assert job["train"]["batch"] == 32, "a pair is two sequences"
    assert "32 counts the sequences, two for a pair" in told["per_device_train_batch_size"]
    assert job["data"]["train"] == [{"path": "hf://trl-lib/ultrafeedback_binarized"}]
    assert job["lora"] == {"rank": 16, "alpha": 32, "target_modules": ["q_proj", "v_proj"]}
    assert "max_steps" not in job["train"] and "max_steps" not in told, "-1 sets no limit"
    assert "save_every" not in job["output"] and "save_steps" in told, "a share of the steps has no counterpart"
    assert {"streaming", "buffer_size", "enable_liger_kernel", "lr_scheduler_type", "run_name"} <= set(told)


def test_preferences_of_axolotl(tmp_path: Path) -> None:
    job = convert(written(tmp_path, AXOLOTL + "rl: dpo\nrl_beta: 0.3\nmicro_batch_size: 2\n")).job
    assert (job["train"]["objective"], job["train"]["dpo"], job["train"]["batch"]) == ("dpo", {"beta": 0.3}, 4)


def test_nested_and_shared_parts_of_axolotl() -> None:
    conversion = converted("qwen_chat.yaml")
    told = why(conversion)
    assert conversion.job["data"]["train"][1] == {
        "path": "hf://lab/instructions",
        "format": "alpaca",
        "part": "train[:90%]",
        "name": "en",
    }
    assert conversion.job["data"]["eval"] == conversion.job["data"]["train"]
    assert {
        "datasets[0].roles",
        "datasets[0].message_property_mappings",
        "datasets[1].shards",
        "test_datasets[1].shards",
        "plugins",
        "train_on_inputs",
        "neftune_noise_alpha",
        "loraplus_lr_ratio",
        "fsdp_config.fsdp_offload_params",
    } <= set(told)


def test_megatrain_with_a_named_set() -> None:
    conversion = converted("megatrain_named.yaml")
    assert conversion.job["data"]["train"] == [{"path": "/lab/data", "name": "metamath"}]
    assert conversion.job["train"]["max_grad_norm"] is None
    assert {"model.dtype", "model.devices", "optimizer.type", "dataset.train_on_prompt"} <= set(why(conversion))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("micro_batch_size", '"2"'),
        ("micro_batch_size", "-4"),
        ("micro_batch_size", "2.5"),
        ("gradient_accumulation_steps", "{a: 1}"),
        ("num_epochs", "three"),
        ("num_epochs", ".inf"),
        ("num_epochs", "-1"),
        ("max_steps", "1e3"),
        ("save_steps", "0.1"),
        ("val_set_size", "500"),
        ("val_set_size", "yes please"),
        ("optimizer", "[adamw_torch]"),
        ("lr_scheduler", "{type: cosine}"),
        ("chat_template", "[1, 2]"),
        ("attn_implementation", "7"),
        ("datasets_extra", "&a {b: 1}"),
        ("1", "2"),
        ("löschen", "ja"),
    ],
)
def test_a_value_that_means_nothing_is_named(key: str, value: str, tmp_path: Path) -> None:
    text = AXOLOTL + ("micro_batch_size: 1\n" if key.startswith("grad") else "") + f"{key}: {value}\n"
    conversion = convert(written(tmp_path, text))
    assert any(note.key.split(".")[0] == key for note in conversion.notes)


@pytest.mark.parametrize(
    "content",
    [b"\xff\xfe\x00", b"base_model: &a [*a]\ndatasets: [*a]\n", b"[" * 400, b"a: " + b"x" * (300 << 10), b"\x00"],
)
def test_odd_files_are_refused_in_words(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "odd.yaml"
    file.write_bytes(content)
    with pytest.raises(InputError):
        convert(file)


def test_a_file_that_is_not_yaml(tmp_path: Path) -> None:
    with pytest.raises(SpecError):
        convert(written(tmp_path, "a: [1\n"))


def test_the_text_is_yaml_in_the_order_of_a_job_file() -> None:
    conversion = converted("megatrain_14b.yaml")
    assert yaml.safe_load(conversion.to_yaml()) == conversion.job
    assert list(conversion.job) == ["name", "model", "data", "train", "optimizer"]


def test_a_text_that_was_pasted() -> None:
    text = "base_model: org/m\ndatasets: [{path: org/rows, type: alpaca}]\nsequence_len: 512\n"
    found = convert_text(text)
    assert found is not None
    assert (found.source, found.job["name"], found.job["data"]["max_length"]) == ("Axolotl", "job", 512)
    assert convert_text("name: a\nmodel: {path: m}\ndata: {train: [{path: r}]}\n") is None
    with pytest.raises(SpecError, match="the text"):
        convert_text("a: [")
