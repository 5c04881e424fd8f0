"""``lazytrain data``: what a job's rows become, before a GPU is taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ...jobs.units import MOST_ROWS
from . import options
from .output import Output

EPILOG = "Example:  lazytrain data check job.yaml"
BATCH_FOR_AUTO = 16
_BAR = 40

app = typer.Typer(help="Look at the rows of a job.", no_args_is_help=True, rich_markup_mode="rich")


@app.callback()
def _group() -> None:
    """Look at the rows of a job."""


@app.command("check", epilog=EPILOG)
def check(
    spec: options.Spec,
    overrides: options.Set = None,
    batch: Annotated[
        int | None, typer.Option(min=1, max=MOST_ROWS, help="Rows of a step; by default the job's, 16 for auto.")
    ] = None,
    samples: Annotated[int, typer.Option(min=0, max=100, help="Decoded rows to show.")] = 3,
    as_json: options.Json = False,
) -> None:
    """Count rows, tokens and refusals, show decoded rows with what carries the loss, and what padding wastes."""
    with Output.opened(as_json) as output:
        from ...jobs import data
        from ...jobs.spec import load_spec
        from ..models import load_tokenizer

        job = load_spec(spec, overrides or ())
        tokenizer = load_tokenizer(job)
        rows = batch or (BATCH_FOR_AUTO if job.train.batch == "auto" else job.train.batch)
        facts = data.check(
            data.prepare(job.data, tokenizer), tokenizer, batch=rows, seed=job.train.seed, samples=samples
        )
        output.result(facts, lambda console: _draw(console, facts))


def _draw(console: Console, facts: Mapping[str, Any]) -> None:
    console.print(_counts(facts))
    if facts["refusals"]:
        console.print(_refusals(facts["refusals"]))
    console.print(_lengths(facts["lengths"]))
    waste, worst = facts["padding"], facts["worst_batch"]
    console.print(
        f"padding in batches of {facts['batch']} rows: {waste['plain']:.1%} as they come, {waste['buckets']:.1%} with "
        f"rows of like length together, {waste['packed']:.1%} packed"
    )
    console.print(f"worst batch: {worst['rows']} rows of up to {worst['width']} tokens, {worst['tokens']:,} in all")
    for sample in facts["samples"]:
        console.rule(f"row {sample['row']}, {sample['tokens']} tokens; what carries the loss is green", style="dim")
        console.print("".join(_piece(piece) for piece in sample["pieces"]), highlight=False)
    console.print(f"cache key {facts['cache_key']}")


def _piece(piece: Mapping[str, Any]) -> str:
    text = escape(piece["text"])
    return f"[bold green]⟦{text}⟧[/bold green]" if piece["supervised"] else text


def _counts(facts: Mapping[str, Any]) -> Table:
    table = Table(title="rows", show_header=False)
    for label, value in (
        ("rows in the files", facts["rows"]),
        ("to train on", facts["train_rows"]),
        ("to evaluate on", facts["eval_rows"]),
        ("dropped", facts["refused"]),
        ("cut at max_length", facts["truncated"]),
        ("turns without loss", facts["context_turns"]),
        ("tokens", facts["tokens"]),
        ("supervised tokens", facts["supervised_tokens"]),
        ("longest row", facts["longest"]),
    ):
        table.add_row(label, f"{value:,}")
    for file, name in facts["formats"].items():
        table.add_row(escape(file), name)
    return table


def _refusals(refusals: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("rows", "why", "file", "lines", title="dropped rows")
    for refusal in sorted(refusals, key=lambda refusal: -refusal["count"]):
        lines = ", ".join(map(str, refusal["lines"])) + (", ..." if refusal["count"] > len(refusal["lines"]) else "")
        table.add_row(f"{refusal['count']:,}", escape(refusal["rule"]), escape(refusal["file"]), lines)
    return table


def _lengths(bins: Sequence[Mapping[str, int]]) -> Table:
    table = Table("tokens", "rows", "", title="lengths")
    most = max((entry["rows"] for entry in bins), default=1)
    for entry in bins:
        table.add_row(f"{entry['from']}-{entry['to']}", f"{entry['rows']:,}", "█" * round(_BAR * entry["rows"] / most))
    return table
