"""How fast a file becomes tokenized rows with a loss mask, beside ``datasets.map`` with the same tokenizer and cores.

    python tests/benchmarks/data.py [--quick] [--json] [--rows N] [--repeats N]

Both read the same JSON lines of word problems, render each with the same chat template, tokenize in batches of 1000 and
leave the rows in an Arrow file; ours also finds and checks what carries the loss. Each runs in a process of its own.
``tokenize_over_datasets_map`` is the ratio of the seconds after imports, at most 1.25 for the 80 % of its speed that
were asked for (``cpu_over_datasets_map`` that of processor
seconds, which other work on the machine disturbs less), ``peak_rss_mib`` ours at its highest with all imports,
``peak_rss_growth_mib`` what that is above the process before the first row.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROWS, QUICK_ROWS = 400_000, 20_000
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = ["apples", "pears", "boxes", "trains", "hours", "miles", "coins", "books", "each", "gives", "sells", "total"]
NAMES = ["Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ivan", "Jo"]


def problem(drawn: random.Random) -> dict[str, str]:
    """A row of MetaMathQA's shape and size: about 50 words of question, 100 of answer."""

    def sentence(words: int) -> str:
        return f"{drawn.choice(NAMES)} " + " ".join(
            str(drawn.randint(2, 999)) if drawn.random() < 0.2 else drawn.choice(WORDS) for _ in range(words)
        )

    question = ". ".join(sentence(drawn.randint(6, 12)) for _ in range(5)) + "?"
    answer = "\n".join(sentence(drawn.randint(6, 14)) + f" = {drawn.randint(1, 9999)}." for _ in range(9))
    return {"query": question, "response": f"{answer}\nThe answer is: {drawn.randint(1, 9999)}"}


def write_inputs(folder: Path, rows: int) -> None:
    """The file, and a byte-level BPE tokenizer of 8,000 pieces made from its beginning."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    drawn = random.Random(0)
    with (folder / "rows.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(problem(drawn)) + "\n" for _ in range(rows))
    core = ByteLevelBPETokenizer()
    texts = (" ".join(problem(random.Random(seed)).values()) for seed in range(2000))
    core.train_from_iterator(texts, vocab_size=8000, special_tokens=["<|im_start|>", "<|im_end|>"], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core._tokenizer, eos_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "tokenizer")


def ours(folder: Path, caches: Path) -> dict[str, Any]:
    """Seconds, tokens and memory of `prepare`."""
    from transformers import AutoTokenizer

    from lazytrain.jobs.data import prepare
    from lazytrain.jobs.spec import Data

    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    data = Data.model_validate({"train": [{"path": str(folder / "rows.jsonl")}], "split": {"train": 1.0}})
    before, started, cpu = resident_mib(), time.perf_counter(), time.process_time()
    report = prepare(data, tokenizer, cache=caches).report
    times = {"seconds": time.perf_counter() - started, "cpu_s": time.process_time() - cpu}
    return {**times, "tokens": report.tokens, "before_mib": before, "peak_mib": resident_mib()}


def theirs(folder: Path, caches: Path) -> dict[str, Any]:
    """The same of ``datasets.map``."""
    import datasets
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")

    def tokenize(batch: dict[str, list[str]]) -> dict[str, Any]:
        texts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": query}, {"role": "assistant", "content": response}], tokenize=False
            )
            for query, response in zip(batch["query"], batch["response"], strict=True)
        ]
        return {"input_ids": tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]}

    before, started, cpu = resident_mib(), time.perf_counter(), time.process_time()
    rows = datasets.load_dataset("json", data_files=str(folder / "rows.jsonl"), split="train", cache_dir=str(caches))
    mapped = rows.map(tokenize, batched=True, batch_size=1000, remove_columns=rows.column_names)
    times = {"seconds": time.perf_counter() - started, "cpu_s": time.process_time() - cpu}
    return {**times, "rows": len(mapped), "before_mib": before, "peak_mib": resident_mib()}


def resident_mib() -> float:
    """Most memory that this process has had at any time."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def one(side: str, folder: Path) -> dict[str, Any]:
    """Run a side in a process of its own."""
    with tempfile.TemporaryDirectory(dir=folder) as caches:
        command = [sys.executable, __file__, "--side", side, "--folder", str(folder), "--caches", caches]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"{side}: {result['seconds']:.1f} s", file=sys.stderr, flush=True)
    return result


def run(rows: int, repeats: int) -> dict[str, Any]:
    """Both sides, turn by turn."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder, rows)
        size = (folder / "rows.jsonl").stat().st_size
        sides: dict[str, list[dict[str, Any]]] = {"ours": [], "theirs": []}
        for _ in range(repeats):
            for side, results in sides.items():
                results.append(one(side, folder))
    mine, other = ({key: statistics.median(r[key] for r in runs) for key in runs[0]} for runs in sides.values())
    return {
        "tokenize_over_datasets_map": mine["seconds"] / other["seconds"],
        "peak_rss_mib": mine["peak_mib"],
        "peak_rss_growth_mib": mine["peak_mib"] - mine["before_mib"],
        "datasets_peak_rss_mib": other["peak_mib"],
        "rows": rows,
        "file_mib": size / 2**20,
        "tokens": mine["tokens"],
        "ours_s": mine["seconds"],
        "datasets_map_s": other["seconds"],
        "cpu_over_datasets_map": mine["cpu_s"] / other["cpu_s"],
        "tokens_per_s": mine["tokens"] / mine["seconds"],
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "versions": {name: version(name) for name in ("datasets", "tokenizers", "transformers", "pyarrow")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROWS:,} rows, once")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rows", type=int, help="rows of the file")
    parser.add_argument("--repeats", type=int, help="runs of each side, of which the median counts")
    parser.add_argument("--side", choices=("ours", "theirs"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--caches", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.side:
        print(json.dumps({"ours": ours, "theirs": theirs}[chosen.side](chosen.folder, chosen.caches)))
        return
    repeats = chosen.repeats or (1 if chosen.quick else 3)
    result = run(chosen.rows or (QUICK_ROWS if chosen.quick else ROWS), repeats)
    if chosen.json:
        json.dump(result, sys.stdout, indent=1)
        print()
        return
    print(
        f"{result['rows']:,} rows, {result['tokens']:,} tokens: {result['ours_s']:.1f} s, "
        f"datasets.map {result['datasets_map_s']:.1f} s ({result['tokenize_over_datasets_map']:.2f}, of processor time "
        f"{result['cpu_over_datasets_map']:.2f}); peak {result['peak_rss_mib']:.0f} MiB, "
        f"{result['peak_rss_growth_mib']:.0f} MiB of it for the rows"
    )


if __name__ == "__main__":
    main()
