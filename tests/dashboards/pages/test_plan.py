"""Planning before anything is submitted."""

from typing import Any

import pytest

from lazytrain.jobs.errors import ModelError
from lazytrain.platform.admission import Answer

Lab = Any
ASK = "/plan?ask=yes&model=qwen2.5-7b&gpu=H800&batch=16&length=1024&gpu_memory=40GB"


def predicted(step_s: float) -> dict[str, Any]:
    return {
        "step_s": step_s, "tokens_per_s": 16384 / step_s, "tflops_6n": 300.0, "compute_units": 3.1,
        "peak_gpu_bytes": 37 << 30, "peak_host_bytes": 80 << 30, "nvme_bytes": 0, "host_bytes_per_parameter": 8.03,
        "exposed_s": {"h2d": 0.5, "cpu": 0.25},
    }  # fmt: skip


def answer(**changes: Any) -> Answer:
    small = {"index": 0, "home": "host"}, {"index": 1, "home": "gpu"}
    policy = {
        "schema": 1, "model_digest": "m", "micro_batch": 16, "sequence_length": 1024, "boundaries": list(small),
        "layers": [{"index": 0, "internals": "all"}],
    }  # fmt: skip
    values = {
        "feasible": True,
        "solver": {"planner": "full", "status": "OPTIMAL", "gap": 0.0057, "seconds": 1.0},
        "policy": policy,
        "predicted": predicted(4.0),
        "baselines": {"megatrain": predicted(5.0), "keep_all": predicted(3.2)},
        "model": {"architecture": "Qwen2ForCausalLM", "parameters": 7.6e9, "layers": 28},
        "machine": {"name": "a", "gpu_memory_bytes": 80 << 30, "host_memory_bytes": 512 << 30},
        "timeline": {"step_s": 4.0, "exposed_s": {}, "peak_bytes": {}, "spans": [["forward.0", "compute", 0, 4.0, 0]]},
    }
    return Answer(values={**values, **changes})


def test_the_form_offers_what_is_here_and_what_is_known(lab: Lab) -> None:
    lab.node()
    text = lab.browser().get("/plan").text
    assert text.index("Here, as measured") < text.index("<option selected>H800</option>")
    assert "RTX3090" in text
    assert '<option value="qwen2.5-7b">' in text
    assert lab.planner.asked == []


def test_a_plan_with_its_figures_rules_map_and_timeline(lab: Lab) -> None:
    lab.node()
    lab.planner.answer = answer()
    text = lab.browser().get(f"{ASK}&part=answer").text
    for words in (
        "It fits",
        "4,096",
        "0.57 %",
        "750 ms",
        "MegaTrain",
        "0.80 ×",
        "1.25 ×",
        "Policy map",
        "Predicted timeline",
    ):
        assert words in text, words
    assert text.index("keep all") < text.index("full search") < text.index("MegaTrain"), "the fastest first"
    assert "/submit?from=plan&amp;model=qwen2.5-7b" in text
    (asked,) = lab.planner.asked
    assert (asked.kind, asked.values["batch"], asked.values["gpu_memory"]) == ("shape", 16, "40GB")
    assert asked.values["profile"]["kind"] == "H800", "the profile that was measured here"


def test_a_gpu_that_is_not_here_is_planned_for_by_name(lab: Lab) -> None:
    lab.planner.answer = answer()
    lab.browser().get(ASK.replace("H800", "RTX3090"))
    (asked,) = lab.planner.asked
    assert (asked.values["gpu"], asked.values["profile"]) == ("RTX3090", None)


def test_the_same_question_is_not_planned_twice(lab: Lab) -> None:
    lab.planner.answer = answer()
    for user in ("ada", "ada", "ben"):
        assert "It fits" in lab.browser(user).get(f"{ASK}&part=answer").text
    assert len(lab.planner.asked) == 1


def test_what_is_short_and_what_would_help(lab: Lab) -> None:
    reason = {
        "resource": "host_memory",
        "needed_bytes": 963 << 30,
        "available_bytes": 512 << 30,
        "shortfall_bytes": 451 << 30,
        "hint": "use NVMe",
    }
    change = {"what": "nvme", "words": "600GB of NVMe", "step_s": 9.0, "tokens_per_s": 100.0}
    lab.planner.answer = answer(feasible=False, reasons=[reason], changes=[change], timeline=None)
    text = lab.browser().get(ASK).text
    for words in ("It does not fit", "host memory", "963 GiB", "451 GiB", "use NVMe", "600GB of NVMe"):
        assert words in text, words
    assert "Make a job of it" not in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("batch=0", "batch"),
        ("batch=x", "whole numbers"),
        ("length=1", "length"),
        ("gpu_memory=lots", "gpu memory"),
        ("solve_seconds=9999", "solve seconds"),
        ("planner=magic", "planner"),
        ("model=/etc/passwd", "outside of the folders"),
        ("model=../x", "relative path"),
    ],
)
def test_what_is_wrong_with_the_question_stands_below_the_form_that_stays_filled_in(
    lab: Lab, change: str, words: str
) -> None:
    name, _, value = change.partition("=")
    browser = lab.browser()
    query = {"ask": "yes", "model": "qwen2.5-7b", "gpu": "H800", "batch": "16", "length": "1024", name: value}
    text = browser.get("/plan", params=query).text
    assert words in text
    assert 'class="wrong"' in text
    assert "qwen2.5-7b" in text
    assert lab.planner.asked == []


def test_an_error_of_the_planner_is_shown(lab: Lab) -> None:
    lab.planner.answer = ModelError("no model configuration at nowhere", hint="give a directory")
    text = lab.browser().get(ASK).text
    assert "no model configuration at nowhere" in text
    assert "give a directory" in text


def test_viewers_plan_nothing(lab: Lab) -> None:
    assert lab.browser("vic").get("/plan").status_code == 403
