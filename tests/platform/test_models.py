"""What a job trains is found by name, and refused in words; what its facts come from is known by its shape."""

import gc
import json
from pathlib import Path

import pytest

from lazytrain.jobs.errors import ModelError
from lazytrain.platform.models import find_model, shape_of, uncollected

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}


def test_a_model_is_found_by_shape_file_and_folder(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    assert find_model("qwen2.5-7b")["model_type"] == "qwen2"  # type: ignore[index]
    assert find_model(str(file)) == CONFIG
    assert find_model(str(tmp_path)).hidden_size == 64  # type: ignore[union-attr]


@pytest.mark.parametrize("text", ["not json", "[]", "{}", '{"model_type": 3}', "[" * 100_000, " " * (1 << 25), "\0"])
def test_a_file_that_is_no_configuration(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ModelError, match="not a model configuration"):
        find_model(str(file))


@pytest.mark.parametrize("config", [{**CONFIG, "num_hidden_layers": "three"}, [], None])
def test_a_folder_whose_configuration_is_none_is_named(tmp_path: Path, config: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=f"no model configuration at {tmp_path}: .+"):
        find_model(str(tmp_path))


@pytest.mark.parametrize("name", ["", "a" * 5000, "a\0b", "no/such/folder", "/no/such", "../no", "[red]", "a b"])
def test_what_is_neither_a_path_nor_a_hub_id_is_said_in_a_line(name: str) -> None:
    with pytest.raises(ModelError, match="no such file or folder") as caught:
        find_model(name)
    assert len(caught.value.message) < 200 and "\n" not in caught.value.message and "config.json" in caught.value.hint


def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def nobody(url: str, **_: object) -> None:
        asked.append(url)
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", nobody)
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", None)
    with pytest.raises(ModelError, match=r"no file or folder, and the hub does not answer \(Name or service"):
        find_model("somebody/no-such-model")
    assert len(asked) == 1 and asked[0].endswith("/somebody/no-such-model/resolve/main/config.json")


def test_a_hub_that_knows_no_such_model_says_so_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(name: str, **_: object) -> None:
        raise OSError(f"{name} is not a model identifier listed on the hub")

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", lambda *_, **__: None)
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", said)
    with pytest.raises(ModelError, match="is not a model identifier"):
        find_model("somebody/no-such-model")


def test_code_that_a_model_brings_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({**CONFIG, "model_type": "own", "auto_map": {"AutoConfig": "own.Config"}})
    )
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ModelError, match="brings code of its own") as caught:
        find_model(str(tmp_path))
    assert "trust_remote_code: true" in caught.value.hint
    assert not (tmp_path / "ran").exists()


def test_a_configuration_with_an_infinite_value_has_a_shape_to_be_known_by(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**CONFIG, "time_step_limit": [0.0, float("inf")]}))
    assert shape_of(find_model(str(file))) == {**CONFIG, "time_step_limit": [0.0, "Infinity"]}


def test_garbage_is_collected_again_after_imports() -> None:
    assert gc.isenabled()
    with pytest.raises(ImportError), uncollected():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()  # as it was
        frozen = gc.get_freeze_count()
        with uncollected():
            cycle: list[object] = []
            cycle.append(cycle)
        assert gc.get_freeze_count() == frozen  # nothing was imported
    finally:
        gc.enable()
