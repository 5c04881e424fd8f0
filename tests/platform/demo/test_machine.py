import pytest

from lazytrain.jobs.errors import DoesNotFit
from lazytrain.platform.demo import machine
from lazytrain.platform.demo.machine import base_profile, scale_links, tight_limits
from lazytrain.platform.models import facts_of
from lazytrain.platform.planning import Limits, feasible_policy, make_plan
from lazytrain.schedulers.planner import Plan

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "tie_word_embeddings": True,
}
PAPER = Limits(planner="paper")
"""What the demo's job file asks for."""
MEASURED = base_profile().model_copy(
    update={"matmul_flops": {"float32": 4e10}, "update_parameters_s": 5e7, "host_bytes_s": 1e10}
)


def facts_with(layers: int):  # type: ignore[no-untyped-def]
    return facts_of({**CONFIG, "num_hidden_layers": layers}, batch=32, length=28, dtype="float32")


def test_links_are_as_slow_against_compute_as_on_a_real_gpu() -> None:
    facts = facts_with(2)
    profile = scale_links(MEASURED, facts)
    layer = facts.layers[0]
    load_s = layer.weight_bytes / profile.h2d_bytes_s
    assert load_s == pytest.approx(0.4 * layer.forward_flops / profile.flops("float32"))
    assert profile.nvme_read_bytes_s == profile.nvme_write_bytes_s == profile.d2h_bytes_s / 2


def test_what_runs_for_a_moment_while_it_is_measured_changes_nothing() -> None:
    facts = facts_with(2)
    disturbed = {"nvme_read_bytes_s": 3e6, "nvme_write_bytes_s": 3e6, "operation_overhead_s": 0.1}
    assert scale_links(MEASURED.model_copy(update=disturbed), facts) == scale_links(MEASURED, facts)


def test_deep_models_need_every_kind_of_home() -> None:
    facts = facts_with(12)
    profile = scale_links(MEASURED, facts)
    limits = tight_limits(facts, profile, PAPER)
    homes = feasible_policy(make_plan(facts, profile, limits)).count_homes()
    assert all(count > 0 for count in homes.values()), homes


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_the_homes_do_not_depend_on_how_fast_compute_was_thought_to_be(factor: float) -> None:
    """What else runs on the machine can make the first measurement ten times too slow."""
    facts = facts_with(12)
    thought = MEASURED.model_copy(update={"matmul_flops": {"float32": factor * MEASURED.matmul_flops["float32"]}})
    limits = tight_limits(facts, scale_links(thought, facts), PAPER)
    known = scale_links(MEASURED, facts)
    homes = feasible_policy(make_plan(facts, known, limits)).count_homes()
    assert all(count > 0 for count in homes.values()), homes


def test_shallow_models_still_get_a_plan() -> None:
    facts = facts_with(4)
    profile = scale_links(MEASURED, facts)
    assert make_plan(facts, profile, tight_limits(facts, profile, PAPER)).feasible


def test_no_budget_at_all_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "make_plan", lambda facts, profile, limits: Plan(feasible=False))
    with pytest.raises(DoesNotFit):
        tight_limits(facts_with(4), MEASURED, PAPER)
