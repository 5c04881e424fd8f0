"""Folders, registries, several sources with weights, and what is kept of them."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import sys
from pathlib import Path

import pytest

from lazytrain.jobs.data import Prepared, prepare
from lazytrain.jobs.errors import DataError
from lazytrain.jobs.spec import Data

LINE = '{"query": "%s?", "response": "%s"}\n'


def answers(prepared: Prepared) -> list[str]:
    return list(prepared.train.answers)


@pytest.fixture
def prepare_from(tokenizer):
    def prepare_from(*sources: dict[str, object], cache: Path | None = None, **options: object) -> Prepared:
        options = {"split": {"train": 1.0}, **options}
        return prepare(Data.model_validate({"train": sources, **options}), tokenizer, cache=cache)

    return prepare_from


class TestFolders:
    def test_every_data_file_in_it(self, prepare_from, tmp_path: Path) -> None:
        (tmp_path / "sub").mkdir()
        (tmp_path / "b.jsonl").write_text(LINE % (1, 1))
        (tmp_path / "a.json").write_text(f"[{LINE % (2, 2)}]")
        (tmp_path / "sub" / "c.jsonl.gz").write_bytes(gzip.compress((LINE % (3, 3)).encode()))
        for other in ("readme.md", ".hidden.jsonl", "dataset_info.json"):
            (tmp_path / other).write_text("{}")
        prepared = prepare_from({"path": str(tmp_path)})
        assert answers(prepared) == ["2", "1", "3"]
        assert [Path(file).name for file in prepared.report.formats] == ["a.json", "b.jsonl", "c.jsonl.gz"]

    def test_an_empty_one(self, prepare_from, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="no data file in this folder"):
            prepare_from({"path": str(tmp_path)})

    def test_a_pipe_is_refused_and_not_waited_for(self, prepare_from, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "rows.jsonl")
        with pytest.raises(DataError, match="a pipe or a device"):
            prepare_from({"path": str(tmp_path / "rows.jsonl")})

    def test_the_hub_without_network(self, prepare_from) -> None:
        with pytest.raises(DataError, match="cannot read nobody/nothing from the hub") as caught:
            prepare_from({"path": "hf://nobody/nothing"})
        assert "network" in caught.value.hint


class TestRegistry:
    @pytest.fixture
    def registry(self, tmp_path: Path) -> Path:
        (tmp_path / "p.json").write_text(json.dumps([{"q": "1+1?", "ctx": "now", "a": "2"}]))
        chat = [{"who": "H", "says": "1+1?"}, {"who": "B", "says": "2"}]
        (tmp_path / "c.json").write_text(json.dumps([{"talk": chat, "sys": "Add."}]))
        entries = {
            "pairs": {"file_name": "p.json", "columns": {"prompt": "q", "query": "ctx", "response": "a"}},
            "chats": {
                "file_name": "c.json",
                "formatting": "sharegpt",
                "columns": {"messages": "talk", "system": "sys"},
                "tags": {"role_tag": "who", "content_tag": "says", "user_tag": "H", "assistant_tag": "B"},
            },
            "pairs_dpo": {"file_name": "p.json", "ranking": True},
            "nowhere": {},
        }
        (tmp_path / "dataset_info.json").write_text(json.dumps(entries))
        return tmp_path

    def test_columns(self, prepare_from, registry: Path) -> None:
        for path in (registry, registry / "dataset_info.json"):
            train = prepare_from({"path": str(path), "name": "pairs"}).train
            assert (train.prompts, train.answers) == (["1+1?\n\nnow\n"], ["2"])

    def test_tags(self, prepare_from, registry: Path) -> None:
        train = prepare_from({"path": str(registry), "name": "chats"}, chat_template="chatml").train
        assert train.answers == ["2"]
        assert train.prompts[0].startswith("<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n1+1?")

    @pytest.mark.parametrize(
        ("name", "words"),
        [("pair", "no entry pair"), (None, "none named"), ("pairs_dpo", "preference"), ("nowhere", "neither")],
    )
    def test_what_cannot_be_used(self, prepare_from, registry: Path, name: str | None, words: str) -> None:
        with pytest.raises(DataError, match=words):
            prepare_from({"path": str(registry / "dataset_info.json"), "name": name})

    def test_columns_of_a_file(self, prepare_from, registry: Path) -> None:
        source = {"path": str(registry / "p.json"), "columns": {"query": "q", "response": "a"}}
        assert answers(prepare_from(source)) == ["2"]


class TestWeights:
    def test_rows_as_often_as_asked(self, prepare_from, tmp_path: Path) -> None:
        for name in "abc":
            (tmp_path / f"{name}.jsonl").write_text("".join(LINE % (i, f"{name}{i}") for i in range(10)))
        sources = [
            {"path": str(tmp_path / f"{name}.jsonl"), "weight": w} for name, w in (("a", 2), ("b", 0.3), ("c", 1.5))
        ]
        got = answers(prepare_from(*sources))
        assert sorted(answer for answer in got if answer[0] == "a") == sorted([f"a{i}" for i in range(10)] * 2)
        assert len({answer for answer in got if answer[0] == "b"}) == sum(answer[0] == "b" for answer in got) == 3
        assert sum(answer[0] == "c" for answer in got) == 15
        assert answers(prepare_from(*sources)) == got

    def test_held_out_rows_are_not_repeated(self, prepare_from, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_text("".join(LINE % (i, i) for i in range(10)))
        prepared = prepare_from({"path": str(tmp_path / "a.jsonl"), "weight": 3}, split={"train": 0.8})
        assert (len(prepared.train), len(prepared.eval)) == (24, 2)
        assert not set(prepared.train.answers) & set(prepared.eval.answers)


class TestMixedColumns:
    def test_each_row_is_read_as_it_is(self, prepare_from, tmp_path: Path) -> None:
        rows = [
            {"query": "a", "response": 1}, {"query": "b", "response": "2"}, {"query": "c", "response": [3]},
            {"query": "d", "response": None}, {"query": 5, "response": 2.5, "more": {"x": 1}},
        ]  # fmt: skip
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        prepared = prepare_from({"path": str(tmp_path / "a.jsonl")})
        assert answers(prepared) == ["1", "2", "2.5"]
        assert {entry.rule: entry.lines for entry in prepared.report.refusals} == {
            "response is not text": [3],
            "no response": [4],
        }

    @pytest.mark.parametrize("array", [False, True])
    def test_lines_of_megabytes(self, prepare_from, tmp_path: Path, array: bool) -> None:
        rows = [{"query": "q" * 20, "response": "x" * 1_050_000}, {"query": "r", "response": "s"}]
        text = (
            json.dumps(rows, indent=1) if array else "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        )
        (tmp_path / "a").write_text(text, encoding="utf-8")
        prepared = prepare_from({"path": str(tmp_path / "a")}, max_length=64)
        assert [len(answer) for answer in answers(prepared)] == [1_050_000, 1]
        assert prepared.train.lengths.tolist() == [64, 4]


class TestCache:
    def folders(self, cache: Path) -> list[str]:
        return sorted(path.name for path in cache.iterdir())

    def test_rows_are_kept_and_used_again(self, prepare_from, tmp_path: Path, monkeypatch) -> None:
        file, cache = tmp_path / "a.jsonl", tmp_path / "cache"
        file.write_text((LINE % (1, 1)) + "{}\n")
        first = prepare_from({"path": str(file)}, cache=cache)
        assert self.folders(cache) == [first.report.cache_key]
        monkeypatch.setattr(
            sys.modules["lazytrain.jobs.data.prepare"], "encode", lambda *_: pytest.fail("tokenized again")
        )
        again = prepare_from({"path": str(file)}, split={"eval": 0}, packing=False, cache=cache)
        assert answers(again) == ["1"]
        assert again.report.table() == first.report.table()
        assert again.report.tokens == first.report.tokens == 5

    def test_other_content_with_the_same_size_and_time_is_tokenized(self, prepare_from, tmp_path: Path) -> None:
        file, cache = tmp_path / "a.jsonl", tmp_path / "cache"
        file.write_text(LINE % (1, 1))
        times = file.stat()
        prepare_from({"path": str(file)}, cache=cache)
        file.write_text(LINE % (1, 2))
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert answers(prepare_from({"path": str(file)}, cache=cache)) == ["2"]
        assert answers(prepare_from({"path": str(file)}, cache=cache, max_length=4)) == ["2"]
        assert len(self.folders(cache)) == 3

    def test_nothing_is_left_of_a_refusal(self, prepare_from, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_text("{}\n")
        with pytest.raises(DataError):
            prepare_from({"path": str(tmp_path / "a.jsonl")}, cache=tmp_path / "cache")
        assert self.folders(tmp_path / "cache") == []

    def test_a_folder_that_cannot_be_written(self, prepare_from, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_text(LINE % (1, 1))
        (tmp_path / "cache").write_text("a file")
        with pytest.raises(DataError, match="cannot keep tokenized rows"):
            prepare_from({"path": str(tmp_path / "a.jsonl")}, cache=tmp_path / "cache")

    def test_a_damaged_file_is_named(self, prepare_from, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_text(LINE % (1, 1))
        cache = tmp_path / "cache"
        key = prepare_from({"path": str(tmp_path / "a.jsonl")}, cache=cache).report.cache_key
        (cache / key / "rows.arrow").write_bytes(b"ARROW1")
        with pytest.raises(DataError, match="damaged tokenized rows"):
            prepare_from({"path": str(tmp_path / "a.jsonl")}, cache=cache)

    def test_a_choice_of_rows_travels_without_its_file(self, prepare_from, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_text("".join(LINE % (i, i) for i in range(3000)))
        train = prepare_from({"path": str(tmp_path / "a.jsonl")}).train
        sent = pickle.dumps(train.take([2999, 1]))
        assert len(sent) < 2000
        received = pickle.loads(sent)  # noqa: S301
        assert received.answers == ["2999", "1"]
        assert received.input_ids == [train.input_ids[2999], train.input_ids[1]]
        assert received.spans(0) == train.spans(2999)
