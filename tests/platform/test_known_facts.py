"""Facts are measured once for each configuration and batch shape, and planning for known ones starts without torch."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lazytrain.jobs.model_facts import ModelFacts
from lazytrain.platform import known_facts
from lazytrain.platform.known_facts import KnownFacts
from lazytrain.platform.models import facts_of

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}


def measuring(facts: ModelFacts, calls: list[int]) -> Callable[[], ModelFacts]:
    def measure() -> ModelFacts:
        calls.append(1)
        return facts

    return measure


def test_known_facts_are_those_that_were_measured_until_anything_differs(tmp_path: Path, monkeypatch: Any) -> None:
    facts = facts_of(CONFIG, batch=2, length=16)
    known, calls = KnownFacts(tmp_path / "facts"), list[int]()
    measure = measuring(facts, calls)
    for expected, shape in ((1, (2, 16, "bfloat16")), (1, (2, 16, "bfloat16")), (2, (4, 16, "bfloat16"))):
        batch, length, dtype = shape
        assert known.of(CONFIG, measure, batch=batch, length=length, dtype=dtype) == facts
        assert len(calls) == expected
    known.of({**CONFIG, "hidden_size": 128}, measure, batch=2, length=16, dtype="bfloat16")
    monkeypatch.setattr(known_facts, "_measured_by", lambda: ["other code"])
    known.of(CONFIG, measure, batch=2, length=16, dtype="bfloat16")
    assert len(calls) == 4


def test_a_broken_file_or_a_home_that_cannot_be_written_costs_a_measurement(tmp_path: Path) -> None:
    facts = facts_of(CONFIG, batch=2, length=16)
    calls = list[int]()
    known = KnownFacts(tmp_path)
    known.of(CONFIG, measuring(facts, calls), batch=2, length=16, dtype="bfloat16")
    (kept,) = tmp_path.iterdir()
    kept.write_text(kept.read_text()[:100])
    assert known.of(CONFIG, measuring(facts, calls), batch=2, length=16, dtype="bfloat16") == facts
    (tmp_path / "file").touch()
    nowhere = KnownFacts(tmp_path / "file" / "facts")
    assert nowhere.of(CONFIG, measuring(facts, calls), batch=2, length=16, dtype="bfloat16") == facts
    assert len(calls) == 3


def test_a_full_disk_costs_a_measurement_and_leaves_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    facts = facts_of(CONFIG, batch=2, length=16)

    def half(path: Path, text: str, **_: object) -> None:
        path.write_bytes(text[:100].encode())
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    assert KnownFacts(tmp_path).of(CONFIG, lambda: facts, batch=2, length=16, dtype="bfloat16") == facts
    assert not list(tmp_path.iterdir())


def test_planning_again_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    """In processes of its own, as a person runs it: the second plan is the first one's, byte for byte."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    command = ["plan", "--model", str(config), "--gpu", "RTX3090", "--batch", "2", "--length", "16", "--json"]
    program = """
import builtins, sys
from lazytrain.platform.cli import main

load, refused = builtins.__import__, {refused}
def load_others(name, *args, **others):
    assert name.partition(".")[0] not in refused, name
    return load(name, *args, **others)

builtins.__import__, sys.argv[1:] = load_others, {command}
main()
"""

    def run(*refused: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", program.format(refused=refused, command=command)],
            capture_output=True, text=True, env={"LAZYTRAIN_HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path)},
        )  # fmt: skip

    assert run("torch", "transformers").returncode != 0
    first, again = run(), run("torch", "transformers")
    assert json.loads(first.stdout)["policy"] == json.loads(again.stdout)["policy"], again.stderr
