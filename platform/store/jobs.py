"""Jobs, what is asked of them, what happened to them. Every state change is a compare-and-set in one short transaction.

A job's state is changed by one process only: the one that holds the lease it names. Everybody else files requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, exists, func, insert, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session, defer

from ...jobs.errors import Conflict, NotFound
from ...jobs.lifecycle import JobState, may_become
from .database import Database
from .records import Action, Change, Event, Job, Lease, NewJob, Request
from .tables import EventRow, JobRow, LeaseRow, RequestRow, StageRow

_HIDDEN = {"idempotency_key", "body_digest"}
_MOST_IN = 10_000
"""Values of one statement: SQLite takes 32,766, PostgreSQL twice as many."""


class Stale(Conflict):
    """The job was changed since it was read, or the lease has passed to somebody else."""

    code = "stale"


@dataclass(frozen=True)
class Move:
    """A job's next state, and why: ``reason`` for programs, ``sentence`` for people."""

    to: JobState
    reason: str
    sentence: str


class JobStore:
    """Jobs in a database. Times are given by the caller, in Unix seconds."""

    def __init__(self, database: Database) -> None:
        self._db = database

    # ---- anybody

    def create(self, new: NewJob, now: float) -> tuple[Job, bool]:
        """Add a queued job; True with it when it is new.

        The same user's same key with the same body gives the job that is there already; Conflict with another body.
        """
        try:
            with self._db.write() as session:
                found = _by_key(session, new)
                if found is not None:
                    return found, False
                session.add(_row(new, now))
                session.flush()
                _add_event(session, new.id, now, "state", JobState.QUEUED, "admission", new.sentence)
        except IntegrityError:
            # Another process was faster with the same key.
            with self._db.read() as session:
                found = _by_key(session, new)
            if found is None:
                raise
            return found, False
        return self.get(new.id), True

    def get(self, job_id: str) -> Job:
        """The job. Raises NotFound."""
        with self._db.read() as session:
            return _job(_load(session, job_id))

    def list(
        self,
        *,
        states: Iterable[JobState] | None = None,
        user: str | None = None,
        ids: Iterable[str] | None = None,
        limit: int | None = None,
        before: tuple[float, str] | None = None,
        removed: bool = False,
        specs: bool = True,
    ) -> Sequence[Job]:
        """Jobs, newest first; those that were removed only if asked for.

        ``before`` is ``(created_at, id)`` of the last one already seen. Without ``specs`` that field is empty:
        thousands of job files take seconds to read.
        """
        if ids is not None and len(parts := _parts(ids)) > 1:
            options: dict[str, Any] = {"states": states, "user": user, "limit": limit, "before": before}
            found = [job for part in parts for job in self.list(ids=part, removed=removed, specs=specs, **options)]
            return sorted(found, key=lambda job: (job.created_at, job.id), reverse=True)[:limit]
        query = select(JobRow) if removed else select(JobRow).where(JobRow.removed_at.is_(None))
        if not specs:
            query = query.options(defer(JobRow.spec, raiseload=True))
        if states is not None:
            query = query.where(JobRow.state.in_([state.value for state in states]))
        if user is not None:
            query = query.where(JobRow.user == user)
        if ids is not None:
            query = query.where(JobRow.id.in_(list(ids)))
        if before is not None:
            at, job_id = before
            query = query.where((JobRow.created_at < at) | ((JobRow.created_at == at) & (JobRow.id < job_id)))
        with self._db.read() as session:
            rows = session.scalars(query.order_by(JobRow.created_at.desc(), JobRow.id.desc()).limit(limit))
            return [_job(row, spec=specs) for row in rows]

    def count(self, *, user: str | None = None) -> dict[JobState, int]:
        """How many jobs there are in each state."""
        query = select(JobRow.state, func.count()).where(JobRow.removed_at.is_(None)).group_by(JobRow.state)
        if user is not None:
            query = query.where(JobRow.user == user)
        with self._db.read() as session:
            return {JobState(state): count for state, count in session.execute(query)}

    def failures(self) -> dict[str, int]:
        """How many jobs have failed for each reason, also those that were removed."""
        query = select(JobRow.reason, func.count()).where(JobRow.state == JobState.FAILED.value)
        with self._db.read() as session:
            return dict(session.execute(query.group_by(JobRow.reason)).tuples().all())

    def ask(self, job_ids: Iterable[str], user: str, action: Action, now: float, **argument: Any) -> Sequence[int]:
        """File the same request for each job, in one transaction; their numbers."""
        rows = [
            RequestRow(job=job_id, user=user, action=action.value, argument=argument, created_at=now)
            for job_id in job_ids
        ]
        with self._db.write() as session:
            session.add_all(rows)
            session.flush()
            return [row.id for row in rows]

    def answer_to(self, request: int, *, user: str | None = None) -> str | None:
        """What became of a request; None while it waits, empty when it was done.

        Raises NotFound, with ``user`` also for one that somebody else has made about somebody else's job.
        """
        with self._db.read() as session:
            row = session.get(RequestRow, request)
            if row is None or (user not in (None, row.user) and user != _load(session, row.job).user):
                raise NotFound(f"there is no request {request}")
            return row.answer if row.done_at is not None else None

    def events(self, job_id: str, *, since: int = 0, limit: int | None = None) -> Sequence[Event]:
        """What happened to a job after event ``since``, oldest first."""
        query = select(EventRow).where(EventRow.job == job_id, EventRow.id > since).order_by(EventRow.id).limit(limit)
        with self._db.read() as session:
            return [_event(row) for row in session.scalars(query)]

    def stages(self, job_id: str) -> dict[str, Mapping[str, Any]]:
        """The stages that are done, with what they found."""
        with self._db.read() as session:
            rows = session.scalars(select(StageRow).where(StageRow.job == job_id))
            return {row.name: row.output for row in rows}

    def stages_of(self, job_ids: Iterable[str], name: str) -> dict[str, Mapping[str, Any]]:
        """What the stage ``name`` found, for each of the jobs that have it done."""
        query = select(StageRow).where(StageRow.name == name)
        with self._db.read() as session:
            found = (session.scalars(query.where(StageRow.job.in_(part))) for part in _parts(job_ids))
            return {row.job: row.output for rows in found for row in rows}

    def stage_times(self, job_ids: Iterable[str], name: str) -> dict[str, float]:
        """When the stage ``name`` was done, for each of the jobs that have it done."""
        query = select(StageRow.job, StageRow.done_at).where(StageRow.name == name)
        with self._db.read() as session:
            found = (session.execute(query.where(StageRow.job.in_(part))) for part in _parts(job_ids))
            return {row.job: row.done_at for rows in found for row in rows}

    def changes(self, since: float) -> Sequence[Change]:
        """Every change of a state at or after ``since``, of all jobs, in the order in which they happened."""
        query = (
            select(EventRow.job, JobRow.user, EventRow.time, EventRow.state)
            .join(JobRow, JobRow.id == EventRow.job)
            .where(EventRow.kind == "state", EventRow.time >= since)
            .order_by(EventRow.id)
        )
        with self._db.read() as session:
            return [Change(job, user, time, JobState(state)) for job, user, time, state in session.execute(query)]

    # ---- the controller

    def requests(self) -> Sequence[Request]:
        """What was asked for and not answered, in the order of asking."""
        query = select(RequestRow).where(RequestRow.done_at.is_(None)).order_by(RequestRow.id)
        with self._db.read() as session:
            return [
                Request(row.id, row.job, row.user, Action(row.action), row.argument, row.created_at)
                for row in session.scalars(query)
            ]

    def answer(self, request: int, now: float, text: str = "") -> None:
        """Close a request; ``text`` says why it was not done."""
        self.answer_all({request: text}, now)

    def answer_all(self, answers: Mapping[int, str], now: float) -> None:
        """Close several requests in one transaction."""
        rows = [{"id": request, "done_at": now, "answer": text} for request, text in answers.items()]
        if rows:
            with self._db.write() as session:
                session.execute(update(RequestRow), rows)

    def move(self, job: Job, move: Move, now: float, lease: Lease, **changes: Any) -> Job:
        """Change a job's state, and fields of `Job` with it.

        Raises Stale when the job is not what ``job`` says any more or the lease is lost, Conflict for a move that
        `jobs.lifecycle` does not allow.
        """
        if not may_become(job.state, move.to):
            raise Conflict(f"job {job.id} is {job.state.value} and cannot become {move.to.value}")
        times: dict[str, Any] = {"ended_at": now} if move.to.final else {}
        values = {"state": move.to.value, "reason": move.reason, "sentence": move.sentence, **times, **changes}
        return self._change(job, values, now, lease, ("state", move.to, move.reason, move.sentence))

    def annotate(self, job: Job, now: float, lease: Lease, **changes: Any) -> Job:
        """Change fields of a job whose state stays; Stale as for `move`. A new ``reason`` becomes an event."""
        told = None
        if changes.get("reason", job.reason) != job.reason:
            told = ("note", job.state, changes["reason"], changes.get("sentence", job.sentence))
        return self._change(job, changes, now, lease, told)

    def finish_stage(
        self, job: Job, name: str, output: Mapping[str, Any], now: float, lease: Lease, *, again: bool = False
    ) -> None:
        """Record a stage as done; unless ``again``, one that is done already stays as it is.

        Raises Stale when the lease is lost.
        """
        with self._db.write() as session:
            _require_lease(session, lease)
            row = session.get(StageRow, (job.id, name))
            if row is not None and not again:
                return
            if row is not None:
                row.done_at, row.output = now, dict(output)
            else:
                session.add(StageRow(job=job.id, name=name, done_at=now, output=dict(output)))
            _add_event(session, job.id, now, "stage", job.state, name, f"stage {name} is done")

    def forget_stage(self, job: Job, name: str, lease: Lease) -> None:
        """A stage has to be done again."""
        with self._db.write() as session:
            _require_lease(session, lease)
            row = session.get(StageRow, (job.id, name))
            if row is not None:
                session.delete(row)

    def _change(
        self,
        job: Job,
        values: Mapping[str, Any],
        now: float,
        lease: Lease,
        told: tuple[str, JobState, str, str] | None,
    ) -> Job:
        stored = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        guard = (JobRow.id == job.id, JobRow.version == job.version, JobRow.state == job.state.value, _holds(lease))
        with self._db.write() as session:
            changed = session.execute(
                update(JobRow).where(*guard).values(updated_at=now, version=job.version + 1, **stored)
            )
            if changed.rowcount != 1:  # type: ignore[attr-defined]
                raise Stale(f"job {job.id} was changed by somebody else, or this controller leads no more")
            if told is not None:
                kind, state, reason, sentence = told
                _add_event(session, job.id, now, kind, state, reason, sentence, values.get("outcome"))
            return _job(_load(session, job.id))


