"""The nodes: what was measured on each, what is in use, which jobs run there, and taking one out of service."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from markupsafe import Markup
from starlette.responses import Response
from starlette.routing import Route

from ...jobs.errors import NotFound
from ...platform import facts
from ...platform.schemas import JobView, NodeView
from ...schedulers import drawing
from ..web import Visit, page
from ..web.rendering import number, size

_METRICS = {"gpu_bytes": "GPU memory (bytes)", "tokens_per_s": "Throughput"}
_ON_NODES = ("STARTING", "RUNNING", "PAUSING", "STOPPING", "RECOVERING")
_POINTS = 200
_AT_ONCE = {
    "Host to all GPUs at once": ("all_h2d_bytes_s",),
    "All GPUs at once to host": ("all_d2h_bytes_s",),
    "Both ways at once": ("all_both_h2d_bytes_s", "all_both_d2h_bytes_s"),
}


def nodes(visit: Visit) -> Response:
    """The page."""
    found: list[NodeView] = visit.read("nodes")
    jobs: list[JobView] = visit.read("jobs", states=_ON_NODES)
    here = {node.name: [job for job in jobs if job.id in node.jobs] for node in found}
    return visit.show(
        "nodes.html",
        nodes=sorted(found, key=lambda node: (not node.alive, node.name)),
        jobs=here,
        profile={node.name: list(profile_rows(node.profile)) for node in found},
        usage={node.name: facts.node_usage(node, here[node.name]) for node in found},
        charts={node.name: _charts(visit, here[node.name]) if here[node.name] else [] for node in found},
    )


def profile_rows(profile: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What was measured, in words; nothing for a node that was not measured."""
    if not profile:
        return
    yield "GPU memory", size(profile.get("gpu_memory_bytes"))
    for dtype, rate in sorted((profile.get("matmul_flops") or {}).items()):
        yield f"{dtype} products", f"{number((rate or 0) / 1e12)} TFLOPS"
    for dtype, rate in sorted((profile.get("attention_flops") or {}).items()):
        yield f"{dtype} attention", f"{number((rate or 0) / 1e12)} TFLOPS"
    yield "Layers reach", f"{100 * (profile.get('efficiency') or 0):.0f} % of that"
    yield "Host to GPU", _rate(profile.get("h2d_bytes_s"))
    yield "GPU to host", _rate(profile.get("d2h_bytes_s"))
    yield from _copies(profile.get("copies") or ())
    yield "Host memory", size(profile.get("host_memory_bytes"))
    yield "Host memory moves", _rate(profile.get("host_bytes_s"))
    yield "CPU updates", f"{number((profile.get('update_parameters_s') or 0) / 1e6)} M parameters/s"
    if profile.get("nvme_bytes"):
        yield "NVMe", size(profile["nvme_bytes"])
        yield "NVMe reads", _rate(profile.get("nvme_read_bytes_s"))
        yield "NVMe writes", _rate(profile.get("nvme_write_bytes_s"))


def _copies(copies: Sequence[Mapping[str, float]]) -> Iterator[tuple[str, str]]:
    """What all GPUs of the node reach together while all of them copy, where there are several."""
    if len(copies) < 2:
        return
    for words, fields in _AT_ONCE.items():
        yield words, _rate(sum(each[field] for each in copies for field in fields))


def _rate(value: float | None) -> str:
    return "–" if value is None else f"{value / 1e9:.3g} GB/s"


def _charts(visit: Visit, jobs: list[JobView]) -> list[Markup]:
    """For the GPUs that jobs have, their memory and their speed over the steps, one line a GPU."""
    labels = {job.id: f"GPU {job.gpu or '?'}: {job.name}" for job in jobs}
    series = visit.once(
        ("gpus", *labels), lambda: facts.run_series(visit.client, labels, _METRICS, points=_POINTS), fresh_s=5.0
    )
    named = (replace(plot, title=_METRICS[name]) for name, plot in series.items())
    return [Markup(drawing.draw_series(plot)) for plot in named if plot.lines]


def change(visit: Visit) -> Response:
    """Take a node out of service, take it back, or have it measured again."""
    name, action = visit.request.path_params["node"], visit.request.path_params["action"]
    if action == "measure":
        visit.client.measure_again(name)
        said = f"{name} is measured as soon as nothing runs there."
    elif action == "drain":
        visit.client.drain(name, True, visit.form.get("reason", "").strip()[:500])
        said = f"{name} takes no new jobs; what runs there goes on."
    elif action == "return":
        visit.client.drain(name, False)
        said = f"{name} takes jobs again."
    else:
        raise NotFound(f"a node cannot be told to {action}")
    return visit.done(said, "/nodes")


routes = [
    Route("/nodes", page(nodes)),
    Route("/nodes/{node}/{action}", page(change), methods=["POST"]),
]
