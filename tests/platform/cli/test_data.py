"""``lazytrain data check``: counts, refusals, marked samples, padding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lazytrain.platform.cli.app import run

TEMPLATE = (
    "{% for m in messages %}<s> {{ m.role }} {{ m.content }} </s>{% endfor %}"
    "{% if add_generation_prompt %}<s> assistant {% endif %}"
)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    words = ["<pad>", "<s>", "</s>", "user", "assistant", *"abcdefgh", *"\u2028"]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    core.add_special_tokens(["<s>", "</s>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", pad_token="<pad>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen3"}')
    rows = [{"messages": [{"role": "user", "content": "a " * n + "\u2028"}, {"role": "assistant", "content": "b c"}]}
            for n in range(1, 41)]  # fmt: skip
    rows += [{"messages": []}, {"messages": [{"role": "bot", "content": "x"}]}]
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
    )
    (tmp_path / "job.yaml").write_text("model: {path: model}\ndata: {train: [{path: rows.jsonl}], split: {train: 1}}\n")
    return tmp_path / "job.yaml"


def test_json(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["data", "check", str(job), "--batch", "4", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["rows"], facts["train_rows"], facts["refused"]) == (42, 40, 2)
    assert facts["supervised_tokens"] == 40 * 3
    assert {refusal["lines"][0] for refusal in facts["refusals"]} == {41, 42}
    assert sum(entry["rows"] for entry in facts["lengths"]) == 40
    assert facts["lengths"][-1]["to"] == facts["longest"] == facts["worst_batch"]["width"]
    assert len(facts["samples"]) == 3
    for sample in facts["samples"]:
        assert [piece["text"] for piece in sample["pieces"] if piece["supervised"]] == ["b c </s>"]
        assert "\u2028" in sample["pieces"][0]["text"]
    waste = facts["padding"]
    assert 0 <= waste["packed"] < waste["plain"] < 1 and waste["buckets"] < waste["plain"]
    assert len(facts["cache_key"]) == 16


def test_the_key_changes_with_the_content(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = []
    for content in ("b c", "b d"):
        text = (job.parent / "rows.jsonl").read_text(encoding="utf-8")
        (job.parent / "rows.jsonl").write_text(text.replace("b c", content), encoding="utf-8")
        run(["data", "check", str(job), "--json"])
        keys.append(json.loads(capsys.readouterr().out)["cache_key"])
    assert keys[0] != keys[1]


def test_for_a_person(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["data", "check", str(job), "--samples", "1"]) == 0
    shown = capsys.readouterr().out
    for words in (
        "42",
        "the conversation is empty",
        "unknown role",
        "⟦b c </s>⟧",
        "packed",
        "worst batch",
        "cache key",
    ):
        assert words in shown


def test_no_usable_row(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (job.parent / "rows.jsonl").write_text('{"messages": []}\n' * 3)
    assert run(["data", "check", str(job), "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert "3  the conversation is empty" in error["message"]
