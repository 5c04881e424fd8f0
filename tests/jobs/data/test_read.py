"""Whatever people call JSON is read row by row; what is no row is named with its line."""

from __future__ import annotations

import gzip
import json
import os
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from lazytrain.jobs.data.canonical import Refused
from lazytrain.jobs.data.read import read_rows
from lazytrain.jobs.data.sources import Input
from lazytrain.jobs.errors import DataError

ROWS = [{"question": f"{i}?", "answer": "ü\u2028\u0085\u2029" * i} for i in range(1, 4)]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rows"


def rows_of(path: Path) -> list[object]:
    return [row for _, row in read_rows(path)]


def refusals_of(path: Path) -> list[tuple[int, str]]:
    return [(line, row.rule) for line, row in read_rows(path) if isinstance(row, Refused)]


@pytest.mark.parametrize(
    "content",
    [
        LINES,
        b"\xef\xbb\xbf" + LINES,
        LINES.replace(b"\n", b"\r\n"),
        LINES.rstrip(b"\n"),
        b"\n \r\n" + LINES.replace(b"\n", b"\n\n"),
        json.dumps(ROWS).encode(),
        json.dumps(ROWS, indent=1, ensure_ascii=False).encode(),
        b"\xef\xbb\xbf \n" + json.dumps(ROWS).encode(),
    ],
    ids=["lines", "bom", "crlf", "no-last-newline", "blank-lines", "array", "indented-array", "bom-array"],
)
@pytest.mark.parametrize("zipped", [False, True], ids=["plain", "gz"])
def test_same_rows_however_they_are_written(path: Path, content: bytes, zipped: bool) -> None:
    path.write_bytes(gzip.compress(content) if zipped else content)
    assert rows_of(path) == ROWS


def test_parquet(path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    assert list(read_rows(path)) == list(enumerate(ROWS, start=1))


def test_lines_are_counted_as_an_editor_does(path: Path) -> None:
    path.write_bytes(b"\n" + LINES)
    assert [line for line, _ in read_rows(path)] == [2, 3, 4]
    path.write_text(json.dumps(ROWS, indent=1))
    assert [line for line, _ in read_rows(path)] == [2, 6, 10]


def test_a_broken_line_is_refused_alone(path: Path) -> None:
    deep = b"[" * (sys.getrecursionlimit() * 50)
    path.write_bytes(LINES + b'{"a": \n' + b'{"a": "\xff"}\n' + b"3\n" + b'{"a": ' + deep + b"\n" + LINES)
    assert refusals_of(path) == [
        (4, "not valid JSON"),
        (5, "not UTF-8"),
        (6, "not a JSON object"),
        (7, "not valid JSON"),
    ]
    assert len(rows_of(path)) == 10


def test_array_items_that_are_no_rows(path: Path) -> None:
    path.write_text('[{"a": 1},\n 3]')
    assert refusals_of(path) == [(2, "not a JSON object")]


@pytest.mark.parametrize("content", [b"", b"[]", b"\n\n", b"\xef\xbb\xbf"])
def test_no_rows(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    assert rows_of(path) == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (LINES.decode().encode("utf-16"), "UTF-16"),
        (LINES.decode().encode("utf-32"), "UTF-32"),
        (b"\x7fELF\x00\x00", "binary"),
        (b'[{"a": 1},\n{"a": ', "rows:2: not valid JSON"),
        (b'[{"a": 1},\n"\xff"]', "rows:2: not UTF-8"),
        (b'[{"a": 1}] more', "after the array"),
        (gzip.compress(LINES * 1000)[:-20], "damaged"),
        (b"\x1f\x8bnonsense", "damaged"),
        (b"PAR1nonsense", "damaged"),
    ],
)
def test_files_that_cannot_be_read(path: Path, content: bytes, words: str) -> None:
    path.write_bytes(content)
    with pytest.raises(DataError, match=words) as caught:
        rows_of(path)
    assert caught.value.exit_code == 2
    assert str(path) in caught.value.message


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such data file"):
        rows_of(tmp_path / "none")
    with pytest.raises(DataError, match="is a folder"):
        rows_of(tmp_path)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    """It can be read only once, and its rows are read after its digest was taken."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="no file on a disk"):
        rows_of(tmp_path / "pipe")
    assert Input("pipe", "auto", tmp_path / "pipe").digest() == ""
