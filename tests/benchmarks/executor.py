"""What streaming costs: against plain training, against the links' own time, and against the MegaTrain rule.

    python tests/benchmarks/executor.py [--quick] [--json] [--only plain|3090|h800 ...]

Llamas in float32 on this machine's CPU, made so that one layer is to this CPU and these links what a layer of a real
model is to its GPU: Llama-3 8B with 6 x 1024 tokens on an RTX 3090 at 25 GB/s, Qwen2.5 7B with 23 x 1024 tokens on an
H800 at 12 GB/s (`CASES` has the ratios). Width and tokens give activations and weights the ratio they have there, the
links are as slow against a layer's forward, and the device has memory for the same share of all layers' products beside
everything else. They have about half the depth, so what happens once a step (the last gradient out, the first layer's
update and load) weighs twice as much as there. Every ratio compares medians of steps taken in turn in one run.

- ``time_over_plain_hf``: every layer checkpointed, links free, over the plain model with gradient checkpointing and
  fused AdamW.
- ``time_over_bound_*``: the step over the larger of compute alone and the busiest link alone, in traced steps, of the
  policy that the planner makes for the machine as a probe step measures it, and for its memory.
- ``speedup_over_megatrain_*``: tokens/s of that policy over the MegaTrain rule: blocks of four, in backward recomputed
  whole (their last layer too, whose output nobody reads), the optimizer after backward. ``speedup_over_thrifty_*`` is
  over the same rule without that needless forward; ``rule_overlapped_*`` what our overlapped optimizer alone gives it.
- ``peak_error_*``: the device's peak in a step against the program's, less one; ``peak_error_swapped_*`` is that where
  all layers' products go to the host and back, with most copies in flight.
- ``tracing_reckoned``: seconds that tracing adds to an operation (from the least of many rounds with it and without, so
  that other work on the machine does not count), times the operations of a step, over the least step.
  ``tracing_cost``: over pairs of neighbouring steps, of which now the first and now the second is traced, the median of
  how much longer the traced one took; ``tracing_cost_95`` holds it with 95 % confidence, whatever the distribution of
  the pairs, and is as wide as the machine is noisy.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in every training process of ours

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lazytrain.jobs.executor import Emulated, Streamed, stream
from lazytrain.jobs.executor.devices.base import Recorder
from lazytrain.jobs.introspect import model_facts
from lazytrain.jobs.model_facts import ModelFacts
from lazytrain.jobs.optim import HybridAdamW
from lazytrain.jobs.policy import LayerPolicy, Op, Policy, lower
from lazytrain.jobs.replay import Call
from lazytrain.jobs.timeline import Timeline
from lazytrain.platform.probe.rates import host_bytes_s, update_parameters_s
from lazytrain.schedulers.baselines import megatrain
from lazytrain.schedulers.hardware import HardwareProfile
from lazytrain.schedulers.planner import plan

HEADS, VOCABULARY = 8, 512
SOLVE_SECONDS = 5.0


class Case(NamedTuple):
    """A layer and its batch."""

    width: int
    rows: int
    length: int
    load_over_forward: float
    """Seconds of a layer's load over those of its forward: 17 over 46 ms at 60 TFLOPS on the RTX 3090, 39 over 41 ms at
    274 TFLOPS on the H800."""
    products_that_fit: float
    """Share of all layers' products for which the device has room beside a step that keeps every boundary: with the
    facts of Llama-3 8B 16.3 GB of 18.5 (a card of 24 GiB less 8 %), with those of Qwen2.5 7B 55.6 GB of 70.3 (a cap of
    70 GB)."""


CASES = {"3090": Case(512, 6, 118, 0.37, 0.878), "h800": Case(320, 23, 85, 0.94, 0.791)}
DEPTH, QUICK_DEPTH = 16, 8
PARTS = ["plain", *CASES, "tracing"]


def make_model(case: Case, layers: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=case.width, intermediate_size=int(case.width * 3.5), num_hidden_layers=layers,
        num_attention_heads=HEADS, num_key_value_heads=2, vocab_size=VOCABULARY, max_position_embeddings=case.length,
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


class Job(NamedTuple):
    """A case at a depth, with its facts and a batch."""

    case: Case
    layers: int
    facts: ModelFacts
    batch: dict[str, torch.Tensor]

    @classmethod
    def of(cls, name: str, layers: int) -> Job:
        case = CASES[name]
        facts = model_facts(
            make_model(case, layers), micro_batch=case.rows, sequence_length=case.length, dtype="float32"
        )
        ids = torch.randint(0, VOCABULARY, (case.rows, case.length))
        mask, positions = torch.ones_like(ids), torch.arange(case.length).repeat(case.rows, 1)
        mask[0, -1] = 0  # without any padding, the model leaves out the mask that facts allow for
        batch = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "labels": ids}
        return cls(case, layers, facts, batch)

    @property
    def every_layer(self) -> Policy:
        """Every boundary kept on the device."""
        return Policy.from_homes(self.facts, ["gpu"] * (self.layers + 1))

    @property
    def swapped(self) -> Policy:
        """All layers' products swapped to the host."""
        layers = tuple(LayerPolicy(index=i, internals="matmuls", internals_home="host") for i in range(self.layers))
        return self.every_layer.model_copy(update={"layers": layers, "weight_slots": 3})

    def open(self, policy: Policy, device: str | Emulated) -> Streamed:
        optimizer = HybridAdamW(lr=1e-4, max_grad_norm=1.0)
        model = make_model(self.case, self.layers)
        return stream(model, policy, device=device, optimizer=optimizer, facts=self.facts)


