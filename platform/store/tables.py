"""The tables. Times are Unix seconds, states and reasons are words, values that nobody searches are JSON."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, BigInteger, Float, ForeignKey, Index, Integer, MetaData, String, Text, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
}
_Serial = BigInteger().with_variant(Integer, "sqlite")
"""SQLite counts up only columns that are called INTEGER."""


class Table(DeclarativeBase):
    """Base of all tables; constraints have names, so that migrations can change them."""

    metadata = MetaData(naming_convention=NAMING)
    type_annotation_map = {  # noqa: RUF012
        str: Text,
        float: Float(53),
        dict[str, Any]: JSON,
        list[str]: JSON,
        list[dict[str, Any]]: JSON,
    }


class UserRow(Table):
    """Somebody who may use the service."""

    __tablename__ = "users"

    name: Mapped[str] = mapped_column(String(100), primary_key=True)
    role: Mapped[str] = mapped_column(String(20))
    created_at: Mapped[float]


class TokenRow(Table):
    """A token, as its SHA-256: whoever reads the database cannot use it."""

    __tablename__ = "tokens"

    digest: Mapped[str] = mapped_column(String(64), primary_key=True)
    user: Mapped[str] = mapped_column(ForeignKey("users.name", ondelete="CASCADE"))
    label: Mapped[str] = mapped_column(String(100), default="")
    created_at: Mapped[float]
    revoked_at: Mapped[float | None]


class JobRow(Table):
    """One job: what was asked for, and what became of it so far."""

    __tablename__ = "jobs"
    __table_args__ = (
        UniqueConstraint("user", "idempotency_key"),
        Index(None, "state"),
        Index(None, "user", "created_at"),
    )

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    user: Mapped[str] = mapped_column(ForeignKey("users.name"))
    name: Mapped[str] = mapped_column(String(100))
    spec: Mapped[dict[str, Any]]
    run_dir: Mapped[str]
    state: Mapped[str] = mapped_column(String(20))
    reason: Mapped[str] = mapped_column(String(40))
    sentence: Mapped[str]
    priority: Mapped[int]
    after: Mapped[list[str]]
    continues: Mapped[str | None] = mapped_column(String(40))
    created_at: Mapped[float]
    updated_at: Mapped[float]
    queued_at: Mapped[float]
    started_at: Mapped[float | None]
    ended_at: Mapped[float | None]
    not_before: Mapped[float] = mapped_column(default=0.0)
    version: Mapped[int] = mapped_column(default=1)
    attempt: Mapped[int] = mapped_column(default=0)
    claim: Mapped[str | None] = mapped_column(String(40))
    node: Mapped[str | None] = mapped_column(String(100))
    gpu: Mapped[str | None] = mapped_column(String(100))
    last_gpu: Mapped[str | None] = mapped_column(String(100))
    infra_failures: Mapped[int] = mapped_column(default=0)
    user_failures: Mapped[int] = mapped_column(default=0)
    replans: Mapped[int] = mapped_column(default=0)
    preemptions: Mapped[int] = mapped_column(default=0)
    avoid: Mapped[list[str]]
    outcome: Mapped[dict[str, Any]]
    removed_at: Mapped[float | None]
    idempotency_key: Mapped[str | None] = mapped_column(String(200))
    body_digest: Mapped[str] = mapped_column(String(64), default="")


class RequestRow(Table):
    """What somebody wants to happen to a job; the controller does it or says why not."""

    __tablename__ = "requests"
    __table_args__ = (Index(None, "done_at"),)

    id: Mapped[int] = mapped_column(_Serial, primary_key=True)
    job: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    user: Mapped[str] = mapped_column(String(100))
    action: Mapped[str] = mapped_column(String(20))
    argument: Mapped[dict[str, Any]]
    created_at: Mapped[float]
    done_at: Mapped[float | None]
    answer: Mapped[str] = mapped_column(default="")


class EventRow(Table):
    """Something that happened to a job; only ever added."""

    __tablename__ = "events"
    __table_args__ = (Index(None, "job", "id"), Index(None, "time"))

    id: Mapped[int] = mapped_column(_Serial, primary_key=True)
    job: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    time: Mapped[float]
    kind: Mapped[str] = mapped_column(String(20))
    state: Mapped[str] = mapped_column(String(20))
    reason: Mapped[str] = mapped_column(String(40))
    sentence: Mapped[str]
    data: Mapped[dict[str, Any]]


class StageRow(Table):
    """A stage of a job that is done, with what it found: it is never done again."""

    __tablename__ = "stages"

    job: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    name: Mapped[str] = mapped_column(String(40), primary_key=True)
    done_at: Mapped[float]
    output: Mapped[dict[str, Any]]


class NodeRow(Table):
    """A machine that was seen at least once."""

    __tablename__ = "nodes"

    name: Mapped[str] = mapped_column(String(100), primary_key=True)
    address: Mapped[str]
    kind: Mapped[str] = mapped_column(String(100))
    device: Mapped[str] = mapped_column(String(20))
    cpus: Mapped[float]
    gpus: Mapped[float]
    alive: Mapped[bool]
    drained: Mapped[bool] = mapped_column(default=False)
    reason: Mapped[str] = mapped_column(default="")
    faults: Mapped[int] = mapped_column(default=0)
    seen_at: Mapped[float]
    profile: Mapped[dict[str, Any]]
    problem: Mapped[str] = mapped_column(default="")
    checked: Mapped[dict[str, Any]]
    devices: Mapped[list[dict[str, Any]]]


class AuditRow(Table):
    """A change that somebody asked for, and how it was answered."""

    __tablename__ = "audit"

    id: Mapped[int] = mapped_column(_Serial, primary_key=True)
    time: Mapped[float]
    user: Mapped[str] = mapped_column(String(100))
    remote: Mapped[str] = mapped_column(String(100))
    method: Mapped[str] = mapped_column(String(10))
    path: Mapped[str] = mapped_column(String(300))
    status: Mapped[int]


class LeaseRow(Table):
    """Who may do what only one may do; ``epoch`` grows with every new owner."""

    __tablename__ = "leases"

    name: Mapped[str] = mapped_column(String(40), primary_key=True)
    owner: Mapped[str] = mapped_column(String(100))
    epoch: Mapped[int]
    expires_at: Mapped[float]


class ForecastRow(Table):
    """What placement expects, as it said last."""

    __tablename__ = "forecasts"

    name: Mapped[str] = mapped_column(String(40), primary_key=True)
    at: Mapped[float]
    content: Mapped[dict[str, Any]]
