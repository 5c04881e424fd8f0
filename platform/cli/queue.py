"""The queue's commands: submit, ps, show, logs, stop, pause, resume, retry, set, rm."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ...jobs.errors import InputError, LazytrainError, Unauthorized, Unreachable
from ..settings import Settings
from . import options
from .output import Answered, Output
from .picture import write_text

if TYPE_CHECKING:
    from ..client import Client
    from ..facts import StepTimes
    from ..schemas import EventView, JobView

EPILOGS = {
    "submit": "Example:  lazytrain submit job.yaml --set train.batch=16 -d",
    "ps": "Example:  lazytrain ps --all",
    "show": "Example:  lazytrain show j-0123456789 --html job.html",
    "logs": "Example:  lazytrain logs -f j-0123456789",
    "stop": "Example:  lazytrain stop j-0123456789    or    lazytrain stop --all",
    "pause": "Example:  lazytrain pause j-0123456789",
    "resume": "Example:  lazytrain resume j-0123456789",
    "retry": "Example:  lazytrain retry j-0123456789",
    "set": "Example:  lazytrain set j-0123456789 priority=90",
    "rm": "Example:  lazytrain rm j-0123456789 --files",
}
_FINAL = ("SUCCEEDED", "FAILED", "STOPPED", "REJECTED")
_COLOURS = {"SUCCEEDED": "green", "RUNNING": "cyan", "FAILED": "red", "REJECTED": "red", "QUEUED": "yellow"}
_EXIT_IMPOSSIBLE = 3

Job = Annotated[str, typer.Argument(metavar="ID", help="The job, as lazytrain ps lists it.")]


def connect() -> Client:
    """A client of this machine's service, with the token that ``up`` made. Raises Unreachable when there is none."""
    from ..client import Client

    settings = Settings.read()
    try:
        token = settings.api_token_path.read_text(encoding="utf-8").strip()
    except FileNotFoundError as error:
        raise Unreachable(
            f"there is no token in {settings.api_token_path}", hint="lazytrain up starts the service and makes it"
        ) from error
    except PermissionError as error:
        raise Unauthorized(f"{settings.api_token_path} is somebody else's", hint="set LAZYTRAIN_HOME") from error
    return Client(settings.api_url, token)


def submit(
    spec: options.Spec,
    settings: options.Set = None,
    after: Annotated[list[str] | None, typer.Option(help="Job that has to succeed first; again for several.")] = None,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask.")] = False,
    detach: Annotated[bool, typer.Option("-d", "--detach", help="Do not wait for its end.")] = False,
    as_json: options.Json = False,
) -> None:
    """Put a job into the queue and follow it; Ctrl-C stops following, not the job."""
    with Output.opened(as_json) as output:
        from ...jobs.spec import load_spec

        job = load_spec(spec, settings or ())
        client = connect()
        if not (yes or as_json) and sys.stdin.isatty():
            typer.confirm(f"submit {job.name} ({job.model.path})?", default=True, abort=True, err=True)
        made = client.submit(job, after=after or ())
        if detach:
            output.result(_plain(made), lambda console: console.print(f"submitted {made.id}"))
            return
        with output.progress() as bars:
            bars.say(f"submitted {made.id}")
            ended = _follow(client, made, bars)
        output.result(_plain(ended), lambda console: draw_job(console, ended, []))
        _leave(ended)


def _follow(client: Client, job: JobView, bars: Any) -> JobView:
    """Until the job has ended, with what it says of itself on the bar."""
    said, client = "", client.patient()  # whoever starts the service again does not end what people look at
    bars.stage(job.id)
    while job.state not in _FINAL:
        job = client.job(job.id)
        if job.sentence != said:
            said = job.sentence
            bars.say(f"{job.state}: {said}")
        if job.progress is not None and job.progress.total_steps:
            bars.set_total(job.progress.total_steps)
            bars.advance(job.progress.step, job.state)
        time.sleep(0.5)
    return job


