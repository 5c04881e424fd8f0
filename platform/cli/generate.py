"""``lazytrain generate``: what a model writes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from ...jobs.units import MOST_ROWS
from . import options
from .output import Output

EPILOG = 'Example:  lazytrain generate runs/qwen7b "How many legs have three cats?" --temperature 0.7 --top-p 0.9'


def command(
    model: Annotated[str, typer.Argument(help="Model folder, hub id, or the directory of a run.")],
    prompts: Annotated[list[str] | None, typer.Argument(help="What is asked; or --file.")] = None,
    file: Annotated[Path | None, typer.Option(help="Prompts, one a line.")] = None,
    temperature: Annotated[float, typer.Option(help="0 writes the likeliest token each time.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens that have this probability.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of what is drawn.")] = 0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 256,
    batch: Annotated[int, typer.Option(min=1, max=MOST_ROWS, help="Prompts at once.")] = 64,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or emulated:GPU.")] = "auto",
    as_json: options.Json = False,
) -> None:
    """Answer prompts, greedily or drawn, with a model of any size: its layers are streamed where it does not fit."""
    with Output.opened(as_json) as output:
        from ...jobs.generate import Sampling
        from ...jobs.spec import Model
        from ...jobs.train import complete, trained_model
        from .job import open_device_of

        asked = [*(prompts or ()), *_lines(file)]
        texts = complete(
            Model(path=trained_model(model), dtype=_dtype(dtype)),
            asked,
            device=open_device_of(device),
            max_new_tokens=max_new_tokens,
            batch=batch,
            sampling=Sampling(temperature, top_p, seed),
            template=not raw,
        )
        rows = [{"prompt": prompt, "output": text} for prompt, text in zip(asked, texts, strict=True)]
        output.result({"model": model, "outputs": rows}, lambda console: _draw(console, rows))


def _lines(file: Path | None) -> list[str]:
    from ...jobs.errors import InputError

    if file is None:
        return []
    try:
        return [line for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
    except (OSError, UnicodeError) as error:
        raise InputError(f"cannot read prompts from {file}: {error}") from error


def _dtype(text: str) -> Literal["bfloat16", "float32"]:
    from ...jobs.errors import InputError

    if text == "bfloat16":
        return "bfloat16"
    if text == "float32":
        return "float32"
    raise InputError(f"no dtype is called {text!r}", hint="use bfloat16 or float32")


def _draw(console: Console, rows: list[dict[str, str]]) -> None:
    for row in rows:
        console.rule(row["prompt"].split("\n")[0][:60], style="dim", align="left")
        console.print(row["output"], markup=False, highlight=False)
