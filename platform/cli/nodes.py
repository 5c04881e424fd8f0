"""``lazytrain nodes`` and ``lazytrain top``: the machines, and everything at once."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table

from ...jobs.errors import InputError
from ...jobs.units import format_bytes
from ...schedulers.copies import CopyRates
from . import options
from .output import Output
from .queue import connect, job_table

if TYPE_CHECKING:
    from ..client import Client
    from ..schemas import NodeView

NODES_EPILOG = "Example:  lazytrain nodes    or    lazytrain nodes drain gpu-7 --reason 'new disk'"
TOP_EPILOG = "Example:  lazytrain top --every 2"


def nodes(
    action: Annotated[str | None, typer.Argument(help="drain or undrain; nothing lists the nodes.")] = None,
    name: Annotated[str | None, typer.Argument(help="The node to drain.")] = None,
    reason: Annotated[str, typer.Option(help="Why, for those who wait for it.")] = "",
    as_json: options.Json = False,
) -> None:
    """List the nodes, or take one out of service once its jobs have ended, and back into it."""
    if action is not None and (action not in ("drain", "undrain") or name is None):
        raise InputError(f"nodes {action} {name or ''}: not understood", hint="lazytrain nodes drain NAME")
    with Output.opened(as_json) as output:
        client = connect()
        if action is not None and name is not None:
            node = client.drain(name, action == "drain", reason)
            words = "takes no new jobs" if node.drained else "is in service"
            output.result(node.model_dump(mode="json"), lambda console: console.print(f"{node.name} {words}"))
            return
        found = client.nodes()
        data = {"nodes": [node.model_dump(mode="json") for node in found]}
        output.result(data, lambda console: console.print(node_table(found)))


def top(
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option(help="Look once and leave.")] = False,
    as_json: options.Json = False,
) -> None:
    """Nodes, running and waiting jobs, as they change; Ctrl-C leaves."""
    with Output.opened(as_json) as output:
        client = connect()
        if as_json or once:
            data = {"queue": client.queue().model_dump(mode="json"), "health": client.health().model_dump(mode="json")}
            output.result(data, lambda console: console.print(_screen(client)))
            return
        _live(client, every)


def _live(client: Client, every: float) -> None:
    from rich.live import Live

    with Live(_screen(client), console=Console(), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(every)
            live.update(_screen(client), refresh=True)


def _screen(client: Client) -> Group:
    from ...jobs.lifecycle import JobState
    from .. import facts
    from . import charts

    health, found = client.health(), client.nodes()
    jobs = client.jobs(states=[state.value for state in JobState if not state.final], limit=100)
    leader = health.leader or "[red]none: nothing is started or ended[/red]"
    counts = "  ".join(f"{state} {count}" for state, count in sorted(health.jobs.items()))
    rate = sum(job.progress.tokens_per_s or 0.0 for job in jobs if job.progress and job.state == "RUNNING")
    return Group(
        f"leader {leader}   {counts}   {rate:,.0f} tokens/s",
        charts.usage_table("in use", facts.lab_usage(found)),
        node_table(found),
        job_table(jobs, "jobs"),
        charts.queue_table(facts.queue_facts(client.queue(), time.time())),
    )


def node_table(found: Iterable[NodeView]) -> Table:
    """Nodes, one a row."""
    table = Table(title="nodes")
    for column in ("node", "GPUs", "host memory", "to, from GPU", "jobs", "state"):
        table.add_column(column, overflow="fold")
    for node in found:
        memory = format_bytes(node.profile["host_memory_bytes"]) if node.profile else ""
        gpus = f"{node.gpus:g} x {node.kind}" if node.gpus else "none"
        table.add_row(node.name, gpus, memory, _copies(node), ", ".join(node.jobs), escape(_state(node)))
    return table


def _copies(node: NodeView) -> str:
    """What one GPU reaches alone, and below it what all reach together while all of them copy in both directions."""
    copies = [CopyRates.model_validate(each) for each in node.profile.get("copies", ())]
    if not copies:
        return ""
    alone = _gbps(min(each.h2d_bytes_s for each in copies), min(each.d2h_bytes_s for each in copies))
    if len(copies) == 1:
        return alone
    there, back = sum(each.all_both_h2d_bytes_s for each in copies), sum(each.all_both_d2h_bytes_s for each in copies)
    return f"{alone}\nall: {_gbps(there, back)}"


def _gbps(*rates: float) -> str:
    return f"{', '.join(f'{rate / 1e9:.3g}' for rate in rates)} GB/s"


def _state(node: NodeView) -> str:
    if not node.alive:
        return "gone"
    if node.drained:
        return f"drained: {node.reason}"
    if node.problem:
        return f"not used: {node.problem}"
    busy = [f"GPU {device['index']}: {device['busy']}" for device in node.devices if device.get("busy")]
    if busy:
        return f"busy: {'; '.join(busy)}"
    return "in service" if node.measured or not node.gpus else "is being measured"
