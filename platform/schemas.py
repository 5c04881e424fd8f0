"""What travels between the API and its clients."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue

from ..jobs.units import MOST_ROWS, MOST_TOKENS

JobId = Annotated[str, Field(pattern=r"^j-[0-9a-f]{10}$")]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
RoleName = Literal["viewer", "submitter", "admin"]
MOST_IDS = 10_000

_NOT_TEXT = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")


def _printable(value: JsonValue) -> JsonValue:
    """Refuse control characters, and halves of characters, anywhere in a JSON value: no database or file takes them."""
    if isinstance(value, str) and _NOT_TEXT.search(value):
        raise ValueError("text must not hold control characters")
    if isinstance(value, dict):
        for key, inner in value.items():
            _printable(key)
            _printable(inner)
    if isinstance(value, list):
        for inner in value:
            _printable(inner)
    return value


JsonObject = Annotated[dict[str, JsonValue], AfterValidator(_printable)]
Sentence = Annotated[str, Field(max_length=500), AfterValidator(_printable)]


_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]

Amount = Annotated[str, Field(max_length=40, pattern=r"^[0-9.]+ ?[A-Za-z]*$")]
"""An amount of memory, such as ``70GB``."""


class Asked(BaseModel):
    """A request: unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Answered(BaseModel):
    """A response: keys of a newer server are ignored."""

    model_config = ConfigDict(extra="ignore")


class Submission(Asked):
    """A job to run."""

    spec: JsonObject
    """The job file, resolved: absolute paths, or names on the hub."""
    after: Annotated[list[JobId], Field(max_length=100)] = []
    """Jobs that have to succeed first."""


class PriorityChange(Asked):
    """A new priority."""

    priority: Annotated[int, Field(ge=0, le=100)]


class StopMany(Asked):
    """Jobs to stop in one go."""

    ids: Annotated[list[JobId], Field(max_length=MOST_IDS)] = []
    all: bool = False
    """All jobs that the user may stop, instead of ``ids``."""


class Draining(Asked):
    """Whether a node takes new jobs."""

    drained: bool
    reason: Sentence = ""


class UserChange(Asked):
    """What a user may do."""

    role: RoleName


class PlanQuestion(Asked):
    """A job file to plan for the nodes of the cluster, without running it."""

    spec: JsonObject


class ShapeQuestion(Asked):
    """A model and a machine to plan for, without a job."""

    model: Annotated[str, Field(min_length=1, max_length=4096)]
    """Shape that is known by name, hub id, or folder below the allowed ones."""
    gpu: Annotated[str, Field(min_length=1, max_length=100)]
    """Kind of a node here, whose measured profile is taken, or any GPU that is known by name."""
    batch: Annotated[int, Field(ge=1, le=MOST_ROWS)]
    """Rows of one micro-batch."""
    length: Annotated[int, Field(ge=2, le=MOST_TOKENS)] = 1024
    """Tokens of one row."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    planner: Literal["full", "paper", "megatrain", "every_layer", "keep_all"] = "full"
    gpu_memory: Amount | None = None
    host_memory: Amount | None = None
    nvme: Amount | None = None
    solve_seconds: Annotated[float, Field(gt=0, le=60)] = 10.0


class ShapeAnswer(Answered):
    """The plan of a shape; ``plan`` is what ``lazytrain plan --json`` prints."""

    feasible: bool
    plan: dict[str, Any]
    model: dict[str, Any]
    """Architecture, parameters, layers."""
    machine: dict[str, Any]
    """Profile that was planned with."""
    timeline: dict[str, Any] | None = None


class Progress(Answered):
    """How far a run is."""

    step: int = 0
    total_steps: int = 0
    step_s: float = 0.0
    """Median seconds of a step."""
    tokens_per_s: float | None = None
    """Of the last step."""
    predicted_step_s: float | None = None
    loss: float | None = None
    gpu_bytes: float | None = None
    """Highest use of the GPU's memory."""


class Calibration(Answered):
    """How far off the predicted step time was, and is once the machine's profile is fitted to measured steps."""

    steps: int
    """How many were measured."""
    measured_s: _Seconds
    """Their median."""
    predicted_s: _Seconds
    """What was predicted before."""
    calibrated_s: _Seconds
    """What is predicted since."""
    sentence: Sentence
    """For people."""


class JobView(Answered):
    """A job as its owner sees it. Times are Unix seconds."""

    id: str
    name: str
    user: str
    state: str
    reason: str
    """For programs."""
    sentence: str
    """For people: why it waits, what it does, how it ended."""
    priority: int
    after: list[str] = []
    node: str | None = None
    gpu: str | None = None
    """Which GPU of the node."""
    attempt: int = 0
    created_at: float
    queued_at: float
    started_at: float | None = None
    ended_at: float | None = None
    run_dir: str
    progress: Progress | None = None
    calibration: Calibration | None = None
    """Only where one job is asked for, and only once some of its steps were measured."""
    infra_failures: int = 0
    user_failures: int = 0
    preemptions: int = 0
    outcome: dict[str, Any] = {}
    """How the last attempt ended: code, message, hint, exit code or signal, last step."""
    spec: dict[str, Any] | None = None
    """Only where one job is asked for."""
    mlflow_run: str | None = None
    """Its run in MLflow; only where one job is asked for."""
    mlflow_url: str | None = None
    """Page of that run, where MLflow's pages are served."""


