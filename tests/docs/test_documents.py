"""The documents build without a warning, and every command that they or the README show exists."""

import re
import shlex
from pathlib import Path

import pytest
import typer
from mkdocs.commands.build import build
from mkdocs.config import load_config

from lazytrain.platform.cli.app import app

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
COMMAND = re.compile(r"(?:^|&& )(lazytrain [^#&|]*)")


def shown_commands() -> list[tuple[str, str]]:
    """Every command line in an indented block, with the page it stands on."""
    found = []
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]:
        blocks = [line.strip() for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("    ")]
        found += [(page.name, match.strip()) for line in blocks for match in COMMAND.findall(line)]
    return found


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
