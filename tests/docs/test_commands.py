"""Every command that README, documents and the READMEs of ``deploy`` show is run, as it stands there.

What cannot run here stands after a line ``<!-- needs: ... -->``. A few that take long are run by another test, which is
named below. The others run in one home, on a tiny model that bears the name of the page's, with one service, which is
started by the command that the documents show, as a server without PyTorch.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from lazytrain.jobs.errors import LazytrainError
from lazytrain.jobs.spec import load_spec
from lazytrain.platform.cli import nodes
from lazytrain.platform.cli.app import run
from lazytrain.platform.client import Client
from lazytrain.platform.demo import inputs

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "deploy").rglob("README.md"))]
PROGRAMS = ("lazytrain", "curl", "openssl", "umask", "sqlite3", "pip", "docker", "deploy/")
OTHER = ("name: ", "from lazytrain", "cpu  ", "scrape_configs:")
"""How blocks begin that show something else: job files, Python, timelines, configuration."""
NEEDS = re.compile(r"<!-- needs: (.+) -->")
BLOCK = re.compile(r"(?:^ {4}.*\n(?:\n(?= {4}))?)+", re.M)

SERVICE = "tests/platform/test_service.py::test_two_good_jobs_one_impossible_one_bad_and_a_controller_killed"
RUN_BY = {
    "pip install . && lazytrain demo": "tests/platform/demo/test_demo.py::test_demo",
    'pip install -e ".[test]" && pytest': ".ci/run",
    "lazytrain train job.yaml": "tests/platform/cli/test_train.py::test_plans_and_trains",
    "lazytrain up": SERVICE,
    "lazytrain down": SERVICE,
    "lazytrain serve": "tests/docs/test_commands.py::service",
}
"""Commands, and where each is run, with whatever options; tests are named so that none can vanish unnoticed."""
QUICKER = {"plan --model ": "plan --solve-seconds 1 --model ", "qwen3.6-27b": "qwen2.5-3b"}
"""What is changed of commands, beside names of machines, because measuring and solving would take half a minute."""
CODES = {"lazytrain top": 130}
"""Exit codes that are not 0: it goes on until Ctrl-C."""


@dataclass(frozen=True)
class Command:
    """One command line of a page, without what the page says beside it."""

    page: str
    line: str
    needs: str = ""

    @property
    def run_by(self) -> str:
        return next((test for start, test in RUN_BY.items() if f"{self.line} --".startswith(f"{start} --")), "")


def commands() -> list[Command]:
    found = [command for page in PAGES for command in commands_of(page.name, page.read_text(encoding="utf-8"))]
    return list({command.line: command for command in found}.values())


def commands_of(page: str, text: str) -> Iterator[Command]:
    for block in BLOCK.finditer(text):
        lines = re.sub(r"\\\n\s*", "", dedent(block[0])).splitlines()
        said = text[: block.start()].rstrip().rpartition("\n")[2]
        needs = found[1] if (found := NEEDS.search(said)) else ""
        if not block[0].lstrip().startswith(OTHER):
            yield from (Command(page, re.sub(r"\s{2,}#.*", "", line), needs) for line in lines if line)


def test_every_block_is_of_commands_or_known_to_be_something_else() -> None:
    assert len(commands()) > 25
    assert [command for command in commands() if not command.line.startswith(PROGRAMS)] == []


def test_what_another_test_runs_is_run_there() -> None:
    for start, where in RUN_BY.items():
        file, _, name = where.partition("::")
        text = (ROOT / file).read_text(encoding="utf-8").replace("--quiet ", "")
        parts = [f"def {name}("] if name else start.split(" && ")
        assert re.search(".*".join(map(re.escape, parts)), text, re.S), where
        assert any(command.line.startswith(start) for command in commands()), f"{start} is shown no more"


@dataclass
class Lab:
    """A service and what the pages call by other names."""

    home: Path
    client: Client
    names: dict[str, str]

    def here(self, line: str) -> str:
        """The line with the names that there are here."""
        for theirs, ours in self.names.items():
            line = line.replace(theirs, ours)
        return line


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, only: Callable[..., dict[str, str]]) -> Iterator[Lab]:
    """Ray as ``lazytrain up`` starts it, and the documents' ``serve``, which has only what the server's image has."""
    home = tmp_path_factory.mktemp("home")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mine = {"HOME": str(home), "LAZYTRAIN_API_PORT": str(port), "LAZYTRAIN_RAY_AUTH": "disabled"}
    address = home / "ray_address"
    head = [sys.executable, "-m", "lazytrain.platform.cluster.head", str(address), "RTX3090", "emulated", "1", "2"]
    line = next(command.line for command in commands() if command.line.startswith("lazytrain serve"))
    with (home / "printed").open("wb") as log, pytest.MonkeyPatch.context() as patch:
        for name, value in mine.items():
            patch.setenv(name, value)
        ray = subprocess.Popen(head, env={**os.environ, **mine}, stdout=log, stderr=log)
        wait_for(address.exists)
        names = {"10.0.0.1:6379": address.read_text(), "http://127.0.0.1:8470": f"http://127.0.0.1:{port}"}
        names |= QUICKER
        lab = Lab(home, Client(names["http://127.0.0.1:8470"], ""), names)
        main = [sys.executable, "-c", "from lazytrain.platform.cli import main; main()"]
        server = subprocess.Popen(
            [*main, *shlex.split(lab.here(line))[1:]], env={**only("server"), **mine}, stdout=log, stderr=log
        )
        try:
            wait_for((home / ".lazytrain" / "token").exists)
            lab.client = Client(names["http://127.0.0.1:8470"], (home / ".lazytrain" / "token").read_text().strip())
            wait_for(lambda: measured(lab))
            yield lab
        finally:
            for process in (server, ray):
                process.terminate()
                process.wait(60)


def wait_for(what: Callable[[], bool], seconds: float = 150.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.1)


def measured(lab: Lab) -> bool:
    try:
        found = lab.client.nodes()
    except LazytrainError:
        return False
    if ready := [node for node in found if node.measured]:
        lab.names["gpu-7"] = ready[0].name
    return bool(ready)


def write_files(folder: Path) -> None:
    """What the pages take for granted: a job file, that of the first page, with its model and its rows."""
    inputs.write_inputs(folder, seed=0)
    (folder / "Qwen").mkdir()
    (folder / "model").rename(folder / "Qwen" / "Qwen2.5-7B")
    model = folder / "Qwen" / "Qwen2.5-7B"
    small = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "head_dim": 16}
    layers = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    config = AutoConfig.from_pretrained(model, **small, **layers)
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    (folder / "train.jsonl").rename(folder / "gsm8k-train.jsonl")
    page = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    job = next(block[0] for block in BLOCK.finditer(page) if block[0].startswith("    name: "))
    (folder / "job.yaml").write_text(dedent(job), encoding="utf-8")
    other = ROOT / "tests" / "platform" / "convert" / "files" / "qwen_full_sft.yaml"
    shutil.copy(other, folder / "llama3_full_sft.yaml")


@pytest.fixture
def files(service: Lab, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The pages' files, in the home of a person whose service is ``service``."""
    monkeypatch.setattr(inputs, "_TRAIN_ROWS", 16)
    monkeypatch.setattr(inputs, "_EVAL_ROWS", 2)
    write_files(service.home / "files")
    (service.home / "etc").mkdir()
    service.names["/etc/lazytrain"] = str(service.home / "etc")
    port = service.names["http://127.0.0.1:8470"].rpartition(":")[2]
    for name, value in {"HOME": service.home, "LAZYTRAIN_API_PORT": port, "LAZYTRAIN_RAY_AUTH": "disabled"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(nodes, "time", SimpleNamespace(time=time.time, sleep=interrupt))
    return service.home / "files"


def interrupt(seconds: float) -> None:
    """Ctrl-C, where ``top`` would wait before it looks again."""
    raise KeyboardInterrupt


@pytest.mark.ray
@pytest.mark.slow
def test_what_the_pages_show_runs(
    service: Lab, files: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The job that a page submits is planned by the server without PyTorch, with what a node measures, and trained."""
    failed = []
    for command in commands():
        if command.needs or command.run_by:
            continue
        monkeypatch.chdir(folder_of(command, files))
        code = execute(service.here(command.line))
        said = capfd.readouterr()
        if code != CODES.get(command.line, 0):
            failed.append(f"{command.page}: {command.line}\ngave {code}: {said.out[-1000:]}{said.err[-2000:]}")
        if command.line.startswith("lazytrain submit"):
            service.names["j-0123456789"] = service.client.jobs()[0].id
    assert not failed, "\n\n".join(failed)
    bad = files / "bad.jsonl"
    bad.write_text('{"nothing": 1}\n', encoding="utf-8")
    refused = service.client.submit(load_spec(files / "job.yaml", (f"data.train.0.path={bad}",)))
    ended = service.client.wait(refused.id, timeout_s=150)
    assert ended.state == "REJECTED" and "no usable row in" in ended.sentence, "what a node finds wrong is said as here"


def folder_of(command: Command, files: Path) -> Path:
    """A page's own copy of the files, without those that the command makes."""
    folder = files.parent / command.page
    if not folder.exists():
        shutil.copytree(files, folder)
    for made in re.findall(r"--out (\S+)", command.line):
        (folder / made).unlink(missing_ok=True)
    return folder


def execute(line: str) -> int:
    """Our own command in this process, where torch is imported already; any other by a shell."""
    if line.startswith("lazytrain "):
        return run(shlex.split(line)[1:])
    return subprocess.run(["bash", "-o", "pipefail", "-c", line], check=False).returncode