def measure(steps: dict[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each kind of step, taken in turn, after one of each to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if repeat:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def plain_step(job: Job) -> Callable[[], None]:
    model = make_model(job.case, job.layers)
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        model(**job.batch, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def streamed_step(streamed: Streamed, batch: dict[str, torch.Tensor], *, serial: bool = False) -> Callable[[], None]:
    def step() -> None:
        streamed.model(**batch).loss.backward()
        streamed.step()
        if serial:
            streamed.flush()

    return step


def megatrain_step(streamed: Streamed, batch: dict[str, torch.Tensor], *, serial: bool) -> tuple[Any, list[float]]:
    """A step of the rule as it is published, and a list that gets the seconds of each needless forward.

    When backward comes to a block, all of its layers run forward once more: the last one too, although its output is
    there. The program leaves that forward out, so it is run here.
    """
    compute, homes, first = streamed._engine._compute, streamed.policy.homes, len(streamed.facts.before)
    last = {first + i for i, home in enumerate(homes) if home == "recompute" and homes[i + 1] != "recompute"}
    backward, needless_s = compute.backward, list[float]()

    def whole_block(op: Op, call: Call, gradients: Any) -> Any:
        if op.unit in last:
            start = time.perf_counter()
            with compute._weights.bound(op), torch.no_grad():
                call.forward(compute._store.get((op.unit, op.micro)))
            needless_s.append(time.perf_counter() - start)
        return backward(op, call, gradients)

    compute.backward = whole_block  # type: ignore[method-assign]
    return streamed_step(streamed, batch, serial=serial), needless_s


def measured_profile(job: Job) -> HardwareProfile:
    """The machine as a probe step sees it, with the case's links and memory."""
    layer = job.facts.layers[0]
    forward_s = forward_seconds(job)
    rate = layer.weight_bytes / (job.case.load_over_forward * forward_s)
    room = job.case.products_that_fit * job.layers * layer.saved_matmul_bytes
    base = job.every_layer.model_copy(update={"weight_slots": 3})
    return HardwareProfile(
        name="here", kind="emulated", device="emulated", efficiency=1.0,
        gpu_memory_bytes=lower(base, job.facts).peak_bytes("gpu") + int(room),
        matmul_flops={"float32": layer.forward_flops / forward_s}, h2d_bytes_s=rate, d2h_bytes_s=rate,
        host_memory_bytes=1 << 36, host_bytes_s=host_bytes_s(), update_parameters_s=update_parameters_s(),
    )  # fmt: skip


def forward_seconds(job: Job) -> float:
    """Median seconds of one layer's forward here."""
    with job.open(job.every_layer, "cpu") as streamed:
        step = streamed_step(streamed, job.batch)
        step()
        streamed.trace()
        step()
        spans = streamed.timeline().spans
    return statistics.median(s.end_s - s.start_s for s in spans if s.op.startswith("forward.") and s.op[8].isdigit())


def planned(job: Job, profile: HardwareProfile) -> Policy:
    """Our planner's policy for the machine and its memory."""
    answer = plan(job.facts, profile, solve_seconds=SOLVE_SECONDS)
    assert answer.policy is not None, "every layer's boundary fits"
    return answer.policy


def run_gpu(gpu: str, layers: int, repeats: int) -> dict[str, Any]:
    job = Job.of(gpu, layers)
    profile = measured_profile(job)
    links = {"h2d_bytes_s": profile.h2d_bytes_s, "d2h_bytes_s": profile.d2h_bytes_s}
    device, roomy = (Emulated(memory_bytes=size, **links) for size in (profile.gpu_memory_bytes, 1 << 34))
    ours, rule = planned(job, profile), megatrain(job.facts, interval=4)
    opened = {
        "ours": job.open(ours, device), "rule_serial": job.open(rule, device), "rule_overlapped": job.open(rule, device)
    }  # fmt: skip
    step = streamed_step(opened["ours"], job.batch)
    serial, needless_s = megatrain_step(opened["rule_serial"], job.batch, serial=True)
    overlapped, _ = megatrain_step(opened["rule_overlapped"], job.batch, serial=False)
    seconds = measure({"ours": step, "rule_serial": serial, "rule_overlapped": overlapped}, repeats)
    stalls = {name: {k: round(v / (repeats + 1), 4) for k, v in s.stall_s().items()} for name, s in opened.items()}
    many = traced(opened["ours"], step, repeats)
    for streamed in opened.values():
        streamed.close()
    with job.open(job.swapped, roomy) as streamed:
        step = streamed_step(streamed, job.batch)
        step()
        swapped = traced(streamed, step, 1)
    busy = {stream: busy_s / repeats for stream, busy_s in many.timeline.busy_s().items()}
    median = {name: statistics.median(values) for name, values in seconds.items()}
    needless = statistics.median(needless_s) * len(needless_s) / (repeats + 1)
    return {
        f"time_over_bound_{gpu}": many.seconds / max(busy.values()),
        f"speedup_over_megatrain_{gpu}": median["rule_serial"] / median["ours"],
        f"speedup_over_thrifty_{gpu}": (median["rule_serial"] - needless) / median["ours"],
        f"rule_overlapped_{gpu}": median["rule_serial"] / median["rule_overlapped"],
        f"peak_error_{gpu}": many.peak_bytes / lower(ours, job.facts).peak_bytes("gpu") - 1,
        f"peak_error_swapped_{gpu}": swapped.peak_bytes / lower(job.swapped, job.facts).peak_bytes("gpu") - 1,
        f"seconds_{gpu}": {name: {"median": median[name], "all": values} for name, values in seconds.items()},
        f"busy_s_{gpu}": busy,
        f"stall_s_per_step_{gpu}": stalls,
        f"link_bytes_s_{gpu}": profile.h2d_bytes_s,
        f"device_bytes_{gpu}": profile.gpu_memory_bytes,
        f"policy_{gpu}": in_words(ours),
    }


def in_words(policy: Policy) -> dict[str, Any]:
    """What a policy decides, in short."""
    kept = Counter(f"{x.internals} on {x.internals_home}" for x in policy.layers if x.internals != "none")
    return {
        "boundaries": policy.count_homes(), "internals": kept, "resident": sum(x.resident for x in policy.layers),
        "weight_slots": policy.weight_slots, "staging_slots": policy.staging_slots,
        "predicted_step_s": policy.predicted.step_s if policy.predicted else None,
    }  # fmt: skip


class Traced(NamedTuple):
    """Steps in a row: seconds of each, when their operations ran, and the most device bytes that were in use."""

    seconds: float
    timeline: Timeline
    peak_bytes: int


def traced(streamed: Streamed, step: Callable[[], None], steps: int) -> Traced:
    streamed.flush()
    streamed.trace()
    streamed.device.reset_peak()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    streamed.flush()
    seconds = (time.perf_counter() - start) / steps
    timeline = streamed.timeline()
    streamed.trace(on=False)
    return Traced(seconds, timeline, streamed.device.peak_bytes)


def run_tracing(pairs: int) -> dict[str, Any]:
    """Of the policy with most operations: all products swapped, links free."""
    job = Job.of("3090", QUICK_DEPTH)
    ops = len(lower(job.swapped, job.facts).ops)
    with job.open(job.swapped, Emulated(memory_bytes=1 << 34)) as streamed:
        step = streamed_step(streamed, job.batch)
        step()
        took: dict[bool, list[float]] = {False: [], True: []}
        for pair in range(pairs):
            for on in (pair % 2 == 0, pair % 2 != 0):
                took[on].append(one_step(streamed, step, tracing=on))
        op_s = tracing_seconds(streamed.device.recorder)
    longer = [on / off - 1 for on, off in zip(took[True], took[False], strict=True)]
    return {
        "tracing_cost": statistics.median(longer), "tracing_cost_95": confidence_of_median(longer),
        "tracing_cost_pairs": longer, "tracing_op_us": op_s * 1e6, "tracing_ops": ops,
        "tracing_step_s": min(took[False]), "tracing_reckoned": op_s * ops / min(took[False]),
    }  # fmt: skip


def one_step(streamed: Streamed, step: Callable[[], None], *, tracing: bool) -> float:
    """Seconds of a step with its update, from a moment at which nothing else is under way."""
    streamed.flush()
    start = time.perf_counter()
    streamed.trace(tracing)
    step()
    streamed.flush()
    seconds = time.perf_counter() - start
    streamed.trace(on=False)
    return seconds


def tracing_seconds(recorder: Recorder, rounds: int = 200, ops: int = 500) -> float:
    """Seconds that a recorded operation takes longer than one that is not."""
    least = {False: math.inf, True: math.inf}
    for number in range(2 * rounds):
        recorder.on = on = number % 2 == 0
        recorder.start()
        start = time.perf_counter()
        for _ in range(ops):
            recorder.add("forward.0@0", "compute", start, 1)
        least[on] = min(least[on], (time.perf_counter() - start) / ops)
    recorder.on = False
    return least[True] - least[False]


def confidence_of_median(values: list[float]) -> list[float]:
    """Two of the values, between which the median lies with 95 % confidence (binomial); of few, the extremes."""
    ordered, n = sorted(values), len(values)
    outside, k = 0.5**n, 0
    while k < n // 2 and outside + math.comb(n, k + 1) * 0.5**n <= 0.025:
        k += 1
        outside += math.comb(n, k) * 0.5**n
    return [ordered[k], ordered[n - 1 - k]]


def run_plain(repeats: int) -> dict[str, Any]:
    job = Job.of("3090", QUICK_DEPTH)
    with job.open(job.every_layer, "cpu") as streamed:
        steps = {"plain": plain_step(job), "streamed": streamed_step(streamed, job.batch)}
        seconds = measure(steps, repeats)
    return {"time_over_plain_hf": statistics.median(seconds["streamed"]) / statistics.median(seconds["plain"])}


def run(quick: bool, only: list[str]) -> dict[str, Any]:
    layers, repeats = (QUICK_DEPTH, 2) if quick else (DEPTH, 5)
    result = run_plain(3 if quick else 9) if "plain" in only else {}
    for gpu in (name for name in CASES if name in only):
        result |= run_gpu(gpu, layers, repeats)
    result |= run_tracing(4 if quick else 30) if "tracing" in only else {}
    errors = [abs(error) for name, error in result.items() if name.startswith("peak_error_")]
    result |= {"peak_error": max(errors)} if errors else {}
    machine = {"cpus": os.cpu_count(), "machine": platform.machine(), "load": os.getloadavg()[0]}
    return {**result, "layers": layers, "repeats": repeats, "machine": machine, "torch": version("torch")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats: under 50 s on two cores")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="these parts")
    options = parser.parse_args()
    result = run(options.quick, options.only)
    if options.json:
        print(json.dumps(result, indent=1))
        return
    for name, value in result.items():
        if isinstance(value, float):
            print(f"{name:28} {value:8.3f}")


if __name__ == "__main__":
    main()
