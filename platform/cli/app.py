"""The application: its commands, and the one place where an error becomes words and an exit code."""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from ...jobs.errors import InputError, LazytrainError
from ..logs import quiet_libraries, write_trace
from ..openmp import asleep
from ..settings import Settings
from . import (
    convert,
    data,
    demo,
    doctor,
    evaluate,
    export,
    generate,
    nodes,
    plan,
    profile,
    queue,
    service,
    simulate,
    train,
    tune,
)
from .output import Answered

app = typer.Typer(
    name="lazytrain",
    help="Full-parameter fine-tuning of large language models on GPUs far too small to hold them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _name, _module in {
    "demo": demo,
    "plan": plan,
    "simulate": simulate,
    "train": train,
    "evaluate": evaluate,
    "generate": generate,
    "export": export,
    "tune": tune,
    "profile": profile,
    "doctor": doctor,
    "convert": convert,
}.items():
    app.command(_name, epilog=_module.EPILOG)(_module.command)
app.add_typer(data.app, name="data")
app.command("up", epilog=service.UP_EPILOG)(service.up)
app.command("down", epilog=service.DOWN_EPILOG)(service.down)
app.command("serve", epilog=service.SERVE_EPILOG)(service.serve)
_QUEUE: dict[str, Callable[..., None]] = {
    "submit": queue.submit,
    "ps": queue.ps,
    "show": queue.show,
    "logs": queue.logs,
    "stop": queue.stop,
    "pause": queue.pause,
    "resume": queue.resume,
    "retry": queue.retry,
    "set": queue.set_,
    "rm": queue.rm,
}
for _name, _command in _QUEUE.items():
    app.command(_name, epilog=queue.EPILOGS[_name])(_command)
app.command("nodes", epilog=nodes.NODES_EPILOG)(nodes.nodes)
app.command("top", epilog=nodes.TOP_EPILOG)(nodes.top)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"lazytrain {importlib.metadata.version('lazytrain')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options before the command."""


def main() -> NoReturn:
    """The console script."""
    signal.signal(signal.SIGTERM, _terminate)
    code = run(sys.argv[1:])
    gc.freeze()  # on its way out Python would look through all of torch for garbage, for as long as a plan may take
    sys.exit(code)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    """Leave the way an exception does, so that everything that was started is stopped."""
    sys.exit(128 + number)


def run(arguments: Sequence[str]) -> int:
    """Run one command line and give its exit code: 0 done, 1 failed, 2 wrong usage or input, 3 impossible."""
    as_json = "--json" in arguments
    quiet_libraries()
    os.environ.update(asleep())
    try:
        app(args=list(arguments), prog_name="lazytrain")
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        if code == 2 and as_json and not isinstance(code, Answered):
            _print_json(
                {"code": "usage", "message": "wrong usage, see stderr", "hint": "lazytrain --help", "field": ""}
            )
        return code
    except KeyboardInterrupt:
        return 130
    except LazytrainError as error:
        return _fail(error, as_json)
    except ModuleNotFoundError as error:
        hint = "pip install lazytrain brings all; the images of a server and of a worker leave out what they do not do"
        return _fail(InputError(f"this needs {error.name}, which is not installed here", hint=hint), as_json)
    except Exception as error:
        message, hint = _unexpected(error), _traced(error)
        if as_json:
            _print_json({"code": "unexpected", "message": message, "hint": hint, "field": ""})
        _say(message, hint)
        return 1
    return 0


def _unexpected(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return f"unexpected {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _traced(error: Exception) -> str:
    """Where the trace is; the folder for it may be the very thing that cannot be used."""
    settings = Settings.read()
    try:
        return f"the full trace is in {write_trace(error, settings.log_dir)}"
    except OSError as unwritable:
        return f"its trace could not be kept ({unwritable}); LAZYTRAIN_HOME is {settings.home}"


def _fail(error: LazytrainError, as_json: bool) -> int:
    if as_json:
        _print_json(error.to_dict())
    _say(error.message, error.hint)
    return error.exit_code


def _print_json(error: dict[str, str]) -> None:
    print(json.dumps({"error": error}), flush=True)


def _say(message: str, hint: str) -> None:
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(f"[bold red]error[/bold red] {escape(message)}")
    if hint:
        console.print(f"  [bold]hint[/bold] {escape(hint)}")