def _leave(job: JobView) -> None:
    if job.state == "REJECTED":
        raise typer.Exit(Answered(_EXIT_IMPOSSIBLE if job.reason == "does_not_fit" else 2))
    if job.state != "SUCCEEDED":
        raise typer.Exit(1)


def ps(
    everything: Annotated[bool, typer.Option("--all", "-a", help="Also jobs that have ended.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="Most jobs to list.")] = 200,
    as_json: options.Json = False,
) -> None:
    """List jobs, newest first."""
    with Output.opened(as_json) as output:
        from ...jobs.lifecycle import JobState

        states = [] if everything else [state.value for state in JobState if not state.final]
        jobs = connect().jobs(states=states, limit=limit)
        output.result({"jobs": [_plain(job) for job in jobs]}, lambda console: console.print(job_table(jobs)))


def show(
    job_id: Job,
    html: Annotated[Path | None, typer.Option(help="Draw metrics, policy and timeline into this HTML file.")] = None,
    as_json: options.Json = False,
) -> None:
    """One job: its state, why it waits or how it ended, how it goes, and what happened to it."""
    with Output.opened(as_json) as output:
        from .. import facts

        client = connect()
        job, events = client.job(job_id), client.events(job_id)
        times = facts.step_times(client, job_id)
        if html is not None:
            write_text(html, facts.job_report(client, job))
        data = {
            **_plain(job),
            "events": [event.model_dump(mode="json") for event in events],
            "step_time": {"measured_s": times.measured_s, "predicted_s": times.predicted_s, "ratio": times.ratio},
        }

        def draw(console: Console) -> None:
            draw_job(console, job, events)
            if times.measured_s is not None:
                _draw_run(console, client, job, times)

        output.result(data, draw)


def _draw_run(console: Console, client: Client, job: JobView, times: StepTimes) -> None:
    """How a job that has begun to train goes: metrics, policy, one step of it."""
    from .. import facts
    from . import charts

    console.print(charts.series_table(facts.run_series(client, {job.id: job.name}, facts.METRICS)))
    console.print(times.words if job.calibration is None else escape(job.calibration.sentence))
    policy = facts.job_map(client, job.id)
    if policy is not None:
        console.print(charts.map_text(policy))
    timelines = facts.job_timelines(client, job.id)
    if any(timelines):
        console.print(charts.lanes_table(*timelines))


def logs(
    job_id: Job,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the job has ended.")] = False,
    tail: Annotated[int | None, typer.Option(min=1, help="Only so many lines of the end.")] = None,
    as_json: options.Json = False,
) -> None:
    """What a job printed."""
    with Output.opened(as_json) as output:
        client = connect()
        if follow and not as_json:
            for text in client.patient().follow_log(job_id):
                print(text, end="", flush=True)
            return
        part = client.log(job_id, tail=tail)
        output.result(part.model_dump(mode="json"), lambda console: console.out(part.text, highlight=False))


def stop(
    job_ids: Annotated[list[str] | None, typer.Argument(metavar="ID...", help="Jobs to stop.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All of one's own jobs.")] = False,
    as_json: options.Json = False,
) -> None:
    """Let jobs save their state and leave. Stopping what has ended does nothing."""
    if not job_ids and not everything:
        raise InputError("which job?", hint="name one, or give --all")
    with Output.opened(as_json) as output:
        connect().stop(*(job_ids or ()), all=everything)
        words = "all jobs were asked to stop" if everything else f"asked to stop: {', '.join(job_ids or ())}"
        output.result({"asked": job_ids or "all"}, lambda console: console.print(words))


def pause(
    job_id: Job,
    checkpoint: Annotated[bool, typer.Option(help="Also free the memory: the state goes to disk at once.")] = False,
    as_json: options.Json = False,
) -> None:
    """Free the GPU of a running job; ``resume`` lets it go on from where it was."""
    _done(job_id, "paused", connect().pause(job_id, checkpoint=checkpoint), as_json)


def resume(job_id: Job, as_json: options.Json = False) -> None:
    """Let a paused job go on."""
    _done(job_id, "in the queue again", connect().resume(job_id), as_json)


def retry(
    job_id: Job,
    fresh: Annotated[bool, typer.Option(help="Begin anew, also if there is a checkpoint.")] = False,
    as_json: options.Json = False,
) -> None:
    """Submit a job that has ended again, as a new one that goes on from its last checkpoint."""
    with Output.opened(as_json) as output:
        made = connect().retry(job_id, fresh=fresh)
        output.result(_plain(made), lambda console: console.print(f"submitted {made.id}"))


def set_(
    job_id: Job,
    change: Annotated[str, typer.Argument(help="What to change: priority=0..100.")],
    as_json: options.Json = False,
) -> None:
    """Change a job that has not ended."""
    name, _, value = change.partition("=")
    if name != "priority" or not value.isdecimal() or int(value) > 100:
        raise InputError(f"{change!r} is nothing that can be set", hint="write priority=90, from 0 to 100")
    _done(job_id, f"priority is {value}", connect().set_priority(job_id, int(value)), as_json)


def rm(
    job_id: Job,
    files: Annotated[bool, typer.Option(help="Also delete its folder, the trained model included.")] = False,
    as_json: options.Json = False,
) -> None:
    """Take a job that has ended off the list."""
    _done(job_id, "removed", connect().remove(job_id, files=files), as_json)


def _done(job_id: str, words: str, refusal: str, as_json: bool) -> None:
    if refusal:
        raise LazytrainError(refusal)
    with Output.opened(as_json) as output:
        output.result({"id": job_id, "done": words}, lambda console: console.print(f"{job_id}: {words}"))


# ---- drawing


def job_table(jobs: Iterable[JobView], title: str = "") -> Table:
    """Jobs, one a row."""
    table = Table(title=title or None)
    for column in ("id", "name", "user", "state", "step", "node", "priority", "age", "why"):
        table.add_column(column, overflow="fold")
    for job in jobs:
        step = f"{job.progress.step}/{job.progress.total_steps}" if job.progress else ""
        texts = (job.id, job.name, job.user, state_text(job.state), step, job.node or "", str(job.priority))
        table.add_row(*texts, age(job.created_at), escape(job.sentence))
    return table


def draw_job(console: Console, job: JobView, events: Iterable[EventView]) -> None:
    """Everything about one job."""
    table = Table(title=f"{job.id}  {escape(job.name)}", show_header=False)
    table.add_row("state", state_text(job.state))
    table.add_row("why", escape(job.sentence))
    if job.progress is not None and job.progress.total_steps:
        table.add_row("step", f"{job.progress.step} of {job.progress.total_steps}")
    table.add_row("node", job.node or "none yet")
    table.add_row("attempts", str(job.attempt))
    table.add_row("priority", str(job.priority))
    if job.after:
        table.add_row("after", ", ".join(job.after))
    for name in ("exit_code", "signal", "hint"):
        if job.outcome.get(name) not in (None, ""):
            table.add_row(name.replace("_", " "), escape(str(job.outcome[name])))
    table.add_row("folder", escape(job.run_dir))
    console.print(table)
    for event in events:
        when = time.strftime("%H:%M:%S", time.localtime(event.time))
        console.print(f"{when}  {event.state:<10} {escape(event.sentence)}", soft_wrap=True, highlight=False)


def state_text(state: str) -> str:
    """A state in its colour."""
    colour = _COLOURS.get(state)
    return f"[{colour}]{state}[/{colour}]" if colour else state


def age(since: float) -> str:
    """``125`` seconds ago becomes ``2m``."""
    seconds = max(0, int(time.time() - since))
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def _plain(job: JobView) -> dict[str, Any]:
    found: dict[str, Any] = job.model_dump(mode="json")
    return found
