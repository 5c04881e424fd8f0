"""What streaming costs: against plain training, against the links' own time, and against the MegaTrain rule.

    python tests/benchmarks/executor.py [--quick] [--json]

A Llama of eight layers in float32 on this machine's CPU. Its width and tokens give activations and weights the ratio
they have in Llama-3 8B with 6 x 1024 tokens, and the links are as slow against this CPU as real ones are against the
GPU: a layer's weights take 0.37 of its forward (RTX 3090 on PCIe 4, that batch) or 0.94 (H800 at 12 GB/s, a 7B model
with 23 x 1024 tokens). Every ratio compares medians of steps taken in turn in one run.

- ``time_over_plain_hf``: every layer checkpointed, links free, over the plain model with gradient checkpointing and
  fused AdamW.
- ``time_over_bound_*``: our policy's step over the larger of compute alone and the busiest link alone, in traced steps;
  ``tracing_cost_*`` is what the tracing adds to a step.
- ``speedup_over_megatrain_*``: tokens/s of our policy over the MegaTrain rule (blocks of four, optimizer after
  backward). ``rule_overlapped_*`` is the same rule with our overlapped optimizer: what is left is the policy's doing.
- ``peak_error_*``: the device's peak in a traced step over the program's, at the times at which its operations ran;
  ``peak_over_promise_*``: over the bound that holds at any times.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lazytrain.jobs.executor import Emulated, Streamed, stream
from lazytrain.jobs.introspect import model_facts
from lazytrain.jobs.model_facts import ModelFacts
from lazytrain.jobs.optim import HybridAdamW
from lazytrain.jobs.policy import LayerPolicy, Policy, Program, lower
from lazytrain.jobs.timeline import Timeline
from lazytrain.schedulers.baselines import megatrain
from lazytrain.schedulers.simulator.memory import peak_bytes

LAYERS, WIDTH, ROWS, LENGTH, VOCABULARY = 8, 512, 6, 118, 512
LOAD_OVER_FORWARD = {"3090": 0.37, "h800": 0.94}
KEPT = {"3090": ("matmuls", "host"), "h800": ("matmuls", "gpu")}
"""What our policy keeps on each: the 3090 has a link to spare, the H800 memory."""


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=int(WIDTH * 3.5), num_hidden_layers=LAYERS, num_attention_heads=8,
        num_key_value_heads=2, vocab_size=VOCABULARY, max_position_embeddings=LENGTH,
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


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


def plain_step(batch: dict[str, torch.Tensor]) -> Callable[[], None]:
    model = make_model()
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        model(**batch, use_cache=False).loss.backward()
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


def open_stream(facts: ModelFacts, policy: Policy, device: str | Emulated) -> Streamed:
    optimizer = HybridAdamW(lr=1e-4, max_grad_norm=1.0)
    return stream(make_model(), policy, device=device, optimizer=optimizer, facts=facts)


def our_policy(facts: ModelFacts, gpu: str) -> Policy:
    internals, home = KEPT[gpu]
    policy = Policy.from_homes(facts, ["gpu"] * (LAYERS + 1), weight_slots=3)
    layers = tuple(LayerPolicy(index=i, internals=internals, internals_home=home) for i in range(LAYERS))
    return policy.model_copy(update={"layers": layers})


def forward_seconds(facts: ModelFacts, batch: dict[str, torch.Tensor]) -> float:
    """Median seconds of one layer's forward here."""
    with open_stream(facts, Policy.from_homes(facts, ["gpu"] * (LAYERS + 1)), "cpu") as streamed:
        step = streamed_step(streamed, batch)
        step()
        streamed.trace()
        step()
        spans = streamed.timeline().spans
    return statistics.median(s.end_s - s.start_s for s in spans if s.op.startswith("forward.") and s.op[8].isdigit())


