"""A new job: fields, text, files of other trainers, and into the queue."""

import re
from html import unescape
from typing import Any

import pytest
import yaml

from lazytrain.dashboards.pages.submit import with_fields
from lazytrain.platform.admission import Admission, Way

Lab = Any
AXOLOTL = """
base_model: Qwen/Qwen2.5-7B
datasets:
  - path: tatsu-lab/alpaca
    type: alpaca
sequence_len: 2048
micro_batch_size: 4
learning_rate: 2e-5
wandb_project: mine
"""
FACTORY = """
model_name_or_path: Qwen/Qwen2.5-7B
stage: sft
finetuning_type: full
dataset: alpaca
cutoff_len: 2048
"""


def text_of(page: str) -> str:
    found = re.search(r'<textarea id="text"[^>]*>(.*?)</textarea>', page, re.DOTALL)
    assert found is not None
    return unescape(found[1])


def job_file(lab: Lab, **changes: Any) -> str:
    return yaml.safe_dump(lab.spec(**changes))


def test_the_form_begins_with_a_job_that_lacks_little(lab: Lab) -> None:
    lab.node()
    page = lab.browser().get("/submit?from=plan&model=qwen2.5-7b&gpu=H800&gpu_memory=40GB&length=2048").text
    said = yaml.safe_load(text_of(page))
    assert said["model"] == {"path": "qwen2.5-7b"}
    assert said["resources"] == {"gpu": ["H800"]}
    assert said["plan"] == {"planner": "full", "gpu_memory": "40GB"}
    assert said["data"]["max_length"] == 2048


def test_a_job_like_another_one(lab: Lab) -> None:
    job = lab.job("first", train={"epochs": 3})
    said = yaml.safe_load(text_of(lab.browser().get(f"/submit?like={job}").text))
    assert (said["name"], said["train"]["epochs"]) == ("first", 3)
    assert "output" not in said
    assert lab.browser("ben").get(f"/submit?like={job}").status_code == 404


def test_fields_go_into_the_text_and_leave_the_rest_of_it_alone() -> None:
    text = "name: a\ndata:\n  packing: false\n  train:\n  - {path: old, weight: 2}\nplan: {gpu_memory: 70GB}\n"
    fields = {
        "name": "b",
        "data.train.0.path": "/new",
        "train.epochs": "2",
        "train.batch": "auto",
        "resources.gpu": "H800, A100",
        "plan.gpu_memory": "",
        "train.learning_rate": "2e-5",
    }
    said = yaml.safe_load(with_fields(text, fields))
    assert said == {
        "name": "b",
        "data": {"packing": False, "train": [{"path": "/new", "weight": 2}]},
        "plan": {},
        "train": {"epochs": 2, "batch": "auto", "learning_rate": 2e-5},
        "resources": {"gpu": ["H800", "A100"]},
    }


@pytest.mark.parametrize("text", ["", "[]", "name: [", "data: 5", "data: {train: x}", "data: {train: [5]}"])
def test_fields_meet_any_text(lab: Lab, text: str) -> None:
    answer = lab.browser().post(
        "/submit?part=text", data={"do": "preview", "text": text, "data.train.0.path": "/x", "name": "n"}
    )
    assert answer.status_code in (200, 422)
    assert "<textarea" in answer.text


def test_reading_the_text_into_the_fields(lab: Lab) -> None:
    page = lab.browser().post("/submit?part=all", data={"do": "read", "text": job_file(lab, name="mine")}).text
    assert 'name="name" value="mine"' in page


@pytest.mark.parametrize(("text", "source"), [(AXOLOTL, "Axolotl"), (FACTORY, "LLaMA-Factory")])
@pytest.mark.parametrize("do", ["read", "plan", "submit"])
def test_a_file_of_another_trainer_becomes_a_job_file_that_one_looks_at_first(
    lab: Lab, text: str, source: str, do: str
) -> None:
    page = lab.browser().post("/submit", data={"do": do, "text": text}).text
    said = yaml.safe_load(text_of(page))
    assert f"This was a file of {source}" in page
    assert said["model"]["path"] == "Qwen/Qwen2.5-7B"
    assert said["data"]["max_length"] == 2048
    if source == "Axolotl":
        assert "wandb_project" in page
    assert lab.store.jobs.list() == []


def test_what_is_wrong_is_said_with_its_line_and_the_text_stays(lab: Lab) -> None:
    text = "name: a\nmodel:\n  path: m\n  dtyp: float32\ndata:\n  train: [{path: /r}]\n"
    answer = lab.browser().post("/submit", data={"do": "submit", "text": text})
    assert answer.status_code == 422
    assert "the text:4: model.dtyp: unknown key" in answer.text
    assert "did you mean" in answer.text
    assert text_of(answer.text).strip() == text.strip()
    for broken in ("", "a: [", "- 1", "x" * 300_000):
        assert lab.browser().post("/submit", data={"do": "submit", "text": broken}).status_code == 422
    assert lab.store.jobs.list() == []


def test_a_folder_that_is_not_allowed_is_refused_by_the_service(lab: Lab) -> None:
    answer = lab.browser().post("/submit", data={"do": "submit", "text": job_file(lab, model={"path": "/etc"})})
    assert answer.status_code == 422
    assert "outside of the folders" in answer.text


def test_into_the_queue_once_however_often_it_is_sent(lab: Lab) -> None:
    browser, data = lab.browser("ada"), {"do": "submit", "text": job_file(lab, name="mine"), "key": "k"}
    first = browser.post("/submit", data=data, follow_redirects=False)
    second = browser.post("/submit", data=data, follow_redirects=False)
    (job,) = lab.store.jobs.list()
    assert first.headers["location"] == second.headers["location"] == f"/jobs/{job.id}"
    assert (job.name, job.user) == ("mine", "ada")
    browser.post("/submit", data={**data, "text": job_file(lab, name="other")})
    assert len(lab.store.jobs.list()) == 2


def test_where_it_fits_before_it_is_submitted(lab: Lab) -> None:
    lab.node()
    option = {"tokens_per_s": 10.0, "work_tokens": 100.0, "startup_s": 5.0, "host_bytes": 7 << 30, "nvme_bytes": 0}
    lab.planner.answer = Admission(
        batch=8, steps=3, ways={"H800": Way(option=option, policy={}, device={})}, limits={"A10": "is too small"}
    )
    page = lab.browser().post("/submit", data={"do": "plan", "text": job_file(lab)}).text
    for words in ("It fits: 8 rows a step, 3 steps", "15 s", "7.0 GiB", "is too small"):
        assert words in page, words
    assert lab.store.jobs.list() == []


def test_viewers_submit_nothing(lab: Lab) -> None:
    browser = lab.browser("vic")
    assert browser.get("/submit").status_code == 403
    assert browser.post("/submit", data={"do": "submit", "text": job_file(lab)}).status_code == 403
    assert lab.store.jobs.list() == []


def test_a_form_that_is_too_large(lab: Lab) -> None:
    assert lab.browser().post("/submit", data={"text": "x" * (2 << 20)}).status_code == 422
