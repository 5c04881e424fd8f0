"""What ``lazytrain doctor --ray-address`` asks of every node of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..settings import Settings
from .doctor_machine import Finding

if TYPE_CHECKING:
    from ..cluster.survey import NodeReport

_MOST_SKEW_S = 1.0
"""The controller's lease and the times of events compare clocks of several nodes, to seconds."""


def check_cluster(settings: Settings, address: str) -> list[Finding]:
    """One finding for each node, after one for the connection."""
    from ...jobs.errors import Unreachable
    from ..cluster.local import Connection
    from ..cluster.survey import survey

    try:
        connection = Connection(settings, address)
    except Unreachable as error:
        return [Finding("cluster", "failed", error.message, error.hint)]
    try:
        settings.home.mkdir(parents=True, exist_ok=True)
        reports = survey(settings.home)
    finally:
        connection.close()
    words = f"{len(reports)} nodes, {sum(report.gpus for report in reports)} GPUs at {address}"
    return [Finding("cluster", "ok", words), *judge(reports, settings)]


def judge(reports: Sequence[NodeReport], settings: Settings) -> list[Finding]:
    """A finding for each node, against this process's own versions, clock and folder."""
    import importlib.metadata
    import platform

    names = {name for report in reports for name in report.versions} - {"python"}
    ours = {"python": platform.python_version()}
    for name in names:
        try:
            ours[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            ours[name] = ""
    return [_judge(report, ours, settings) for report in reports]


def _judge(report: NodeReport, ours: dict[str, str], settings: Settings) -> Finding:
    name = f"node {report.name}"
    if report.error:
        return Finding(name, "failed", report.error, "see Ray's logs on that node, in /tmp/ray/session_latest/logs")
    gpus = f"{report.gpus} x {report.kind}" if report.kind else f"{report.gpus} GPUs without a kind"
    found = f"{gpus}, clock {report.skew_s:+.3f} s (within {report.uncertainty_s:.3f} s)"
    unlike = {key: (had, ours[key]) for key, had in report.versions.items() if had != ours[key] and had and ours[key]}
    if unlike:
        listed = ", ".join(f"{key} {had} (here {here})" for key, (had, here) in sorted(unlike.items()))
        return Finding(name, "failed", f"{found}; {listed}", "install the same versions on every node")
    if abs(report.skew_s) - report.uncertainty_s > _MOST_SKEW_S:
        return Finding(name, "warning", found, "synchronise its clock: chrony or systemd-timesyncd on that node")
    if not report.sees_folder:
        fix = f"{settings.home} must be the same folder on every node: a job that moves finds its checkpoint there"
        return Finding(name, "warning", f"{found}; it does not see {settings.home}", fix)
    if report.gpus and not report.kind:
        return Finding(name, "warning", found, "start Ray there with deploy/ray/node.sh, which says what its GPUs are")
    return Finding(name, "ok", found)
