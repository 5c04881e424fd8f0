"""``lazytrain convert``: a job file out of another trainer's file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from ...jobs.errors import InputError
from . import options
from .output import Output

if TYPE_CHECKING:
    from ..convert import Conversion

EPILOG = "Example:  lazytrain convert llama3_full_sft.yaml --out job.yaml"


def command(
    file: Annotated[Path, typer.Argument(help="YAML file of LLaMA-Factory, Axolotl or MegaTrain.")],
    out: Annotated[Path | None, typer.Option(help="Where to write the job file; by default it is printed.")] = None,
    as_json: options.Json = False,
) -> None:
    """Make a job file out of a LLaMA-Factory, Axolotl or MegaTrain file, naming every key that has no counterpart."""
    with Output.opened(as_json) as output:
        from ..convert import convert

        conversion = convert(file)
        if out is not None:
            _write(out, conversion.to_yaml())
        answer = {
            "source": conversion.source,
            "job": conversion.job,
            "notes": [note.to_dict() for note in conversion.notes],
            "out": None if out is None else str(out),
        }
        output.result(answer, lambda console: _draw(console, conversion, file, out))


def _write(out: Path, text: str) -> None:
    try:
        with out.open("x", encoding="utf-8") as target:
            target.write(text)
    except FileExistsError as error:
        raise InputError(f"{out} exists already", hint="name another file") from error
    except OSError as error:
        raise InputError(f"{out} cannot be written: {error.strerror}") from error


def _draw(console: Console, conversion: Conversion, file: Path, out: Path | None) -> None:
    if out is None:
        console.print(conversion.to_yaml(), markup=False, highlight=False, soft_wrap=True, end="")
    else:
        console.print(f"{conversion.source} file {file} became {out}", markup=False, soft_wrap=True)
    told = Console(stderr=True)
    for note in conversion.notes:
        told.print(
            f"[yellow]{escape(f'{file}:{note.line}')}[/]: [bold]{escape(note.key)}[/]: {escape(note.why)}",
            soft_wrap=True,
        )
