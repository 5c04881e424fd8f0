"""How well the simulator predicts what the executor does, on the emulated device, and how fast it is.

    python tests/benchmarks/simulator.py [--quick] [--json] [--resume FILE]

Each case draws a Llama, a batch, links and a budget, and lets the full planner, a fixed rule or chance decide the
policy. Three traced steps with every boundary on the GPU, in which layers keep nothing, products, and everything in
turn, calibrate links, CPU work, forwards, what a backward takes after each, and what every operation takes beside its
arithmetic; then the drawn policy runs and its median step time, peak device bytes and host bytes are held against the
prediction. This machine is another one from minute to minute, so policy and calibration run in turns: ``step_error`` is
that of a prediction from all calibrating steps, ``step_error_from_before`` that from the first three alone, and
``machine_drift`` how much faster the machine's compute had become from the first three to the others.
``off_before_calibration`` says how far the probe's profile was from the first three steps. ``peak_gpu_error`` is that
of what a plan promises, ``peak_over_time_error`` that of the peak on the simulated timeline.
``plans`` counts planned runs on a device that has exactly the budget, ``oom`` how many of them ran out of memory.
Everything runs on this machine's CPU, so the figures mean something only while it is quiet: ``load`` is recorded for
each case.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import statistics
import sys
import time
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in every training process of ours

import torch
from resume import Kept
from transformers import LlamaConfig, LlamaForCausalLM

from lazytrain.jobs.errors import DoesNotFit, OutOfMemory
from lazytrain.jobs.executor import Emulated, Streamed, stream
from lazytrain.jobs.introspect import model_facts
from lazytrain.jobs.model_facts import ModelFacts
from lazytrain.jobs.optim import HybridAdamW
from lazytrain.jobs.policy import Policy, lower
from lazytrain.jobs.timeline import Timeline
from lazytrain.platform.probe.rates import host_bytes_s, matmul_flops, update_parameters_s
from lazytrain.schedulers.baselines import every_kth, keep_all, megatrain
from lazytrain.schedulers.hardware import Budgets, HardwareProfile
from lazytrain.schedulers.planner import plan
from lazytrain.schedulers.replan import Measured
from lazytrain.schedulers.simulator import predict, simulate

CASES, PLANS, QUICK_CASES, QUICK_PLANS = 30, 50, 3, 4
PROBE_STEPS, TURNS, STEPS = 3, 3, 2
ERRORS = ("step_error", "step_error_from_before", "peak_gpu_error", "peak_over_time_error", "host_error")


@dataclass(frozen=True)
class Case:
    """A model at a batch, and the machine it runs on."""

    model: LlamaConfig
    batch: dict[str, torch.Tensor]
    facts: ModelFacts
    profile: HardwareProfile


def draw_case(choose: random.Random, base: HardwareProfile) -> Case:
    """Four to eight layers, and links on which a layer's weights take 0.2 to 1.5 of its forward."""
    width = choose.choice((192, 256, 384))
    rows, length = choose.randint(2, 5), choose.choice((64, 96, 128))
    config = LlamaConfig(
        hidden_size=width, intermediate_size=3 * width, num_hidden_layers=choose.randint(4, 8), num_attention_heads=4,
        num_key_value_heads=2, vocab_size=512, max_position_embeddings=length,
    )  # fmt: skip
    facts = model_facts(make_model(config), micro_batch=rows, sequence_length=length, dtype="float32")
    layer = facts.layers[0]
    rate = layer.weight_bytes / (choose.uniform(0.2, 1.5) * layer.forward_flops / base.flops("float32"))
    links = {"h2d_bytes_s": rate, "d2h_bytes_s": rate * choose.choice((0.7, 1.0))}
    ids = torch.randint(0, 512, (rows, length))
    mask = torch.ones_like(ids)
    mask[0, -1] = 0  # without any padding, models leave out the mask that facts allow for
    positions = torch.arange(ids.shape[1]).repeat(len(ids), 1)
    batch = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "labels": ids}
    return Case(config, batch, facts, base.model_copy(update=links))


def make_model(config: LlamaConfig) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(config).train()


