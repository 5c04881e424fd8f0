"""The command line as a whole: quick to start, true exit codes, errors without a trace, JSON and nothing else."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lazytrain.jobs.errors import DoesNotFit, LazytrainError, SpecError
from lazytrain.platform.cli import app as application
from lazytrain.platform.cli.app import run

QUEUE = ["submit", "ps", "show", "logs", "stop", "pause", "resume", "retry", "set", "rm", "top", "nodes"]
COMMANDS = ["demo", "plan", "simulate", "train", "tune", "profile", "doctor", "up", "down", "serve", *QUEUE]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LAZYTRAIN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> "list[BaseException]":
    """The error in the list is what any command raises."""
    errors: list[BaseException] = []

    def fail(**options: object) -> None:
        raise errors[0]

    monkeypatch.setattr(application, "app", fail)
    return errors


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys; from lazytrain.platform.cli.app import run; code = run(['--help']);"
        "heavy = {'torch', 'ray', 'ortools', 'transformers', 'mlflow', 'datasets', 'numpy', 'fastapi', 'sqlalchemy'}"
        " & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy or code else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for command in COMMANDS:
        assert command in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"lazytrain {command}" in shown.split("Example:")[1]
    assert "--json" in shown


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("lazytrain ")


@pytest.mark.parametrize("arguments", [["nonsense"], ["plan", "--batch", "many"], ["train"], ["plan", "--unknown"]])
def test_wrong_usage_is_exit_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "Traceback" not in shown.err


def test_wrong_usage_with_json_is_an_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--batch", "many", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "usage"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SpecError("job.yaml:3: unknown key", field="train.bach", line=3, hint="did you mean batch?"), 2),
        (DoesNotFit("no plan fits", hint="more memory"), 3),
        (LazytrainError("it broke", hint="mend it"), 1),
    ],
)
def test_our_errors_are_words_and_a_code(
    failing: "list[BaseException]", error: LazytrainError, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    failing.append(error)
    assert run(["plan"]) == code
    shown = capsys.readouterr()
    assert error.message in shown.err
    assert error.hint in shown.err
    assert "Traceback" not in shown.err
    assert run(["plan", "--json"]) == code
    assert json.loads(capsys.readouterr().out) == {"error": error.to_dict()}


def test_markup_in_a_message_is_not_interpreted(
    failing: "list[BaseException]", capsys: pytest.CaptureFixture[str]
) -> None:
    failing.append(LazytrainError("data.train[0].path [red]x[/red]"))
    run(["plan"])
    assert "data.train[0].path [red]x[/red]" in capsys.readouterr().err


def test_another_error_goes_to_a_log(
    failing: "list[BaseException]", home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failing.append(ValueError("what now\nsecond line"))
    assert run(["plan"]) == 1
    shown = capsys.readouterr().err
    assert "unexpected ValueError: what now" in shown
    assert "Traceback" not in shown
    (log,) = (home / "logs").iterdir()
    assert "Traceback" in log.read_text()
    assert str(log.stat().st_mode & 0o777) == str(0o600)


def test_where_no_trace_can_be_kept_the_error_is_still_said(
    failing: "list[BaseException]", home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home.parent.mkdir(parents=True, exist_ok=True)
    home.write_text("a file where the folder should be", encoding="utf-8")
    failing.append(NotADirectoryError(20, "Not a directory", str(home / "token")))
    assert run(["plan", "--json"]) == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out)["error"]["message"] == f"{home / 'token'}: Not a directory"
    assert f"LAZYTRAIN_HOME is {home}" in shown.err
    assert "Traceback" not in shown.err


def test_ctrl_c_is_130(failing: "list[BaseException]") -> None:
    failing.append(KeyboardInterrupt())
    assert run(["demo"]) == 130


def test_a_setting_nobody_knows_is_an_input_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LAZYTRAIN_NVME", "/x")
    assert run(["doctor", "--json"]) == 2
    assert "LAZYTRAIN_NVME_DIR" in json.loads(capsys.readouterr().out)["error"]["hint"]


def test_json_alone_on_stdout_whatever_is_printed(tmp_path: Path) -> None:
    """Also what a library writes to the file descriptor itself."""
    script = (
        "import os; from lazytrain.platform.cli.output import Output\n"
        "with Output.opened(True) as output:\n"
        "    print('python'); os.write(1, b'library'); output.result({'a': 1}, print); print('after')\n"
        "print('end')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == '{"a": 1}\nend\n'
    for noise in ("python", "library", "after"):
        assert noise in done.stderr


def test_the_console_script(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from lazytrain.platform.cli import main; main()", "train", "none.yaml", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["code"] == "invalid_spec"
    assert "none.yaml" in done.stderr
    assert "Traceback" not in done.stderr