class JobPage(Answered):
    """Some jobs, newest first."""

    jobs: list[JobView]
    next: str | None = None
    """Value of ``before`` for the next page; null on the last."""


class Accepted(Answered):
    """The controller will do it; ``GET /requests/{id}`` says what became of it."""

    requests: list[int]


class RequestAnswer(Answered):
    """What became of a request."""

    done: bool
    answer: str = ""
    """Empty if it was done, else why not."""


class LogPart(Answered):
    """A part of what a run printed."""

    text: str
    offset: int
    """Where the next part begins, in bytes."""
    attempt: int


class MetricsPart(Answered):
    """Rows of the metric log, in order; a value that was not finite is null."""

    rows: list[dict[str, Any]]
    offset: int


class SeriesView(Answered):
    """One metric of a job, thinned; ``values`` are null where they were not finite."""

    steps: list[int]
    values: list[float | None]
    count: int
    """How many values the log holds."""


class SeriesAnswer(Answered):
    """Metrics by name; those that were never reported are left out."""

    series: dict[str, SeriesView]


class EventView(Answered):
    """Something that happened to a job."""

    id: int
    time: float
    kind: str
    state: str
    reason: str
    sentence: str


class EventPage(Answered):
    """Events, oldest first."""

    events: list[EventView]


class CheckpointView(Answered):
    """A checkpoint of a job."""

    name: str
    step: int
    complete: bool


class CheckpointPage(Answered):
    """Checkpoints, by step."""

    checkpoints: list[CheckpointView]
    next: int | None = None


class NodeView(Answered):
    """A node of the cluster."""

    name: str
    address: str
    kind: str
    device: str
    cpus: float
    gpus: float
    alive: bool
    drained: bool
    reason: str
    faults: int
    seen_at: float
    measured: bool
    """Whether its profile is up to date: else it is measured as soon as nothing runs there."""
    busy: int = 0
    """Jobs that run there, whosoever they are."""
    held_host_bytes: int = 0
    """Host memory that the plans of these jobs use."""
    held_nvme_bytes: int = 0
    jobs: list[str] = []
    """Jobs that run there, of those that the user may see."""
    profile: dict[str, Any] = {}
    problem: str = ""
    """Why no job starts there: what a check of its software, its folder and its GPUs has found."""
    checked: dict[str, Any] = {}
    """Versions, whether it sees the head's folder, and in ``warning`` what differs and does no harm."""
    devices: list[dict[str, Any]] = []
    """Its GPUs by identity, with what uses them from outside in ``busy``."""


class NodePage(Answered):
    """All nodes."""

    nodes: list[NodeView]


class QueueEntry(Answered):
    """A job in the queue; of somebody else's job only that it is there."""

    id: str | None
    user: str | None
    state: str
    priority: int
    reason: str
    sentence: str
    queued_at: float
    name: str | None = None
    node: str | None = None
    started_at: float | None = None
    attempt: int = 0
    expected_start: float | None = None
    """When placement expects it to run, in Unix seconds; null where nobody can say."""
    expected_end: float | None = None
    progress: Progress | None = None


class QueueView(Answered):
    """Who waits, highest priority first, and who runs."""

    waiting: list[QueueEntry]
    running: list[QueueEntry]


class PlanWay(Answered):
    """How the job would run on one kind of node."""

    tokens_per_s: float
    seconds: float
    host_bytes: int
    nvme_bytes: int
    policy: dict[str, Any]


class PlanAnswer(Answered):
    """Where a job fits."""

    feasible: bool
    batch: int = 0
    steps: int = 0
    ways: dict[str, PlanWay] = {}
    limits: dict[str, str] = {}
    """By kind of node, why it does not fit there."""
    reasons: list[dict[str, Any]] = []
    notes: list[str] = []
    """What the person should know of its rows, and of the model at their length."""


class Health(Answered):
    """Whether the service works."""

    status: Literal["ok", "degraded"]
    version: str
    database: str
    leader: str | None
    """The controller that leads; without one, nothing is started or ended."""
    nodes: int
    jobs: dict[str, int]


class UserView(Answered):
    """A user."""

    name: str
    role: RoleName


class UserPage(Answered):
    """All users."""

    users: list[UserView]


class NewToken(Answered):
    """A token, shown this once."""

    user: str
    token: str


class ErrorBody(Answered):
    """What went wrong."""

    code: str
    message: str
    hint: str = ""
    field: str = ""


class ErrorAnswer(Answered):
    """The body of every answer that is no success."""

    error: ErrorBody