def base_profile() -> HardwareProfile:
    """What the probe measures of this machine; efficiency is a guess that calibration corrects."""
    return HardwareProfile(
        name="here", kind="cpu", device="emulated", gpu_memory_bytes=1 << 34, efficiency=0.5, h2d_bytes_s=1e9,
        matmul_flops={"float32": matmul_flops("float32", device=torch.device("cpu"))}, d2h_bytes_s=1e9,
        host_memory_bytes=1 << 36, host_bytes_s=host_bytes_s(), update_parameters_s=update_parameters_s(),
    )  # fmt: skip


def open_stream(case: Case, policy: Policy, memory_bytes: int) -> Streamed:
    rates = {"h2d_bytes_s": case.profile.h2d_bytes_s, "d2h_bytes_s": case.profile.d2h_bytes_s}
    optimizer = HybridAdamW(lr=1e-4, max_grad_norm=1.0)
    return stream(
        make_model(case.model), policy, device=Emulated(memory_bytes=memory_bytes, **rates), optimizer=optimizer,
        facts=case.facts,
    )  # fmt: skip


def step(streamed: Streamed, case: Case) -> float:
    begun = time.perf_counter()
    streamed.model(**case.batch).loss.backward()
    streamed.step()
    return time.perf_counter() - begun


def probe_of(case: Case) -> Policy:
    """Every boundary on the GPU, and layers that keep nothing, products, and everything in turn."""
    probe = Policy.from_homes(case.facts, ["gpu"] * (len(case.facts.layers) + 1))
    kept = itertools.cycle(("none", "matmuls", "all"))
    layers = [layer.model_copy(update={"internals": what}) for layer, what in zip(probe.layers, kept, strict=False)]
    return probe.model_copy(update={"layers": tuple(layers)})


def traced(streamed: Streamed, case: Case, steps: int) -> list[Timeline]:
    """Traced steps, each by itself; the updates of the one before run, and count, in it."""
    timelines = []
    step(streamed, case)
    for _ in range(steps):
        streamed.trace()
        step(streamed, case)
        timelines.append(streamed.timeline())
    streamed.flush()
    return timelines


def timed(streamed: Streamed, case: Case, steps: int) -> list[float]:
    """Seconds of steps that follow another."""
    step(streamed, case)
    seconds = [step(streamed, case) for _ in range(steps)]
    streamed.flush()
    return seconds


def draw_policy(case: Case, profile: HardwareProfile, choose: random.Random) -> Policy:
    """A plan within a tight budget, a rule, or random homes."""
    least = lower(megatrain(case.facts), case.facts).peak_bytes("gpu")
    most = lower(keep_all(case.facts), case.facts).peak_bytes("gpu")
    budget = int(least + choose.random() * (most - least))
    kind = choose.choice(("full", "full", "rule", "random"))
    if kind == "full":
        answer = plan(case.facts, profile, gpu_memory=budget)
        if answer.policy is not None:
            return answer.policy
    if kind == "rule":
        budgets = Budgets.of(profile, gpu_memory=budget)
        try:
            return every_kth(case.facts, profile, budgets, interval=choose.randint(1, 3))
        except DoesNotFit:
            return megatrain(case.facts)
    homes: list[Any] = ["gpu", *(choose.choice(("gpu", "host", "recompute")) for _ in case.facts.layers[1:]), "gpu"]
    return Policy.from_homes(case.facts, homes, weight_slots=choose.choice((2, 3)))


