"""The nodes: what was measured, what is in use, and taking one out of service."""

from typing import Any

from lazytrain.dashboards.pages.nodes import profile_rows
from lazytrain.jobs.lifecycle import JobState

Lab = Any


def test_profile_use_and_jobs(lab: Lab) -> None:
    lab.node()
    lab.node("fresh", profile={})
    job = lab.job("mine", JobState.RUNNING)
    lab.job("theirs", JobState.RUNNING, user="ben")
    lab.train(job)
    lab.admit(job, host_bytes=100 << 30)
    text = lab.browser("ada").get("/nodes").text
    for words in ("700 TFLOPS", "50 GB/s", "2.0 TiB", "2 of 2 used", "100.0GiB of 512.0GiB", "Not measured yet."):
        assert words in text, words
    assert f'href="/jobs/{job}"' in text
    assert "1 of other people" in text
    assert "theirs" not in text
    assert "GPU memory (bytes)" in text
    assert "GPU 0: mine" in text


def test_what_all_gpus_reach_together_is_told_where_there_are_several() -> None:
    one = {
        "all_h2d_bytes_s": 20e9,
        "all_d2h_bytes_s": 18e9,
        "all_both_h2d_bytes_s": 15e9,
        "all_both_d2h_bytes_s": 14e9,
    }
    assert "Both ways at once" not in dict(profile_rows({"copies": [one]}))
    rows = dict(profile_rows({"copies": [one, one]}))
    assert rows["Host to all GPUs at once"] == "40 GB/s"
    assert rows["All GPUs at once to host"] == "36 GB/s"
    assert rows["Both ways at once"] == "58 GB/s"


def test_only_admins_are_offered_and_allowed_changes(lab: Lab) -> None:
    lab.node()
    browser = lab.browser("ada")
    assert "/nodes/a/drain" not in browser.get("/nodes").text
    for action in ("drain", "return", "measure"):
        assert browser.post(f"/nodes/a/{action}").status_code == 403
    node = lab.store.nodes.get("a")
    assert (node.drained, bool(node.profile)) == (False, True)


def test_draining_taking_back_and_measuring_again(lab: Lab) -> None:
    lab.node()
    browser = lab.browser("root")
    assert browser.post("/nodes/a/drain", data={"reason": "new disk"}, follow_redirects=False).status_code == 303
    assert (lab.store.nodes.get("a").drained, lab.store.nodes.get("a").reason) == (True, "new disk")
    assert "/nodes/a/return" in browser.get("/nodes").text
    assert browser.post("/nodes/a/return", headers={"HX-Request": "true"}).status_code == 204
    assert not lab.store.nodes.get("a").drained
    browser.post("/nodes/a/measure")
    assert lab.store.nodes.get("a").profile == {}
    assert browser.post("/nodes/none/drain").status_code == 404


def test_a_profile_of_another_version_is_shown_as_far_as_it_is_known() -> None:
    assert list(profile_rows({})) == []
    rows = dict(profile_rows({"gpu_memory_bytes": 1 << 30, "matmul_flops": {"bfloat16": None}}))
    assert rows["GPU memory"] == "1.0 GiB"
    assert rows["Host to GPU"] == "–"
