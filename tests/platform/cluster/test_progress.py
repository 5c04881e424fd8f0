from pathlib import Path

from lazytrain.platform.cluster.progress import LineTail


def test_an_absent_file_has_no_records(tmp_path: Path) -> None:
    assert list(LineTail(tmp_path / "none").records()) == []


def test_only_what_is_new_and_complete(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = LineTail(path)
    path.write_bytes(b'{"step": 1}\n{"step"')
    assert list(tail.records()) == [{"step": 1}]
    assert list(tail.records()) == []
    with path.open("ab") as file:
        file.write(b": 2}\n")
    assert list(tail.records()) == [{"step": 2}]


def test_other_line_ends_of_unicode_do_not_end_a_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes('{"text": "a\u2028b\x85c\x0cd"}\n'.replace("\x0c", "\\f").encode())
    assert list(LineTail(path).records()) == [{"text": "a\u2028b\x85c\x0cd"}]