def measure_case(case: Case, choose: random.Random) -> dict[str, Any]:
    """Predicted and measured of one policy."""
    probe, seconds = probe_of(case), list[float]()
    with open_stream(case, probe, 1 << 34) as probing:
        step(probing, case)
        timelines = traced(probing, case, PROBE_STEPS)
        before = Measured.of(timelines, probe, case.facts, case.profile)
        policy = draw_policy(case, before.calibrated(case.profile), choose)
        from_before = predict(policy, case.facts, before.calibrated(case.profile))
        with open_stream(case, policy, from_before.peak_gpu_bytes) as streamed:
            step(streamed, case)
            for _ in range(TURNS):
                seconds += timed(streamed, case, STEPS)
                timelines += traced(probing, case, 1)
            peak, host = streamed.device.peak_bytes, sum(streamed.host_bytes().values())
    profile = Measured.of(timelines, probe, case.facts, case.profile).calibrated(case.profile)
    after = Measured.of(timelines[PROBE_STEPS:], probe, case.facts, case.profile)
    predicted, measured = predict(policy, case.facts, profile), statistics.median(seconds)
    return {
        "layers": len(case.facts.layers),
        "parameters": case.facts.parameters,
        "homes": policy.count_homes(),
        "off_before_calibration": {stream: round(1 / speed - 1, 3) for stream, speed in before.speeds.items()},
        "machine_drift": after.speeds["compute"] / before.speeds["compute"] - 1,
        "predicted_step_s": predicted.step_s,
        "measured_step_s": measured,
        "step_error": predicted.step_s / measured - 1,
        "step_error_from_before": from_before.step_s / measured - 1,
        "peak_gpu_error": predicted.peak_gpu_bytes / peak - 1,
        "peak_over_time_error": simulate(policy, case.facts, profile).peak_bytes["gpu"] / peak - 1,
        "host_error": predicted.peak_host_bytes / host - 1,
    }


def planned_run(base: HardwareProfile, choose: random.Random) -> dict[str, Any]:
    """A plan within a random budget, run for one step on a device that has no byte more."""
    while True:
        case = draw_case(choose, base)
        least = lower(megatrain(case.facts), case.facts).peak_bytes("gpu")
        answer = plan(case.facts, case.profile, gpu_memory=int(least * choose.uniform(1.0, 1.8)), solve_seconds=2.0)
        if answer.policy is not None and answer.predicted is not None:
            break
    try:
        with open_stream(case, answer.policy, answer.predicted.peak_gpu_bytes) as streamed:
            step(streamed, case)
    except OutOfMemory as error:
        return {"oom": str(error)}
    return {"oom": ""}


def milliseconds_of_80_layers(base: HardwareProfile) -> float:
    """Lowering and simulating a policy of 80 layers with every kind of home: the best of five."""
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=80, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=128, max_position_embeddings=32,
    )  # fmt: skip
    facts = model_facts(config, micro_batch=1, sequence_length=16, dtype="float32")
    homes: list[Any] = [*["host", "recompute", "gpu", "nvme"] * 20, "gpu"]
    policy = Policy.from_homes(facts, homes)
    took = []
    for _ in range(5):
        begun = time.process_time()
        simulate(policy, facts, base)
        took.append(time.process_time() - begun)
    return min(took) * 1e3


def run(*, quick: bool, kept: Kept) -> dict[str, Any]:
    """All cases and their summary."""
    torch.set_num_threads(1)
    base = base_profile()
    cases = []
    for seed in range(QUICK_CASES if quick else CASES):
        cases.append(kept.result(["case", seed], partial(measured_case, base, seed)))
        print(f"{seed}: {cases[-1]}", file=sys.stderr)
    plans = [
        kept.result(["plan", seed], partial(planned_run, base, random.Random(1000 + seed)))
        for seed in range(QUICK_PLANS if quick else PLANS)
    ]
    errors = {name: [abs(case[name]) for case in cases] for name in ERRORS}
    return {
        **{f"{name}_median": statistics.median(errors[name]) for name in ERRORS[:2]},
        **{f"{name}_worst": max(errors[name]) for name in ERRORS},
        "machine_drift_worst": max(abs(case["machine_drift"]) for case in cases),
        "plans": len(plans),
        "oom": sum(bool(plan["oom"]) for plan in plans),
        "simulate_80_layers_ms": milliseconds_of_80_layers(base),
        "cases": cases,
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "versions": {"python": platform.python_version(), "torch": version("torch"), "ortools": version("ortools")},
    }


def measured_case(base: HardwareProfile, seed: int) -> dict[str, Any]:
    """The case that ``seed`` draws, and the machine's load as it ended."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    return {**measure_case(draw_case(choose, base), choose), "load": os.getloadavg()[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few cases and plans: under 50 s on two cores")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--resume", type=Path, help="keep each case in this file, and do not run those in it again")
    options = parser.parse_args()
    result = run(quick=options.quick, kept=Kept(options.resume))
    if options.json:
        json.dump(result, sys.stdout, indent=1)
        print()
        return
    for name, value in result.items():
        if isinstance(value, int | float):
            print(f"{name:24} {value:10.4f}")


if __name__ == "__main__":
    main()
