"""Rows become tokens with the loss on the answer, or are counted under the rule that they break."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lazytrain.jobs.data import Rows, prepare
from lazytrain.jobs.errors import DataError, ModelError
from lazytrain.jobs.spec import Data

PAIR = {"query": "1+1?", "response": "It is 2"}
PUBLIC = Path(__file__).parents[4] / "shared" / "data"


def learned(tokenizer, rows: Rows, i: int = 0) -> str:
    """The text that carries the loss."""
    return tokenizer.decode(rows.input_ids[i][rows.answer_starts[i] :])


class TestFormats:
    @pytest.mark.parametrize(
        ("row", "prompt", "name"),
        [
            (PAIR, "1+1?\n", "query/response"),
            ({"question": "1+1?", "answer": "It is 2"}, "1+1?\n", "question/answer"),
            ({"instruction": "Add.", "input": "1+1", "output": "It is 2"}, "Add.\n\n1+1\n", "alpaca"),
            ({"instruction": "1+1?", "input": "", "output": "It is 2"}, "1+1?\n", "alpaca"),
            ({"instruction": "1+1?", "input": None, "output": "It is 2"}, "1+1?\n", "alpaca"),
            ({"instruction": "1+1?", "output": "It is 2", "system": "Be terse."}, "Be terse.\n\n1+1?\n", "alpaca"),
        ],
    )
    def test_detected_or_named(self, load, write_rows, tokenizer, row, prompt: str, name: str) -> None:
        path = write_rows(row)
        for asked in ("auto", name):
            prepared = load(path, format=asked)
            assert prepared.report.formats == {str(path): name}
            assert prepared.train.prompts == [prompt]
            assert prepared.train.answers == ["It is 2"]
            assert tokenizer.decode(prepared.train.input_ids[0]) == f"{prompt}It is 2</s>"
            assert learned(tokenizer, prepared.train) == "It is 2</s>"

    def test_numbers_are_written_out(self, load, write_rows) -> None:
        train = load(write_rows({"question": 2, "answer": 3.5}, {"question": "x", "answer": -7})).train
        assert train.answers == ["3.5", "-7"]
        assert train.prompts == ["2\n", "x\n"]

    def test_detection_skips_rows_that_fit_nothing(self, load, write_rows) -> None:
        report = load(write_rows({"x": 1}, {"question": "", "answer": "a"}, PAIR)).report
        assert list(report.formats.values()) == ["query/response"]
        assert report.refused == 2


class TestRefusals:
    def test_one_rule_one_line_with_its_first_lines(self, load, write_rows) -> None:
        rows = [PAIR, *[{"query": "a"}] * 4, *[{"query": " ", "response": "b"}] * 3, {"query": "a", "response": "\n"}]
        path = write_rows(*rows, {"query": ["a"], "response": "b"}, {"query": True, "response": "b"})
        report = load(path).report
        assert {(entry.rule, entry.count, tuple(entry.lines)) for entry in report.refusals} == {
            ("no response", 4, (2, 3, 4)),
            ("the prompt is empty", 3, (6, 7, 8)),
            ("the answer is empty", 1, (9,)),
            ("query is not text", 2, (10, 11)),
        }
        assert report.rows == 11
        assert report.refused == 10
        assert report.train_rows == 1
        assert f"4  no response  ({path}, line 2, 3, 4, ...)" in report.table()

    def test_half_a_character(self, load, write_rows) -> None:
        report = load(write_rows({"query": "\ud800", "response": "b"}, PAIR)).report
        assert "surrogate" in report.table()

    def test_no_usable_row_is_refused_with_the_table(self, load, write_rows) -> None:
        path = write_rows(*[{"query": "a"}] * 4, *[{"query": "", "response": "b"}] * 3)
        with pytest.raises(DataError) as caught:
            load(path, format="query/response")
        assert "4  no response" in caught.value.message
        assert "3  the prompt is empty" in caught.value.message
        assert caught.value.exit_code == 2

    @pytest.mark.parametrize("content", ["", "[]"])
    def test_empty_file(self, load, tmp_path: Path, content: str) -> None:
        (tmp_path / "empty").write_text(content)
        with pytest.raises(DataError, match=r"no usable row in .*empty"):
            load(tmp_path / "empty")

    def test_empty_evaluation_file(self, load, write_rows) -> None:
        with pytest.raises(DataError, match=r"none\.jsonl"):
            load(write_rows(PAIR), split=None, eval=[{"path": str(write_rows(name="none.jsonl"))}])

    def test_a_file_does_not_decide_the_format_of_the_next(self, load, write_rows) -> None:
        other = write_rows({"question": "a", "answer": "b"}, name="other.jsonl")
        assert load(write_rows(PAIR), other).report.train_rows == 2


class TestTruncation:
    def test_a_cut_answer_supervises_what_is_kept_without_an_end(self, load, write_rows, tokenizer) -> None:
        prepared = load(write_rows({"query": "q", "response": "x" * 50}), max_length=32)
        assert prepared.train.input_ids[0] == tokenizer("q\n" + "x" * 30).input_ids
        assert learned(tokenizer, prepared.train) == "x" * 30
        assert prepared.report.supervised_tokens == 30
        assert prepared.report.truncated == 1

    def test_only_the_end_token_cut(self, load, write_rows, tokenizer) -> None:
        prepared = load(write_rows({"query": "q", "response": "abc"}), max_length=5)
        assert learned(tokenizer, prepared.train) == "abc"
        assert prepared.report.truncated == 1
        prepared = load(write_rows({"query": "q", "response": "abc"}), max_length=6)
        assert learned(tokenizer, prepared.train) == "abc</s>"
        assert prepared.report.truncated == 0

    def test_an_answer_cut_away_is_dropped_and_counted(self, load, write_rows) -> None:
        prepared = load(write_rows({"query": "q" * 99, "response": "x"}, PAIR), max_length=12)
        assert len(prepared.train) == 1
        assert "nothing of the answer is within max_length 12" in prepared.report.table()


class TestSplit:
    @pytest.fixture
    def path(self, write_rows) -> Path:
        return write_rows(*({"query": f"{i}?", "response": str(i)} for i in range(100)))

    def test_parts_are_disjoint_and_whole(self, load, path: Path) -> None:
        prepared = load(path, split={"train": 0.7, "eval": 0.3, "seed": 1})
        train, held_out = (list(map(int, rows.answers)) for rows in (prepared.train, prepared.eval))
        assert (len(train), len(held_out)) == (70, 30)
        assert sorted(train + held_out) == list(range(100))
        assert train == sorted(train)
        assert (prepared.report.train_rows, prepared.report.eval_rows) == (70, 30)

    def test_depends_on_the_seed_alone(self, load, path: Path) -> None:
        once, again, other = (load(path, split={"train": 0.5, "seed": seed}).eval.answers for seed in (1, 1, 2))
        assert once == again
        assert once != other

    def test_less_than_everything(self, load, path: Path) -> None:
        prepared = load(path, split={"train": 0.1, "eval": 0.05})
        assert (len(prepared.train), len(prepared.eval)) == (10, 5)

    def test_small_files_fill_both_parts(self, load, write_rows) -> None:
        prepared = load(write_rows(PAIR, PAIR), split={"train": 0.99})
        assert (len(prepared.train), len(prepared.eval)) == (1, 1)
        prepared = load(write_rows(PAIR), split={"train": 0.5})
        assert (len(prepared.train), len(prepared.eval)) == (1, 0)

    def test_evaluation_files(self, load, path: Path, write_rows) -> None:
        held_out = write_rows(PAIR, name="eval.jsonl")
        prepared = load(path, split=None, eval=[{"path": str(held_out)}])
        assert len(prepared.train) == 100
        assert prepared.eval.answers == ["It is 2"]


class TestFingerprint:
    def test_same_size_and_time_but_other_content(self, load, write_rows, tokenizer) -> None:
        path = write_rows(PAIR)
        before, times = load(path), path.stat()
        write_rows({**PAIR, "response": "It is 3"})
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        after = load(path)
        assert after.report.fingerprint != before.report.fingerprint
        assert learned(tokenizer, after.train) == "It is 3</s>"

    def test_whatever_changes_tokens_changes_it(self, load, write_rows, make_tokenizer) -> None:
        path = write_rows(PAIR)
        template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
        tokenizers = [
            make_tokenizer(),
            make_tokenizer(template=template),
            make_tokenizer(template=template.replace("\n", " \n")),
            make_tokenizer(specials=("<s>", "</s>", "<extra>")),
        ]
        prints = [load(path, tokenizer=tokenizer).report.fingerprint for tokenizer in tokenizers]
        prints.append(load(path, max_length=100).report.fingerprint)
        prints.append(load(path, split={"train": 1.0, "seed": 7}).report.fingerprint)
        assert len(set(prints)) == len(prints)

    def test_moving_a_file_or_using_the_tokenizer_does_not(self, load, write_rows, make_tokenizer) -> None:
        tokenizer = make_tokenizer(pad_token="</s>")
        before = load(write_rows(PAIR), tokenizer=tokenizer).report.fingerprint
        tokenizer(["a", "bcd"], padding=True, truncation=True, max_length=2)
        assert load(write_rows(PAIR, name="moved.jsonl"), tokenizer=tokenizer).report.fingerprint == before


class TestTokenizersThatCannotServe:
    def test_no_end_token(self, load, write_rows, make_tokenizer) -> None:
        with pytest.raises(ModelError, match="no end-of-sequence token"):
            load(write_rows(PAIR), tokenizer=make_tokenizer(eos_token=None))

    def test_no_offsets(self, load, write_rows) -> None:
        with pytest.raises(ModelError, match="offsets"):
            load(write_rows(PAIR), tokenizer=object())


@pytest.mark.skipif(not PUBLIC.is_dir(), reason="the public files are not there")
class TestPublicFiles:
    @pytest.mark.parametrize(
        ("name", "name_of_format", "rows"),
        [("gsm8k-test.jsonl", "question/answer", 1319), ("alpaca_en_demo.json", "alpaca", 10)],
    )
    def test_every_row_is_usable(self, tokenizer, name: str, name_of_format: str, rows: int) -> None:
        path = str(PUBLIC / name)
        prepared = prepare(Data.model_validate({"train": [{"path": path}], "max_length": 4096}), tokenizer)
        report = prepared.report
        assert report.formats == {path: name_of_format}
        assert (report.rows, report.refused, report.truncated) == (rows, 0, 0)
        assert (report.train_rows, report.eval_rows) == (round(0.7 * rows), round(0.3 * rows))
        for i in range(len(prepared.eval)):
            assert learned(tokenizer, prepared.eval, i) == prepared.eval.answers[i] + "</s>"


def test_report_is_json(load, write_rows) -> None:
    import json

    report = json.loads(json.dumps(load(write_rows(PAIR, {"x": 1})).report.to_dict()))
    assert report["tokens"] == 13
    assert report["supervised_tokens"] == 8
    assert report["longest"] == 13
    assert report["refused"] == 1
