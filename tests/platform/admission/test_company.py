"""A run beside other jobs than it was planned for, with the real planner."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from lazytrain.jobs.model_facts import ModelFacts
from lazytrain.jobs.policy import Policy
from lazytrain.jobs.spec import load_spec
from lazytrain.platform.admission.company import WORTH, _is_better, plan_for_company
from lazytrain.platform.admission.measuring import Here
from lazytrain.platform.demo import inputs
from lazytrain.platform.demo.machine import base_profile
from lazytrain.schedulers.demand import Demand
from lazytrain.schedulers.hardware import HardwareProfile
from lazytrain.schedulers.placement import Gpu, NodeState, Option
from lazytrain.schedulers.planner import plan
from lazytrain.schedulers.together import Joint

GIB = 1 << 30
LINK = 2e8
NOTHING = {"words": "", "policy": None, "tokens_per_s": 0.0}


class Lab:
    """A run on a GPU that has memory for a third of what it could keep, beside a link that is just fast enough."""

    def __init__(self, job: Path, folder: Path, profile: HardwareProfile, facts: ModelFacts) -> None:
        self.spec = load_spec(job, ("plan.nvme=null",)).model_dump(mode="json")
        self.folder, self.profile, self.facts = folder, profile, facts
        self.gpu_bytes = 75 << 20

    def policy(self, **options: Any) -> Policy:
        """As it was made for a node without neighbours."""
        found = plan(self.facts, self.profile, gpu_memory=self.gpu_bytes, **options).policy
        assert found is not None
        return found

    def ask(self, policy: Policy, *beside: Option, **links: float) -> dict[str, Any]:
        gpus = (Gpu(id="0", pcie_root="r"), Gpu(id="1", pcie_root="r"))
        shared = {"pcie_bytes_s": LINK, **links}
        node = NodeState(name="n", kind="big", gpus=gpus, host_bytes=8 * GIB, **shared)
        asked = {
            "spec": self.spec,
            "policy": policy.model_dump(mode="json", by_alias=True),
            "profile": self.profile.model_dump(mode="json"),
            "gpu_bytes": self.gpu_bytes,
            "node": asdict(node),
            "root": "r",
            "beside": [{"option": asdict(option), "root": "r"} for option in beside],
        }
        return plan_for_company(asked, Here(self.folder / "facts"))


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """Made once: nothing here changes it."""
    folder = tmp_path_factory.mktemp("company")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inputs, "_TRAIN_ROWS", 240)
        patch.setattr(inputs, "_EVAL_ROWS", 8)
        job = inputs.write_inputs(folder / "job", seed=0)
    changes = {"gpu_memory_bytes": GIB, "host_memory_bytes": 8 * GIB, "matmul_flops": {"float32": 4e11}}
    links = {"h2d_bytes_s": LINK, "d2h_bytes_s": LINK, "kind": "big"}
    facts = Here(folder / "facts").facts(load_spec(job), batch=64, length=32, dtype="float32")
    return Lab(job, folder, base_profile().model_copy(update={**changes, **links}), facts)


def neighbour(rate: float) -> Option:
    return Option(kind="big", tokens_per_s=1.0, work_tokens=0.0, host_bytes=0, h2d_bytes_s=rate, d2h_bytes_s=rate)


def test_a_neighbour_that_fills_the_link_makes_another_policy_worth_it(lab: Lab) -> None:
    policy = lab.policy()
    found = lab.ask(policy, neighbour(LINK))
    new = Policy.model_validate(found["policy"])
    assert new.boundaries != policy.boundaries or new.layers != policy.layers
    assert (new.micro_batch, new.accumulation) == (policy.micro_batch, policy.accumulation)
    assert policy.predicted is not None and new.predicted is not None
    assert new.predicted.peak_host_bytes <= policy.predicted.peak_host_bytes
    assert Demand(**found["option"]).h2d_bytes_s < LINK
    assert found["words"].startswith("beside 1 other job it is expected to reach")
    kept, narrow = lab.ask(new, neighbour(LINK)), lab.ask(policy, neighbour(LINK), copies_bytes_s=LINK)
    assert kept == NOTHING  # it has what it can have
    assert narrow["tokens_per_s"] < found["tokens_per_s"]  # the measured figure of all copies counts


def test_who_has_no_neighbour_or_one_who_leaves_the_link_alone_keeps_its_policy(lab: Lab) -> None:
    policy = lab.policy()
    assert lab.ask(policy) == NOTHING
    assert lab.ask(policy, neighbour(LINK / 100)) == NOTHING


def test_a_policy_that_was_for_less_is_given_up_when_the_neighbour_has_gone(lab: Lab) -> None:
    poor = lab.policy(planner="megatrain")
    found = lab.ask(poor)
    assert found["policy"] is not None
    assert found["words"].startswith("alone on its node it is expected to reach")


def test_state_that_would_have_to_move_stays(lab: Lab) -> None:
    assert lab.ask(lab.policy().parked(optimizer={0}), neighbour(LINK)) == NOTHING


def test_what_is_better_for_the_run_may_not_be_worse_for_its_neighbours(lab: Lab) -> None:
    def joint(rate: float, *beside: float) -> Joint:
        answer = plan(lab.facts, lab.profile, planner="megatrain")
        assert answer.predicted is not None
        return Joint(((lab.facts, answer),), (rate / answer.predicted.tokens_per_s,), beside)

    old = joint(100.0, 0.8)
    assert _is_better(old, joint(100.0 * (1 + WORTH) + 0.1, 0.8))
    assert not _is_better(old, joint(100.0 * (1 + WORTH) - 0.1, 0.9))
    assert not _is_better(old, joint(150.0, 0.7))
