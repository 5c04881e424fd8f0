"""The sentences that people read about their jobs."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import Any

from ...jobs.units import format_bytes, format_needed
from ..cluster.runs import Outcome
from .failures import Failure, Verdict


def failure_sentence(failure: Failure, outcome: Outcome, verdict: Verdict, node: str) -> str:
    """What happened, where, and what will be done about it."""
    return f"{_what(failure, outcome)}{_where(node, outcome)}; {_then(failure, verdict)}"


def _what(failure: Failure, outcome: Outcome) -> str:
    said = outcome.message.strip().split("\n")[0]
    if outcome.signal is not None and outcome.how == "died":
        return f"the training process was ended by {_signal_name(outcome.signal)}"
    if said:
        return said
    if outcome.exit_code is not None:
        return f"the training process ended with exit code {outcome.exit_code} and without an error of its own"
    return failure.value.replace("_", " ")


def _where(node: str, outcome: Outcome) -> str:
    at = f" at step {outcome.step}" if outcome.step else ""
    on = f" on {node}" if node and node not in outcome.message else ""
    return f"{on}{at}"


def _then(failure: Failure, verdict: Verdict) -> str:
    if not verdict.again:
        if failure is Failure.USER_ERROR:
            return "it would happen again, so the job is not started again"
        return "the job has used up its retries" if not verdict.replan else "planning with less memory did not help"
    if verdict.replan:
        return "it is planned again with less memory"
    if verdict.other_node:
        return "it goes on from its last checkpoint on another node"
    wait = f" in {verdict.pause_s:g} s" if verdict.pause_s else ""
    return f"it goes on from its last checkpoint{wait}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def rejection_sentence(reasons: Sequence[Mapping[str, Any]], limits: Mapping[str, str]) -> str:
    """Why a job fits on no node: first by kind of node, then what would help."""
    where = "; ".join(f"{kind} {words}" for kind, words in limits.items())
    hints = [str(reason["hint"]) for reason in reasons if reason.get("hint")]
    short = where or ", ".join(
        f"{r['resource']} needs {format_needed(r['needed_bytes'])}, has {format_bytes(r['available_bytes'])}"
        for r in reasons
    )
    return f"no plan fits on any node: {short or 'no node may run it'}" + (f"; {hints[0]}" if hints else "")
