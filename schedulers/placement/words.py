"""Reasons in the words of the person who waits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta, timezone

from ...jobs.units import format_bytes, format_needed
from .decisions import WaitCode
from .forecast import Expected
from .ledger import Ledger
from .question import NodeState, Option, Question, WaitingJob
from .table import Placed, Table

_NAMED = 3


def start(question: Question, node: NodeState, placed: Placed, end_s: float, speed: float) -> str:
    """Where a job starts and what is expected."""
    text = f"starts on {a(node.kind)} of {node.name}, ends {about(question, end_s)}"
    if speed < 0.995:
        text += f", at {100 * speed:.0f} % of its speed because the node's bandwidth is shared"
    deadline_s = placed.job.deadline_s
    if deadline_s is not None and end_s > deadline_s:
        text += f"; too late for its deadline {about(question, deadline_s)}"
    return text


def wait(table: Table, job: WaitingJob, expected: Expected | None, served: set[str]) -> tuple[WaitCode, str]:
    """Why ``job`` waits; ``served`` are the jobs for which others are leaving."""
    code, text = _why(table, job, expected, served)
    if code in (WaitCode.GPU_BUSY, WaitCode.HOST_MEMORY, WaitCode.NVME_SPACE):
        text += _cannot(table, job)
    if expected is not None and job.deadline_s is not None and expected.end_s > job.deadline_s:
        text += f"; it is expected to end {about(table.question, expected.end_s)}, after its deadline"
    return code, text


def _why(table: Table, job: WaitingJob, expected: Expected | None, served: set[str]) -> tuple[WaitCode, str]:
    hopeless = _hopeless(table, job)
    if hopeless is not None:
        return hopeless
    if job.id in served:
        return WaitCode.PREEMPTING, "starts as soon as a job with a lower priority has saved its state and left"
    places = _places(table, job)
    allowed = [(ledger, option) for ledger, option in places if table.forecast.may_have(job.user, option.kind)]
    if not allowed:
        return WaitCode.QUOTA, _quota(table, job, [option for _, option in places])
    free = [(ledger, option) for ledger, option in allowed if ledger.free_gpus]
    if not free:
        return WaitCode.GPU_BUSY, _busy(table, [ledger for ledger, _ in allowed], expected)
    roomy = [(ledger, option) for ledger, option in free if ledger.room(table.question.now_s).holds(option)]
    if not roomy:
        return _memory(table, *free[0], expected)
    kept = [(ledger, option) for ledger, option in roomy if not table.respects(option, ledger.node.name)]
    if len(kept) == len(roomy):
        return WaitCode.RESERVED, _reserved(table, kept[0][0])
    return _passed_over(table, roomy, expected)


def _hopeless(table: Table, job: WaitingJob) -> tuple[WaitCode, str] | None:
    """Reasons that no running job's end will change."""
    question = table.question
    if not job.options:
        said = "; ".join(f"{a(kind)} {words}" for kind, words in job.limits.items())
        return WaitCode.NO_PLAN, f"no plan fits it anywhere{': ' + said if said else ''}"
    listed = {one.id for one in question.waiting} | {one.id for one in question.running}
    before = [name for name in job.after if name in listed]
    if before:
        return WaitCode.DEPENDENCY, f"waits for {_list(before)} to end"
    kinds = [option.kind for option in job.options]
    mine = [
        (ledger, option)
        for ledger in table.forecast.ledgers.values()
        for option in job.options
        if ledger.node.kind == option.kind and (not job.nodes or ledger.node.name in job.nodes)
    ]
    if not mine:
        where = f" called {_list(job.nodes, 'or')}" if job.nodes else ""
        return WaitCode.NO_NODE, f"no node{where} with {_list([a(kind) for kind in kinds], 'or')} is in the cluster"
    large = [(ledger, option) for ledger, option in mine if ledger.large_enough(option)]
    if not large:
        return WaitCode.TOO_LARGE, _too_large(mine)
    if not any(ledger.usable for ledger, _ in large):
        return WaitCode.CLOSED, "; ".join(_closed(ledger) for ledger, _ in large[:_NAMED])
    return None


def _places(table: Table, job: WaitingJob) -> list[tuple[Ledger, Option]]:
    """Nodes that can hold the job, at least when idle; the kind that is fastest for it first."""
    options = sorted(job.options, key=lambda option: option.seconds)
    return [
        (ledger, option)
        for option in options
        for ledger in table.forecast.ledgers.values()
        if ledger.node.kind == option.kind
        and ledger.usable
        and ledger.large_enough(option)
        and (not job.nodes or ledger.node.name in job.nodes)
    ]


def _quota(table: Table, job: WaitingJob, options: Sequence[Option]) -> str:
    kinds = list(dict.fromkeys(option.kind for option in options))
    said = [f"{table.question.rules.most_gpus(job.user, kind):g} {kind}" for kind in kinds]
    return f"{job.user} already has the GPUs that one user may have at once: {_list(said)}"


def _busy(table: Table, ledgers: Sequence[Ledger], expected: Expected | None) -> str:
    kinds = list(dict.fromkeys(ledger.node.kind for ledger in ledgers))
    counts = [
        sum(gpu.state != "bad" for ledger in ledgers if ledger.node.kind == kind for gpu in ledger.node.gpus)
        for kind in kinds
    ]
    total = sum(counts)
    all_of_them = "it is" if total == 1 else "both are" if total == 2 else f"all {total} are"
    text = f"waits for {_list([a(kind) for kind in kinds], 'or')}: {all_of_them} busy"
    if expected is None:
        return text
    first_s = min(ledger.next_free(table.question.now_s) for ledger in ledgers)
    if first_s < math.inf:
        text += f" until {about(table.question, first_s)}"
    if expected.start_s > first_s + 60:
        text += f"; with those ahead of it, it is expected to start {about(table.question, expected.start_s)}"
    return text


