"""``lazytrain demo``: the whole mission on this machine, small."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..settings import Settings
from . import options
from .output import Output

EPILOG = "Example:  lazytrain demo --dir demo && mlflow ui --backend-store-uri sqlite:///demo/mlflow.db"


def command(
    directory: Annotated[Path, typer.Option("--dir", help="Where everything goes; runs are numbered.")] = Path(
        "lazytrain-demo"
    ),
    seed: Annotated[int, typer.Option(help="Seed of data, weights and training.")] = 0,
    as_json: options.Json = False,
) -> None:
    """Profile, plan, search the batch, train and evaluate a small model, on a GPU or an emulated one.

    Takes about five minutes on two cores. Everything it starts ends with it, also on Ctrl-C.
    """
    with Output.opened(as_json) as output:
        from ..demo.run import run_demo
        from .demo_screen import draw

        with output.progress() as bars:
            outcome = run_demo(directory.resolve(), Settings.read(), bars, seed=seed)
        output.result(outcome.to_dict(), lambda console: draw(console, outcome))