def _parts(ids: Iterable[str]) -> list[list[str]]:
    """The ids in parts that fit into one statement; at least one part."""
    every = list(ids)
    return [every[start : start + _MOST_IN] for start in range(0, len(every), _MOST_IN)] or [[]]


def _row(new: NewJob, now: float) -> JobRow:
    return JobRow(
        id=new.id,
        user=new.user,
        name=new.name,
        spec=dict(new.spec),
        run_dir=new.run_dir,
        state=JobState.QUEUED.value,
        reason="admission",
        sentence=new.sentence,
        priority=new.priority,
        after=list(new.after),
        continues=new.continues,
        created_at=now,
        updated_at=now,
        queued_at=now,
        idempotency_key=new.idempotency_key,
        body_digest=new.body_digest,
        avoid=[],
        outcome={},
    )


def _by_key(session: Session, new: NewJob) -> Job | None:
    if new.idempotency_key is None:
        return None
    query = select(JobRow).where(JobRow.user == new.user, JobRow.idempotency_key == new.idempotency_key)
    row = session.scalars(query).one_or_none()
    if row is None:
        return None
    if row.body_digest != new.body_digest:
        raise Conflict(
            f"the key {new.idempotency_key!r} was used for another job, {row.id}",
            hint="use a new key for every new job, and the same one only to send the same job again",
        )
    return _job(row)