def run_gpu(gpu: str, facts: ModelFacts, batch: dict[str, torch.Tensor], repeats: int) -> dict[str, Any]:
    rate = facts.layers[0].weight_bytes / (LOAD_OVER_FORWARD[gpu] * forward_seconds(facts, batch))
    device = Emulated(memory_bytes=1 << 34, h2d_bytes_s=rate, d2h_bytes_s=rate)
    ours, rule = our_policy(facts, gpu), megatrain(facts, interval=4)
    opened = {name: open_stream(facts, policy, device) for name, policy in
              (("ours", ours), ("rule_serial", rule), ("rule_overlapped", rule))}  # fmt: skip
    steps = {name: streamed_step(s, batch, serial=name == "rule_serial") for name, s in opened.items()}
    seconds = measure(steps, repeats)
    many, one = traced(opened["ours"], steps["ours"], repeats), traced(opened["ours"], steps["ours"], 1)
    busy = {stream: busy_s / repeats for stream, busy_s in many.timeline.busy_s().items()}
    program = lower(ours, facts)
    stalls = {name: {k: round(v / (repeats + 1), 4) for k, v in s.stall_s().items()} for name, s in opened.items()}
    for streamed in opened.values():
        streamed.close()
    median = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        f"time_over_bound_{gpu}": many.seconds / max(busy.values()),
        f"speedup_over_megatrain_{gpu}": median["rule_serial"] / median["ours"],
        f"rule_overlapped_{gpu}": median["rule_serial"] / median["rule_overlapped"],
        f"peak_error_{gpu}": one.peak_bytes / peak_at(program, one.timeline) - 1,
        f"peak_over_promise_{gpu}": one.peak_bytes / program.peak_bytes("gpu"),
        f"tracing_cost_{gpu}": many.seconds / median["ours"] - 1,
        f"seconds_{gpu}": {name: {"median": median[name], "all": values} for name, values in seconds.items()},
        f"busy_s_{gpu}": busy,
        f"stall_s_per_step_{gpu}": stalls,
        f"link_bytes_s_{gpu}": rate,
    }


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


def peak_at(program: Program, timeline: Timeline) -> int:
    """Device bytes at most in use, by the program, when its operations run as they did."""
    spans = {span.op: span for span in timeline.spans}
    ran = [spans.get(op.id) for op in program.ops]
    starts, ends = [span.start_s if span else 0.0 for span in ran], [span.end_s if span else 0.0 for span in ran]
    return peak_bytes(program, starts, ends)["gpu"]


def run(quick: bool) -> dict[str, Any]:
    repeats = 3 if quick else 9
    facts = model_facts(make_model(), micro_batch=ROWS, sequence_length=LENGTH, dtype="float32")
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH))
    mask, positions = torch.ones_like(ids), torch.arange(LENGTH).repeat(ROWS, 1)
    mask[0, -1] = 0  # without any padding, the model leaves out the mask that facts allow for
    batch = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "labels": ids}
    every_layer = open_stream(facts, Policy.from_homes(facts, ["gpu"] * (LAYERS + 1)), "cpu")
    seconds = measure({"plain": plain_step(batch), "streamed": streamed_step(every_layer, batch)}, repeats)
    every_layer.close()
    result = {"time_over_plain_hf": statistics.median(seconds["streamed"]) / statistics.median(seconds["plain"])}
    for gpu in LOAD_OVER_FORWARD:
        result |= run_gpu(gpu, facts, batch, repeats)
    result["peak_error"] = max(abs(result["peak_error_3090"]), abs(result["peak_error_h800"]))
    machine = {"cpus": os.cpu_count(), "machine": platform.machine(), "load": os.getloadavg()[0]}
    return {**result, "repeats": repeats, "machine": machine, "torch": version("torch")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats: under 50 s on two cores")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    result = run(options.quick)
    if options.json:
        print(json.dumps(result, indent=1))
        return
    for name, value in result.items():
        if isinstance(value, float):
            print(f"{name:28} {value:8.3f}")


if __name__ == "__main__":
    main()
