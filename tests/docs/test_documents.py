"""The documents build without a warning, and every command that they, the README or ``--help`` show exists."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import click
import pytest
import typer
from mkdocs.commands.build import build
from mkdocs.config import load_config

from lazytrain.jobs.spec import load_spec
from lazytrain.platform.api import create_app
from lazytrain.platform.cli.app import app
from lazytrain.platform.settings import Settings

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
COMMAND = re.compile(r"(?:^|&& )(lazytrain [^#&|]*)")

RUN_BY = {
    "demo": "demo/test_demo.py",
    "plan": "cli/test_plan.py",
    "simulate": "cli/test_plan.py",
    "train": "cli/test_train.py",
    "tune": "cli/test_tune.py",
    "profile": "cli/test_profile.py",
    "doctor": "cli/test_doctor.py",
    "convert": "cli/test_convert.py",
    "data": "cli/test_data.py",
    "evaluate": "cli/test_inference.py",
    "generate": "cli/test_inference.py",
    "export": "cli/test_export.py",
    "up": "test_service.py",
    "down": "test_service.py",
    "serve": "../deploy/test_node.py",
    **dict.fromkeys(
        ("submit", "ps", "show", "logs", "stop", "pause", "resume", "retry", "set", "rm", "nodes", "top"),
        "cli/test_queue.py",
    ),
}
"""The test below ``tests/platform`` that runs the command for real."""


def examples_of(command: click.Command) -> Iterator[str]:
    """What the generated page of commands shows, and ``--help``."""
    for child in getattr(command, "commands", {}).values():
        yield from examples_of(child)
    for example in re.split(r"\s+or\s+|&&", (command.epilog or "").removeprefix("Example:")):
        if example.strip().startswith("lazytrain "):
            yield example.strip()


def shown_commands() -> list[tuple[str, str]]:
    """Every command line of ours that a person is shown, and where. ``test_commands.py`` runs those of the pages."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES, *sorted((ROOT / "deploy").rglob("README.md"))]
    lines = [(page.name, line) for page in pages for line in page.read_text(encoding="utf-8").splitlines()]
    shown = [(page, each) for page, line in lines if line[:4].isspace() for each in COMMAND.findall(line.strip())]
    return shown + [("--help", line) for line in examples_of(typer.main.get_command(app))]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(target), strict=True))
    return target


def test_builds_without_a_warning_and_asks_nothing_of_the_network(site: Path) -> None:
    for page in site.glob("*.html"):
        assert not re.search(r'(src|<link[^>]*href)="https?://', page.read_text(encoding="utf-8")), page


def test_the_job_file_page_lists_every_section_and_key(site: Path) -> None:
    text = (site / "job-file.html").read_text(encoding="utf-8")
    for key in ("learning_rate", "max_grad_norm", "gpu_memory", "save_every", "data.train[]", "betas"):
        assert key in text, key


def test_the_commands_page_lists_every_command(site: Path) -> None:
    text = (site / "commands.html").read_text(encoding="utf-8")
    for command in ("demo", "plan", "train", "data check"):
        assert f'<h2 id="{command.replace(" ", "-")}">' in text, command


def test_there_are_commands_to_check() -> None:
    assert len(shown_commands()) >= 8


@pytest.mark.parametrize(("page", "line"), shown_commands())
def test_a_shown_command_exists_with_its_options(page: str, line: str) -> None:
    command, words = typer.main.get_command(app), shlex.split(line)[1:]
    while words and words[0] in getattr(command, "commands", {}):
        command, words = command.commands[words[0]], words[1:]  # type: ignore[attr-defined]
    assert not hasattr(command, "commands") or all(word.startswith("-") for word in words), line
    known = {"--help", "-h", *(name for parameter in command.params for name in parameter.opts)}
    assert {word.partition("=")[0] for word in words if word.startswith("-")} <= known, line


@pytest.mark.parametrize("line", sorted({line for _, line in shown_commands()}))
def test_a_shown_command_is_run_by_a_test(line: str) -> None:
    name = line.split()[1]
    test = (ROOT / "tests" / "platform" / RUN_BY[name]).read_text(encoding="utf-8")
    assert re.search(rf"\"{name}\"|\b{name}\(|import .*\b{name}\b", test), f"{RUN_BY[name]} does not run {name}"


def examples() -> list[tuple[str, str]]:
    """Every job file that a page shows; those of ``deploy/recipes`` are tested beside the job file's models."""
    found = []
    for page in [ROOT / "README.md", *PAGES]:
        text = page.read_text(encoding="utf-8")
        shown = re.findall(r"(?:^    .*\n)+", text, re.M)
        found += [(page.name, dedent(block)) for block in shown if re.match(r"    (name|model): ", block)]
    return found


def test_there_are_examples() -> None:
    assert {name for name, _ in examples()} >= {"README.md", "index.md"}


@pytest.mark.parametrize(("name", "text"), examples(), ids=[name for name, _ in examples()])
def test_an_example_is_a_job_file(name: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(text, encoding="utf-8")
    assert load_spec(file).data.train


def test_the_api_page_lists_every_request(site: Path) -> None:
    text = (site / "api.html").read_text(encoding="utf-8")
    paths = create_app(None, Settings(), None).openapi()["paths"]  # type: ignore[arg-type]
    assert len(paths) > 10
    assert all(f"{method.upper()} {path}" in text for path, methods in paths.items() for method in methods)


def test_the_settings_page_lists_every_variable_with_its_meaning(site: Path) -> None:
    text = (site / "settings.html").read_text(encoding="utf-8")
    for name in Settings.model_fields:
        assert re.search(rf"<code>LAZYTRAIN_{name.upper()}</code></td>\n<td>.+</td>\n<td>\S.+</td>", text), name


def test_the_benchmarks_page_has_the_newest_figures(site: Path) -> None:
    text = (site / "benchmarks.html").read_text(encoding="utf-8")
    results = ROOT / "tests" / "benchmarks" / "results"
    for name in ("executor", "optimizer", "planner", "placement"):
        newest = max(results.glob(f"{name}-*.json"))
        key, value = next(
            (key, value)
            for key, value in json.loads(newest.read_text(encoding="utf-8")).items()
            if isinstance(value, float)
        )
        assert newest.name in text
        assert f"<td><code>{key}</code></td>\n<td>{value:.4g}</td>" in text
    scripts = [path for path in results.parent.glob("*.py") if "__main__" in path.read_text(encoding="utf-8")]
    assert all(f'id="{path.stem}"' in text for path in scripts)


def test_the_page_of_errors_lists_every_code(site: Path) -> None:
    text = (site / "errors.html").read_text(encoding="utf-8")
    assert all(
        f"<code>{code}</code>" in text for code in ("does_not_fit", "out_of_memory", "unreachable", "invalid_spec")
    )
