"""``lazytrain export``: a run's model for everybody else."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import options
from .output import Output

EPILOG = "Example:  lazytrain export runs/qwen7b --out qwen7b-metamath --checkpoint best"


def command(
    run: Annotated[Path, typer.Argument(help="Directory of a run (its output.dir).")],
    out: Annotated[Path, typer.Option(help="Folder to write, new or empty.")],
    checkpoint: Annotated[str, typer.Option(help="latest, best (lowest evaluation loss), or a step.")] = "latest",
    as_json: options.Json = False,
) -> None:
    """Write the weights of a checkpoint, configuration and tokenizer as a plain Hugging Face folder."""
    with Output.opened(as_json) as output:
        from ...jobs.train import export_run

        exported = export_run(run, out, checkpoint)
        output.result(
            exported.model_dump(mode="json"),
            lambda console: console.print(f"{exported.out} holds the model after step {exported.step}", soft_wrap=True),
        )
