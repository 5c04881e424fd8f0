from __future__ import annotations

from lazytrain.jobs.lifecycle import TRANSITIONS, JobState, may_become

FINAL = {JobState.SUCCEEDED, JobState.FAILED, JobState.STOPPED, JobState.REJECTED}


def test_every_state_has_its_moves_and_only_the_four_are_final():
    assert set(TRANSITIONS) == set(JobState)
    assert {state for state in JobState if state.final} == FINAL


def test_no_move_leaves_a_final_state():
    assert not any(may_become(state, then) for state in FINAL for then in JobState)


def test_every_state_can_be_reached_and_can_end():
    def reachable(start: JobState) -> set[JobState]:
        seen, todo = {start}, [start]
        while todo:
            for then in TRANSITIONS[todo.pop()] - seen:
                seen.add(then)
                todo.append(then)
        return seen

    assert reachable(JobState.QUEUED) == set(JobState)
    assert all(reachable(state) & FINAL for state in JobState)


def test_a_job_is_rejected_only_before_it_starts_and_succeeds_only_after():
    assert [s for s in JobState if may_become(s, JobState.REJECTED)] == [JobState.QUEUED]
    assert not may_become(JobState.QUEUED, JobState.SUCCEEDED)
    assert not may_become(JobState.STARTING, JobState.SUCCEEDED)
