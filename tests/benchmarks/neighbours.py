"""Do two jobs on one node reach what their joint plan promises?

    python tests/benchmarks/neighbours.py [--quick] [--json]

Two processes train a Llama each, on emulated GPUs under one PCIe root: both take their turns on one emulated link in
each direction, a chunk at a time, as two DMA engines do. Where the two ask for more than the link gives, both slow
down. `lazytrain.schedulers.together.plan_together` plans the pair and says how fast each will be; ``reached`` is
measured over promised tokens per second. ``worst`` is the lowest of all: the promise is kept from 0.9 on.

Each job has one core of its own, which also does what a real node's CPU does beside the GPU. Compute is calibrated by
steps in which both train, each with a link of its own and by the plan that it would have alone, because two cores slow
each other down and two GPUs do not. What is left to be wrong is what the jobs share: the links.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import platform
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from multiprocessing.connection import Connection
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in every training process of ours

import torch
from simulator import Case as Prepared
from simulator import base_profile, calibrated, make_model, step
from transformers import LlamaConfig

from lazytrain.jobs.errors import LazytrainError
from lazytrain.jobs.executor import Emulated, stream
from lazytrain.jobs.executor.devices.base import ThreadStream
from lazytrain.jobs.introspect import model_facts
from lazytrain.jobs.optim import HybridAdamW
from lazytrain.jobs.policy import Policy, lower
from lazytrain.platform.planning import Observation, calibrate
from lazytrain.schedulers.baselines import keep_all, megatrain
from lazytrain.schedulers.hardware import HardwareProfile
from lazytrain.schedulers.options import Planned
from lazytrain.schedulers.placement import Gpu, NodeState
from lazytrain.schedulers.planner import plan
from lazytrain.schedulers.together import plan_together

CHUNK_S = 1e-3
"""Length of a turn on the link: in shorter ones, much would be lost to sleeping for longer than was asked."""
TURNS = 4
"""How many turns each has ahead, as DMA engines have queues: a thread that wakes up late does not lose its turn."""
SWITCH_S = 5e-4
"""Python's threads take turns of 5 ms otherwise, and links need no interpreter."""
WARM_UP_S = 1.0
LINKS = ("h2d_bytes_s", "d2h_bytes_s")


@dataclass(frozen=True)
class Job:
    """A Llama, and the time that its layers' weights take on the link, in forwards of a layer."""

    width: int
    layers: int
    rows: int
    length: int
    budget: float
    """Device memory, from what the MegaTrain rule needs (0) to what keeping everything needs (1)."""


@dataclass(frozen=True)
class Pair:
    """Two jobs, and how full the link is: seconds of a layer's weights over those of its forward, for the first."""

    name: str
    jobs: tuple[Job, Job]
    load_over_forward: float


PAIRS = (
    Pair("room for both", (Job(256, 6, 4, 128, 0.5), Job(256, 6, 4, 128, 0.5)), 0.4),
    Pair("alike, link full", (Job(256, 6, 4, 128, 0.5), Job(256, 6, 4, 128, 0.5)), 1.6),
    Pair("large beside small", (Job(384, 6, 4, 96, 0.3), Job(192, 8, 4, 96, 0.3)), 1.2),
    Pair("hungry beside modest", (Job(256, 8, 2, 96, 0.2), Job(256, 6, 8, 128, 0.6)), 1.4),
)


class SharedLink:
    """A link that several processes use: whoever is next has it for one chunk."""

    def __init__(self, context: Any, bytes_per_s: float) -> None:
        self._free_at = context.Value("d", 0.0)
        self._bytes_per_s, self._chunk = bytes_per_s, max(1, int(bytes_per_s * CHUNK_S))

    def take(self, nbytes: int, ends: float) -> None:
        """Returns when as many bytes have passed that began at ``ends``, by the clock that all processes have."""
        turns: deque[float] = deque()
        while nbytes > 0 or turns:
            if nbytes > 0 and len(turns) < TURNS:
                chunk = min(nbytes, self._chunk)
                nbytes -= chunk
                with self._free_at.get_lock():
                    ends = self._free_at.value = max(ends, self._free_at.value) + chunk / self._bytes_per_s
                turns.append(ends)
            elif (left := turns.popleft() - time.perf_counter()) > 0:
                time.sleep(left)


