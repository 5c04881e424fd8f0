"""The contract of the job store, on both databases."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from lazytrain.jobs.errors import Conflict, NotFound
from lazytrain.jobs.lifecycle import JobState
from lazytrain.platform.store import Action, Lease, Move, NewJob, Role, Stale, Store, jobs

Make = Callable[..., NewJob]
START = Move(JobState.STARTING, "starting", "starts on a")


def test_what_is_created_comes_back(store: Store, new_job: Make) -> None:
    new = new_job(after=("j-1",), priority=7, sentence="waits to be looked at")
    job, is_new = store.jobs.create(new, 5.0)
    assert is_new
    assert job == store.jobs.get(new.id)
    assert (job.state, job.priority, job.after, job.created_at) == (JobState.QUEUED, 7, ("j-1",), 5.0)
    assert job.spec == {"name": "tiny"}
    (event,) = store.jobs.events(job.id)
    assert (event.state, event.sentence) == ("QUEUED", "waits to be looked at")


def test_an_unknown_job(store: Store) -> None:
    with pytest.raises(NotFound, match="j-none"):
        store.jobs.get("j-none")


def test_twenty_threads_with_one_key_make_one_job(store: Store, new_job: Make) -> None:
    with ThreadPoolExecutor(20) as threads:
        made = list(
            threads.map(lambda _: store.jobs.create(new_job(idempotency_key="k", body_digest="b"), 1.0), range(20))
        )
    assert len({job.id for job, _ in made}) == 1
    assert [is_new for _, is_new in made].count(True) == 1
    assert len(store.jobs.list()) == 1


def test_the_same_key_with_another_body_is_a_conflict(store: Store, new_job: Make) -> None:
    job, _ = store.jobs.create(new_job(idempotency_key="k", body_digest="b"), 1.0)
    with pytest.raises(Conflict, match=job.id):
        store.jobs.create(new_job(idempotency_key="k", body_digest="other"), 2.0)


def test_keys_are_the_users_own(store: Store, new_job: Make) -> None:
    store.people.add("ben", Role.SUBMITTER, 0.0)
    first, _ = store.jobs.create(new_job(idempotency_key="k", body_digest="b"), 1.0)
    second, is_new = store.jobs.create(new_job(user="ben", idempotency_key="k", body_digest="c"), 1.0)
    assert is_new
    assert second.id != first.id


def test_a_move_changes_state_and_fields_and_is_told(store: Store, lease: Lease, new_job: Make) -> None:
    job, _ = store.jobs.create(new_job(), 1.0)
    moved = store.jobs.move(job, START, 2.0, lease, attempt=1, claim="c", node="a")
    assert (moved.state, moved.reason, moved.attempt, moved.claim) == (JobState.STARTING, "starting", 1, "c")
    assert moved.version == job.version + 1
    assert [event.state for event in store.jobs.events(job.id)] == ["QUEUED", "STARTING"]
    assert store.jobs.get(job.id) == moved


def test_of_two_moves_from_one_reading_one_counts(store: Store, lease: Lease, new_job: Make) -> None:
    job, _ = store.jobs.create(new_job(), 1.0)
    store.jobs.move(job, START, 2.0, lease)
    with pytest.raises(Stale):
        store.jobs.move(job, Move(JobState.STOPPED, "stopped", "x"), 3.0, lease)
    assert store.jobs.get(job.id).state is JobState.STARTING
    assert len(store.jobs.events(job.id)) == 2


def test_threads_that_move_one_job_at_once(store: Store, lease: Lease, new_job: Make) -> None:
    job, _ = store.jobs.create(new_job(), 1.0)

    def move(_: int) -> bool:
        try:
            store.jobs.move(job, START, 2.0, lease)
        except Stale:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(move, range(8))).count(True) == 1


def test_a_move_that_the_lifecycle_forbids(store: Store, lease: Lease, new_job: Make) -> None:
    job, _ = store.jobs.create(new_job(), 1.0)
    with pytest.raises(Conflict, match="QUEUED and cannot become SUCCEEDED"):
        store.jobs.move(job, Move(JobState.SUCCEEDED, "done", "x"), 2.0, lease)
    stopped = store.jobs.move(job, Move(JobState.STOPPED, "stopped", "x"), 2.0, lease)
    assert stopped.ended_at == 2.0
    with pytest.raises(Conflict):
        store.jobs.move(stopped, START, 3.0, lease)


def test_a_controller_that_lost_its_lease_changes_nothing(store: Store, new_job: Make) -> None:
    old = store.leases.take("controller", "one", 0.0, 10.0)
    assert old is not None
    job, _ = store.jobs.create(new_job(), 1.0)
    assert store.leases.take("controller", "two", 20.0, 10.0) is not None
    for change in (
        lambda: store.jobs.move(job, START, 21.0, old),
        lambda: store.jobs.annotate(job, 21.0, old, sentence="x"),
        lambda: store.jobs.finish_stage(job, "plan", {}, 21.0, old),
    ):
        with pytest.raises(Stale):
            change()
    assert store.jobs.get(job.id) == job


def test_a_new_reason_is_told_and_other_words_for_it_are_not(store: Store, lease: Lease, new_job: Make) -> None:
    job, _ = store.jobs.create(new_job(sentence="first"), 1.0)
    job = store.jobs.annotate(job, 2.0, lease, sentence="waits for a GPU", reason="no_room")
    job = store.jobs.annotate(job, 3.0, lease, sentence="waits for a GPU until 12:30", reason="no_room", priority=9)
    assert (job.priority, job.sentence) == (9, "waits for a GPU until 12:30")
    assert [event.sentence for event in store.jobs.events(job.id)] == ["first", "waits for a GPU"]


def test_a_stage_is_done_once(store: Store, lease: Lease, new_job: Make) -> None:
    job, _ = store.jobs.create(new_job(), 1.0)
    store.jobs.finish_stage(job, "plan", {"policy": 1}, 2.0, lease)
    store.jobs.finish_stage(job, "plan", {"policy": 2}, 3.0, lease)
    assert store.jobs.stages(job.id) == {"plan": {"policy": 1}}
    assert store.jobs.stages_of([job.id, "j-x"], "plan") == {job.id: {"policy": 1}}
    store.jobs.forget_stage(job, "plan", lease)
    assert store.jobs.stages(job.id) == {}


def test_requests_wait_until_they_are_answered(store: Store, new_job: Make) -> None:
    job, _ = store.jobs.create(new_job(), 1.0)
    first, second = store.jobs.ask([job.id, job.id], "ada", Action.SET, 2.0, priority=3)
    assert [(r.id, r.action, r.argument) for r in store.jobs.requests()] == [
        (first, Action.SET, {"priority": 3}),
        (second, Action.SET, {"priority": 3}),
    ]
    assert store.jobs.answer_to(first) is None
    store.jobs.answer(first, 3.0)
    store.jobs.answer(second, 3.0, "too late")
    assert (store.jobs.answer_to(first), store.jobs.answer_to(second)) == ("", "too late")
    assert store.jobs.requests() == []


def test_lists_are_newest_first_and_filtered(store: Store, lease: Lease, new_job: Make) -> None:
    store.people.add("ben", Role.SUBMITTER, 0.0)
    jobs = [store.jobs.create(new_job(user=user), float(at))[0] for at, user in enumerate(["ada", "ben", "ada"])]
    assert [job.id for job in store.jobs.list()] == [job.id for job in reversed(jobs)]
    assert [job.id for job in store.jobs.list(user="ada")] == [jobs[2].id, jobs[0].id]
    assert [job.id for job in store.jobs.list(limit=1)] == [jobs[2].id]
    assert [job.id for job in store.jobs.list(before=(2.0, jobs[2].id))] == [jobs[1].id, jobs[0].id]
    store.jobs.move(jobs[0], START, 9.0, lease)
    assert [job.id for job in store.jobs.list(states=[JobState.STARTING])] == [jobs[0].id]
    assert store.jobs.count() == {JobState.QUEUED: 2, JobState.STARTING: 1}
    store.jobs.annotate(jobs[1], 9.0, lease, removed_at=9.0)
    assert store.jobs.count(user="ben") == {}


def test_more_jobs_than_a_statement_takes(
    store: Store, lease: Lease, new_job: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = (store.jobs.create(new_job(), at)[0] for at in (1.0, 2.0, 3.0))
    store.jobs.finish_stage(first, "plan", {"a": 1}, 4.0, lease)
    others = [f"j-{number:010x}" for number in range(1 << 35, (1 << 35) + 33_000)]
    assert store.jobs.stage_times([*others, first.id], "plan") == {first.id: 4.0}
    monkeypatch.setattr(jobs, "_MOST_IN", 2)
    asked = [first.id, *others[:5], second.id, *others[5:8], third.id]
    assert [job.id for job in store.jobs.list(ids=asked)] == [third.id, second.id, first.id]
    assert [job.id for job in store.jobs.list(ids=asked, limit=2)] == [third.id, second.id]
    assert store.jobs.stages_of(asked, "plan") == {first.id: {"a": 1}}
    assert store.jobs.list(ids=[]) == []


def test_everything_is_there_after_opening_again(url: str, store: Store, lease: Lease, new_job: Make) -> None:
    job, _ = store.jobs.create(new_job(), 1.0)
    store.jobs.move(job, START, 2.0, lease, avoid=("a", "b"))
    store.close()
    again = Store(url).jobs.get(job.id)
    assert (again.state, again.avoid) == (JobState.STARTING, ("a", "b"))