def _memory(table: Table, ledger: Ledger, option: Option, expected: Expected | None) -> tuple[WaitCode, str]:
    room = ledger.room(table.question.now_s)
    host_short = option.host_bytes > room.host_bytes
    need, left = (option.host_bytes, room.host_bytes) if host_short else (option.nvme_bytes, room.nvme_bytes)
    code, what = (WaitCode.HOST_MEMORY, "host memory") if host_short else (WaitCode.NVME_SPACE, "NVMe")
    beside = [job.id for job in ledger.running] + [placed.job.id for placed in table.placed[ledger.node.name]]
    when = f"; room is expected {about(table.question, expected.start_s)}" if expected else ""
    return code, (
        f"{a(ledger.node.kind)} of {ledger.node.name} is free, but {_list(beside)} leave {format_bytes(max(0, left))} "
        f"of its {what} and this job needs {format_needed(need)}{when}"
    )


def _reserved(table: Table, ledger: Ledger) -> str:
    held = table.reservation_at(ledger.node.name)
    if held is None:
        return f"{a(ledger.node.kind)} of {ledger.node.name} is free, but held for another job"
    question, other = table.question, held.job
    overdue = question.now_s - other.submitted_s >= question.rules.reserve_after_s
    why = (
        f"which has waited for {duration(question.now_s - other.submitted_s)}"
        if overdue
        else f"which has priority {other.priority}"
    )
    return (
        f"{a(ledger.node.kind)} of {ledger.node.name} is free, but held for {other.id}, {why}; "
        f"this job would not end before that one starts {about(question, held.expected.start_s)}"
    )


def _passed_over(
    table: Table, roomy: Sequence[tuple[Ledger, Option]], expected: Expected | None
) -> tuple[WaitCode, str]:
    question = table.question
    ledger, option = roomy[0]
    end_s = question.now_s + option.seconds
    if expected is not None and expected.end_s < end_s:
        return WaitCode.BETTER_LATER, (
            f"{a(ledger.node.kind)} is free and would take until {clock(question, end_s)}; {a(expected.option.kind)}, "
            f"expected {about(question, expected.start_s)}, ends it {about(question, expected.end_s)}"
        )
    if table.crowds(option, ledger.node.name):
        return WaitCode.CROWDED, (
            f"{a(ledger.node.kind)} of {ledger.node.name} is free, but the jobs beside it use all of the node's "
            "bandwidth: one more would only slow them down"
        )
    return WaitCode.TURN, f"others go first to {a(ledger.node.kind)} of {ledger.node.name}"


def _too_large(mine: Sequence[tuple[Ledger, Option]]) -> str:
    said = []
    for kind in dict.fromkeys(ledger.node.kind for ledger, _ in mine):
        ledger, option = max(
            ((one, need) for one, need in mine if one.node.kind == kind), key=lambda pair: pair[0].node.host_bytes
        )
        said.append(_short(ledger, option))
    return "too large for every node there is: " + "; ".join(said)


def _short(ledger: Ledger, option: Option) -> str:
    node = ledger.node
    if option.host_bytes > node.host_bytes:
        need, has, what = option.host_bytes, node.host_bytes, "host memory"
    else:
        need, has, what = option.nvme_bytes, node.nvme_bytes, "NVMe"
    return f"on {a(node.kind)} it needs {format_needed(need)} of {what}, {node.name} has {format_bytes(has)}"


def _closed(ledger: Ledger) -> str:
    node = ledger.node
    if node.excluded:
        return f"{node.name} takes no jobs: {node.excluded}"
    return f"{node.name} is drained" if node.drained else f"every GPU of {node.name} is bad"


def _cannot(table: Table, job: WaitingJob) -> str:
    """Why kinds of GPU that are in the cluster are no help."""
    kinds = dict.fromkeys(ledger.node.kind for ledger in table.forecast.ledgers.values())
    said = [f"{a(kind)} cannot hold it: {job.limits[kind]}" for kind in kinds if kind in job.limits]
    for ledger in table.forecast.ledgers.values():
        option = job.option(ledger.node.kind)
        if option is not None and not ledger.large_enough(option):
            said.append(_short(ledger, option))
            break
    return "".join(f"; {one}" for one in said)


def about(question: Question, at_s: float) -> str:
    """``about 14:20``, or that it cannot be said."""
    return f"about {clock(question, at_s)}" if at_s < math.inf else "at a time that cannot be said"


def clock(question: Question, at_s: float) -> str:
    """Time of day; with the date unless it is today."""
    zone = timezone(timedelta(seconds=question.rules.utc_offset_s))
    now, then = (datetime.fromtimestamp(moment, zone) for moment in (question.now_s, at_s))
    days = (then.date() - now.date()).days
    if days == 0:
        return f"{then:%H:%M}"
    return f"{then:%H:%M} tomorrow" if days == 1 else f"{then:%H:%M} on {then.day} {then:%B}"


def duration(seconds: float) -> str:
    """``25 h`` or ``40 min``."""
    return f"{seconds / 3600:.0f} h" if seconds >= 2 * 3600 else f"{max(1, seconds / 60):.0f} min"


def a(kind: str) -> str:
    """With the article that is spoken: an H800, an RTX3090, a B200."""
    return f"{'an' if kind[:1].upper() in 'AEFHILMNORSX' else 'a'} {kind}"


def _list(names: Iterable[str], joiner: str = "and") -> str:
    every = list(names)
    shown = every[:_NAMED] if len(every) > _NAMED + 1 else every
    if len(shown) < len(every):
        return f"{', '.join(shown)} {joiner} {len(every) - len(shown)} more"
    return f" {joiner} ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else "".join(shown)