def use_shared(links: dict[str, SharedLink]) -> None:
    """From now on every emulated link of this process is one of these."""

    def do(self: ThreadStream, name: str, work: Any, nbytes: int) -> None:
        start = time.perf_counter()
        work()
        if self.name in links and nbytes:
            links[self.name].take(nbytes, start)
        self._recorder.add(name, self.name, start, nbytes)

    ThreadStream._do = do  # type: ignore[method-assign]


def prepare(job: Job, base: HardwareProfile, load_over_forward: float, rate: float | None) -> Prepared:
    """The job's model and batch, and a link that has ``rate`` or fits this job."""
    config = LlamaConfig(
        hidden_size=job.width, intermediate_size=3 * job.width, num_hidden_layers=job.layers, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=256, max_position_embeddings=job.length,
    )  # fmt: skip
    facts = model_facts(make_model(config), micro_batch=job.rows, sequence_length=job.length, dtype="float32")
    layer = facts.layers[0]
    rate = rate or layer.weight_bytes / (load_over_forward * layer.forward_flops / base.flops("float32"))
    ids = torch.randint(0, 256, (job.rows, job.length))
    mask = torch.ones_like(ids)
    mask[0, -1] = 0  # without any padding, models leave out the mask that facts allow for
    positions = torch.arange(job.length).repeat(job.rows, 1)
    batch = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "labels": ids}
    return Prepared(config, batch, facts, base.model_copy(update=dict.fromkeys(LINKS, rate)))


def child(place: int, job: Job, prepared_as: tuple[HardwareProfile, float], pipe: Connection, links: Any) -> None:
    """Calibrate and hand over the profile; then train by a policy, hand over the rate, and again on shared links."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[place % len(os.sched_getaffinity(0))]})
    torch.set_num_threads(1)
    torch.manual_seed(place)
    sys.setswitchinterval(SWITCH_S)
    base, rate = prepared_as
    case = prepare(job, base, 1.0, rate)
    pipe.send("ready")
    pipe.recv()
    pipe.send(calibrated(case)[0])
    own = {name: SharedLink(mp.get_context("spawn"), rate) for name in links}
    for wires in (own, links):
        use_shared(wires)
        pipe.send(train(case, pipe))


def train(case: Prepared, pipe: Connection) -> tuple[float, int]:
    """Tokens per second, and the steps that were counted."""
    policy, budget, seconds = pipe.recv()
    device, optimizer = Emulated(memory_bytes=budget), HybridAdamW(lr=1e-4, max_grad_norm=1.0)
    with stream(make_model(case.model), policy, device=device, optimizer=optimizer, facts=case.facts) as streamed:
        step(streamed, case)
        pipe.send("ready")
        pipe.recv()
        begun, ends = time.perf_counter(), []
        while time.perf_counter() - begun < seconds + 2 * WARM_UP_S:
            step(streamed, case)
            ends.append(time.perf_counter() - begun)
        streamed.flush()
    # Both train from before the first of these steps until after the last.
    counted = [end for end in ends if WARM_UP_S <= end <= seconds + WARM_UP_S]
    steps = len(counted) - 1
    return case.facts.tokens * steps / (counted[-1] - counted[0]), steps


class Bench:
    """Two processes with a job each, until `close`."""

    def __init__(self, pair: Pair, base: HardwareProfile) -> None:
        context = mp.get_context("spawn")
        self.cases = [prepare(job, base, pair.load_over_forward, None) for job in pair.jobs]
        self.rate = self.cases[0].profile.h2d_bytes_s
        self.budgets = [_budget(case, job) for case, job in zip(self.cases, pair.jobs, strict=True)]
        links = {name: SharedLink(context, self.rate) for name in ("h2d", "d2h")}
        self._pipes, self._processes = [], []
        self.solver_failures: list[str] = []
        for place, job in enumerate(pair.jobs):
            ours, theirs = context.Pipe()
            arguments = (place, job, (base, self.rate), theirs, links)
            process = context.Process(target=child, args=arguments, daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        self._both_go_on()
        self.profiles = [pipe.recv() for pipe in self._pipes]

    def plan_on(self, place: int, machine: HardwareProfile) -> Planned:
        """The job's plan within its budget."""
        facts = self.cases[place].facts
        ask = partial(plan, facts, machine, gpu_memory=self.budgets[place], solve_seconds=2)
        try:
            return facts, ask()
        except LazytrainError as error:  # HiGHS gives up on some models; what it is that fails is told, and not hidden
            self.solver_failures.append(error.message)
            return facts, ask(backend="gscip")

    def run(self, policies: Sequence[Policy | None], seconds: float) -> list[tuple[float, int]]:
        """Both train by these policies at the same time; tokens per second and steps of each."""
        for pipe, policy, budget in zip(self._pipes, policies, self.budgets, strict=True):
            pipe.send((policy, budget, seconds))
        self._both_go_on()
        return [pipe.recv() for pipe in self._pipes]

    def calibrate(self, seconds: float) -> None:
        """Let predictions of compute be those of jobs that share no link: what else they share, a server would not."""
        alone = [self.plan_on(place, profile)[1].policy for place, profile in enumerate(self.profiles)]
        for place, (tokens_per_s, _) in enumerate(self.run(alone, seconds)):
            facts, policy = self.cases[place].facts, alone[place]
            assert policy is not None
            seen = Observation(facts, policy, facts.tokens / tokens_per_s)
            self.profiles[place] = calibrate(self.profiles[place], [seen])

    def close(self) -> None:
        for process in self._processes:
            process.join(30)

    def _both_go_on(self) -> None:
        for pipe in self._pipes:
            assert pipe.recv() == "ready"
        for pipe in self._pipes:
            pipe.send("go")


