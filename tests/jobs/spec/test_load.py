"""A job file either becomes the values it says, or an error that says where and what to write."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import yaml

from lazytrain.jobs.errors import SpecError
from lazytrain.jobs.spec import JobSpec, check_text, load_spec, read_yaml

SMALLEST = "model: {path: org/model}\ndata: {train: [{path: rows.jsonl}]}\n"
COMPLETE = """\
name: qwen7b-metamath
model: {path: Qwen/Qwen2.5-7B, dtype: bfloat16, attention: sdpa, trust_remote_code: false}
data:
  train: [{path: metamath.jsonl, format: auto}]
  split: {train: 0.7, eval: 0.3, seed: 42}
  max_length: 1024
  packing: true
  loss_on: assistant
train: {epochs: 1, batch: auto, learning_rate: 1e-5, schedule: cosine, warmup: 0.03, weight_decay: 0.01,
        max_grad_norm: 1.0, seed: 42}
optimizer: {name: hybrid8bit, betas: [0.9, 0.999], eps: 1e-8, master: split}
plan: {planner: full, gpu_memory: 70GB, host_memory: auto, nvme: /scratch, solve_seconds: 20}
evaluate: {metric: exact_match, every: 0.1, answer: "The answer is:"}
resources: {gpu: [H800, RTX3090]}
queue: {priority: 50, max_duration: 24h, retries: 2}
output: {dir: runs/qwen7b, save_every: 500, keep: 3}
"""


ADAPTERS = "lora: {rank: 8, alpha: 16, target_modules: [q_proj, v_proj]}"


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str | bytes, name: str = "job.yaml") -> Path:
        path = tmp_path / name
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return write


def refusal(path: Path, *overrides: str) -> SpecError:
    with pytest.raises(SpecError) as caught:
        load_spec(path, overrides)
    assert caught.value.exit_code == 2
    return caught.value


class TestValues:
    def test_the_complete_job_file(self, write, tmp_path: Path) -> None:
        spec = load_spec(write(COMPLETE))
        assert spec.name == "qwen7b-metamath"
        assert spec.model.path == "Qwen/Qwen2.5-7B"
        assert spec.data.train[0].path == str(tmp_path / "metamath.jsonl")
        assert spec.train.learning_rate == 1e-5
        assert spec.optimizer.betas == (0.9, 0.999)
        assert spec.optimizer.eps == 1e-8
        assert spec.plan.gpu_memory == 70_000_000_000
        assert spec.plan.nvme == "/scratch"
        assert spec.resources.gpu == ("H800", "RTX3090")
        assert spec.queue.max_duration == 86400
        assert spec.output.dir == str(tmp_path / "runs/qwen7b")

    def test_the_complete_job_file_is_what_the_smallest_means(self, write) -> None:
        """Apart from what names this one job and its machines, every value above is a default."""
        complete, smallest = load_spec(write(COMPLETE)).model_dump(), load_spec(write(SMALLEST)).model_dump()
        own = {"name", "model", "resources", "plan", "queue", "output"}
        for section in complete.keys() - own - {"data"}:
            assert complete[section] == smallest[section]
        assert {**complete["data"], "train": 0} == {**smallest["data"], "train": 0}
        assert smallest["train"]["batch"] == "auto"

    def test_name_and_folder_come_from_the_file(self, write, tmp_path: Path) -> None:
        spec = load_spec(write(SMALLEST, "my job (2).yaml"))
        assert spec.name == "my-job-2"
        assert spec.output.dir == str(tmp_path / "runs/my-job-2")

    def test_evaluation_files_replace_the_split(self, write, tmp_path: Path) -> None:
        data = load_spec(write("model: {path: m}\ndata: {train: [{path: a}], eval: [{path: sub/b}]}")).data
        assert data.split is None
        assert data.eval[0].path == str(tmp_path / "sub/b")

    @pytest.mark.parametrize(("written", "train", "held_out"), [("train: 0.9", 0.9, 0.1), ("eval: 0.05", 0.95, 0.05)])
    def test_one_share_alone_leaves_the_rest(self, write, written: str, train: float, held_out: float) -> None:
        split = load_spec(write(SMALLEST), [f"data.split={{{written}}}"]).data.split
        assert split is not None
        assert (split.train, split.eval) == (train, held_out)

    def test_model_path_is_a_folder_if_there_is_one(self, write, tmp_path: Path) -> None:
        (tmp_path / "org" / "model").mkdir(parents=True)
        assert load_spec(write(SMALLEST)).model.path == str(tmp_path / "org/model")

    def test_model_path_that_reads_like_a_path_is_one(self, write, tmp_path: Path) -> None:
        assert load_spec(write(SMALLEST), ["model.path=./m"]).model.path == str(Path.cwd() / "m")
        assert load_spec(write(SMALLEST.replace("org/model", "../m"))).model.path == str(tmp_path / "../m")

    @pytest.mark.parametrize("text", [SMALLEST, COMPLETE, SMALLEST + "\nlora: {}", SMALLEST + "\n" + ADAPTERS])
    def test_round_trip(self, write, text: str) -> None:
        spec = load_spec(write(text))
        assert load_spec(write(spec.to_yaml(), "again.yaml")) == spec

    def test_adapters_are_trained_only_where_the_file_says_so(self, write) -> None:
        assert load_spec(write(SMALLEST)).lora is None
        lora = load_spec(write(SMALLEST + "\n" + ADAPTERS)).lora
        assert lora is not None
        assert (lora.rank, lora.alpha, lora.target_modules) == (8, 16.0, ("q_proj", "v_proj"))
        every = load_spec(write(SMALLEST), ["lora.rank=4"]).lora
        assert every is not None and (every.rank, every.target_modules) == (4, "all-linear")

    @pytest.mark.parametrize(("warmup", "steps"), [("0.03", 30), ("0", 0), ("20", 20), ("5000", 1000), ("0.0001", 1)])
    def test_warmup_is_a_share_or_a_number_of_steps(self, write, warmup: str, steps: int) -> None:
        assert load_spec(write(SMALLEST), [f"train.warmup={warmup}"]).train.warmup_steps(1000) == steps

    def test_every_field_is_documented(self) -> None:
        def undocumented(model, place: str):
            for name, info in model.model_fields.items():
                if not info.description:
                    yield f"{place}.{name}"
                if hasattr(info.annotation, "model_fields"):
                    yield from undocumented(info.annotation, f"{place}.{name}")

        assert list(undocumented(JobSpec, "")) == []


class TestOverrides:
    def test_win_over_the_file(self, write) -> None:
        spec = load_spec(write(COMPLETE), ["train.batch=16", "plan.gpu_memory=8GiB", "train.max_grad_norm=null"])
        assert (spec.train.batch, spec.plan.gpu_memory, spec.train.max_grad_norm) == (16, 8 << 30, None)

    @pytest.mark.parametrize("place", ["data.train.0.path", "data.train[0].path"])
    def test_reach_into_lists_and_paths_start_here(self, write, tmp_path, monkeypatch, place: str) -> None:
        monkeypatch.chdir(tmp_path.parent)
        assert load_spec(write(SMALLEST), [f"{place}=x.jsonl"]).data.train[0].path == str(tmp_path.parent / "x.jsonl")

    def test_add_an_item(self, write) -> None:
        spec = load_spec(write(SMALLEST), ["data.train.1={path: /b, format: alpaca}"])
        assert [source.format for source in spec.data.train] == ["auto", "alpaca"]

    @pytest.mark.parametrize(
        ("setting", "words"),
        [
            ("train", "section.key=value"),
            ("train.batch=[", "not valid YAML"),
            ("train.btch=3", "did you mean batch?"),
            ("train.batch=0", "whole number from 1"),
            ("data.train.7.path=x", "no data.train[7]"),
            ("model.path.deeper=x", "no such place"),
        ],
    )
    def test_errors_name_the_setting(self, write, setting: str, words: str) -> None:
        error = refusal(write(SMALLEST), setting)
        assert "--set" in error.message
        assert words in error.message
        assert error.line == 0


class TestRefusals:
    @pytest.mark.parametrize(
        ("text", "line", "field", "words"),
        [
            ("train: {btach: 3}", 1, "train.btach", "did you mean batch?"),
            ("\nbatch: 3", 2, "batch", "did you mean train.batch?"),
            ("plan:\n  gpu_memory: 70GB\n  xyzzy: 1", 3, "plan.xyzzy", "known here: planner"),
            ("train:\n  epochs: 1\n  batch: 1.5", 3, "train.batch", "from 1 to 65,536, not 1.5"),
            ("train: {epochs: yes}", 1, "train.epochs", "not 'yes'"),
            ("train: {batch: 99999999999999999999}", 1, "train.batch", "from 1 to 65,536"),
            ("train: {max_steps: 99999999999999999999}", 1, "train.max_steps", "less than or equal to"),
            ("plan: {host_memory: 9999999TB}", 1, "plan.host_memory", "such as 70GB"),
            ("train: {batch: 1:30}", 1, "train.batch", "not '1:30'"),
            ("train: {max_steps: 1_000}", 1, "train.max_steps", "not '1_000'"),
            ("output: {dir: $HOME/runs}", 1, "output.dir", "variables are not filled in"),
            ("train: {learning_rate: .nan}", 1, "train.learning_rate", "finite"),
            ("train: {learning_rate: '1e-5'}", 1, "train.learning_rate", "number"),
            ("train: {warmup: 2.5}", 1, "train", "whole number of steps"),
            ("train: {schedule: cosin}", 1, "train.schedule", "'cosine'"),
            ("lora: {target_modules: q_proj}", 1, "lora.target_modules", "all-linear or a list of names"),
            ("lora: {target_modules: []}", 1, "lora.target_modules", "all-linear or a list of names"),
            ("lora: {rank: 0}", 1, "lora.rank", "greater than or equal to 1"),
            ("lora: true", 1, "lora", "mapping of keys"),
            ("plan: {gpu_memory: lots}", 1, "plan.gpu_memory", "such as 70GB"),
            ("plan: {gpu_memory: -1}", 1, "plan.gpu_memory", "such as 70GB"),
            ("queue: {max_duration: 3 weeks}", 1, "queue.max_duration", "24h"),
            ("queue: {priority: 101}", 1, "queue.priority", "100"),
            ("name: a b", 1, "name", "letters"),
            ("train: 3", 1, "train", "mapping of keys, not 3"),
            ("a: 1\na: 2", 2, "a", "twice, first in line 1"),
            ("train: {seed: 1, epochs: 2,\n  seed: 2}", 2, "train.seed", "twice"),
            ("train: {epochs: 1", 2, "", "not valid YAML"),
            ("name: !!int abc", 1, "name", "not a valid value"),
            ("name: !!python/object:os.system x", 1, "", "could not determine a constructor"),
        ],
    )
    def test_says_where_and_why(self, write, text: str, line: int, field: str, words: str) -> None:
        error = refusal(write(f"{text}\n{SMALLEST}"))
        assert words in error.message
        assert error.line == line
        assert error.field == field
        assert error.message.startswith(str(write("", "other").parent / f"job.yaml:{line}: {field}"))

    @pytest.mark.parametrize(
        ("data", "field", "words"),
        [
            ("{train: []}", "data.train", "must not be empty"),
            ("{train: [{pth: x}]}", "data.train[0].path", "is missing"),
            ("{train: [{path: x, format: csv}]}", "data.train[0].format", "'question/answer'"),
            ("{train: [{path: x}], split: {train: 0.9, eval: 0.5}}", "data.split", "add up to 1.4"),
            ("{train: [{path: x}], split: {train: 0}}", "data.split", "no row"),
            ("{train: [{path: x}], eval: [{path: y}], split: {train: 0.5}}", "data", "one of the two"),
            ("{train: [{path: x}], max_length: 1}", "data.max_length", "2"),
        ],
    )
    def test_data(self, write, data: str, field: str, words: str) -> None:
        error = refusal(write(f"model: {{path: m}}\ndata: {data}"))
        assert words in error.message
        assert (error.field, error.line) == (field, 2)

    def test_all_problems_at_once_in_the_order_of_the_file(self, write) -> None:
        message = refusal(write("train: {epochs: 0}\nplan: {solve_seconds: 0}\nqueue: {retries: -1}")).message
        lines = message.splitlines()
        assert [line.split(": ")[1] for line in lines] == [
            "model",
            "data",
            "train.epochs",
            "plan.solve_seconds",
            "queue.retries",
        ]

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (b"", "is empty"),
            (b"# only a comment\n", "is empty"),
            (b"- a\n- b\n", "mapping of keys"),
            (b"just words", "mapping of keys"),
            (b"\x00\x01\x02", "not a text file"),
            (b"\x80\xff", "not a text file"),
            (b"[" * 5_000, "nested too deeply"),
            (b"a: &a [*a]", "nested too deeply"),
            (
                b"a: &a [x,x,x,x,x,x,x,x,x,x]\n"
                + b"".join(b"%c: &%c [%s]\n" % (c, c, b",".join([b"*%c" % (c - 1)] * 10)) for c in b"bcdefg"),
                "nested too deeply",
            ),
            (b"x: " + b"y" * (256 << 10), "256 KiB"),
            (b"a: 1\n---\nb: 2\n", "not valid YAML"),
        ],
    )
    def test_files_that_are_no_job_file(self, write, content: bytes, words: str) -> None:
        assert words in refusal(write(content)).message

    def test_missing_file_and_folder(self, tmp_path: Path) -> None:
        assert "no such job file" in refusal(tmp_path / "none.yaml").message
        assert "is a folder" in refusal(tmp_path).message

    def test_the_error_survives_pickling(self, write) -> None:
        error = refusal(write(f"train: {{btach: 3}}\n{SMALLEST}"))
        again = pickle.loads(pickle.dumps(error))  # noqa: S301
        assert (again.line, again.field, str(again)) == (error.line, error.field, str(error))


def test_no_heavy_import() -> None:
    """The API and the planner read job files without torch."""
    import subprocess
    import sys

    code = "import sys, lazytrain.jobs.spec; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_yaml_is_plain(write) -> None:
    assert yaml.safe_load(load_spec(write(COMPLETE)).to_yaml())["train"]["epochs"] == 1


def test_every_key_of_the_optimizer_reaches_the_optimizer() -> None:
    """The section and the class have the same options, under the same names and with the same defaults."""
    import inspect

    from lazytrain.jobs.optim import HybridAdamW
    from lazytrain.jobs.spec import Optimizer

    elsewhere = {"params", "lr", "weight_decay", "max_grad_norm", "kernel"}
    options = {n: p.default for n, p in inspect.signature(HybridAdamW).parameters.items() if n not in elsewhere}
    assert Optimizer().arguments() == options
    assert Optimizer(name="adamw").arguments()["state_bits"] == 32
    changed = Optimizer(state_bits=32, master="bf16_stochastic", fp32_states=("*embed*",), threads=1)
    made = HybridAdamW(**changed.arguments())
    assert (made.state_bits, made.master, made.fp32_states, made.threads) == (32, "bf16_stochastic", ("*embed*",), 1)


def test_a_text_keeps_what_it_says_and_nothing_else() -> None:
    said = check_text("model: {path: rel/model}\ndata: {train: [{path: rows.jsonl}]}\n")
    assert said == {"model": {"path": "rel/model"}, "data": {"train": [{"path": "rows.jsonl"}]}}
    with pytest.raises(SpecError, match=r"the text:3: model\.dtyp: unknown key") as caught:
        check_text("model:\n  path: m\n  dtyp: x\ndata: {train: [{path: r}]}\n")
    assert caught.value.line == 3
    with pytest.raises(SpecError, match="larger than"):
        check_text("a: " + "x" * 300_000)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("010", 10),
        ("-3", -3),
        (".5", 0.5),
        ("true", True),
        ("~", None),
        ("", None),
        *((word, word) for word in ("no", "on", "1:30", "1_000", "2026-11-30", "0x10", ".", "=", "<<")),
    ],
)
def test_words_mean_what_they_look_like(text: str, value: object) -> None:
    """YAML 1.1 makes a number, a date or a truth of some of them."""
    found = read_yaml(f"a: {text}")["a"]
    assert (found, type(found)) == (value, type(value))