def _load(session: Session, job_id: str) -> JobRow:
    row = session.get(JobRow, job_id, populate_existing=True)
    if row is None:
        raise NotFound(f"there is no job {job_id}", hint="lazytrain ps lists the jobs")
    return row


def _holds(lease: Lease) -> ColumnElement[bool]:
    return exists().where(LeaseRow.name == lease.name, LeaseRow.owner == lease.owner, LeaseRow.epoch == lease.epoch)


def _require_lease(session: Session, lease: Lease) -> None:
    if not session.scalar(select(_holds(lease))):
        raise Stale("this controller leads no more")


def _add_event(
    session: Session,
    job_id: str,
    now: float,
    kind: str,
    state: JobState,
    reason: str,
    sentence: str,
    data: Mapping[str, Any] | None = None,
) -> None:
    values = {"job": job_id, "time": now, "kind": kind, "state": state.value, "reason": reason, "sentence": sentence}
    session.execute(insert(EventRow).values(**values, data=dict(data or {})))


def _job(row: JobRow, *, spec: bool = True) -> Job:
    left_out = _HIDDEN if spec else {*_HIDDEN, "spec"}
    names = (column.name for column in JobRow.__table__.columns if column.name not in left_out)
    fields: dict[str, Any] = {"spec": {}, **{name: getattr(row, name) for name in names}}
    fields["state"] = JobState(row.state)
    fields["after"], fields["avoid"] = tuple(row.after), tuple(row.avoid)
    return Job(**fields)


def _event(row: EventRow) -> Event:
    return Event(row.id, row.job, row.time, row.kind, row.state, row.reason, row.sentence, row.data)