def measure(pair: Pair, base: HardwareProfile, seconds: float) -> dict[str, Any]:
    """Promised and reached of both jobs."""
    bench = Bench(pair, base)
    bench.calibrate(seconds / 2)
    node = NodeState(
        name="node", kind="here", gpus=(Gpu(id="0", pcie_root="r"), Gpu(id="1", pcie_root="r")), host_bytes=1 << 40,
        pcie_bytes_s=bench.rate,
    )  # fmt: skip
    joint = plan_together(
        [partial(bench.plan_on, place) for place in (0, 1)],
        bench.profiles,
        node,
        ["r", "r"],
    )
    reached = bench.run([answer.policy for _, answer in joint.planned], seconds)
    bench.close()
    return {
        "pair": pair.name,
        "link_bytes_s": bench.rate,
        "shares": joint.speeds,
        "promised_tokens_per_s": joint.tokens_per_s,
        "reached_tokens_per_s": [tokens_per_s for tokens_per_s, _ in reached],
        "steps": [steps for _, steps in reached],
        "solver_failures": bench.solver_failures,
        "reached": [got / promised for (got, _), promised in zip(reached, joint.tokens_per_s, strict=True)],
    }


def _budget(case: Prepared, job: Job) -> int:
    least, most = (lower(rule(case.facts), case.facts).peak_bytes("gpu") for rule in (megatrain, keep_all))
    return int(least + job.budget * (most - least))


def run(*, quick: bool) -> dict[str, Any]:
    """All pairs."""
    torch.set_num_threads(1)
    base = base_profile()
    found = []
    for pair in PAIRS[1:2] if quick else PAIRS:
        found.append(measure(pair, base, 4.0 if quick else 8.0))
        print(json.dumps(found[-1]), file=sys.stderr)
    every = [share for pair in found for share in pair["reached"]]
    return {
        "worst": min(every),
        "median": statistics.median(every),
        "pairs": found,
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "load": os.getloadavg(),
        "versions": {"python": platform.python_version(), "torch": version("torch"), "ortools": version("ortools")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one pair, for seconds")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    result = run(quick=options.quick)
    if options.json:
        json.dump(result, sys.stdout, indent=1)
        print()
        return
    for pair in result["pairs"]:
        print(f"{pair['pair']:22} reached {', '.join(f'{share:.3f}' for share in pair['reached'])} of the promise")
    print(f"worst {result['worst']:.3f}")


if __name__ == "__main__":
    main()
