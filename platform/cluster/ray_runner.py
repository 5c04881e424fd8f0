"""Runs on Ray: one detached actor for each, which holds the GPU; how a run is doing is read from its files."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
import ray.exceptions
import ray.util
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ...jobs.errors import HardwareError, LazytrainError, Unreachable
from ...schedulers.hardware import hardware
from ..artifacts import PAUSE_FILE, STOP_FILE, JobFiles, read_json, read_record, write_json
from ..settings import Settings
from .inspecting import Inspector
from .local import DEVICE_LABEL, KIND_LABEL, NAME_LABEL, NAMESPACE, Connection
from .node_profiling import NodeProfiler
from .profiling import Profiler
from .run_host import RunHost
from .runs import HOST_LOST, Beat, Look, Machine, NodeReport, Outcome, Phase, RunOrder

_PREFIX = "run-"
_FRESH_S = 0.5


class RayRunner:
    """Implements `runs.Runner` on the Ray at ``address``, which goes on when this process ends."""

    def __init__(self, settings: Settings, address: str) -> None:
        self._settings = settings
        self._connection = Connection(settings, address)
        self._measuring: dict[str, Any] = {}
        self._alive: tuple[float, set[str]] = (float("-inf"), set())
        self._resuming: dict[str, Any] = {}
        self._inspectors: dict[str, Any] = {}
        self._inspecting: dict[str, Any] = {}

    def machines(self) -> list[Machine]:
        """The nodes that Ray sees alive and that bear our labels."""
        return [machine for machine, _ in self._nodes().values()]

    def inspect(self, machine: str, token_file: Path) -> NodeReport | None:
        """Ask an actor of ours on the node, which is made anew when it has died."""
        if machine not in self._inspecting:
            if machine not in self._inspectors:
                _, node_id = self._node(machine)
                remote = ray.remote(num_cpus=0, num_gpus=0, max_restarts=0, scheduling_strategy=_on(node_id))
                self._inspectors[machine] = remote(Inspector).remote()
            self._inspecting[machine] = self._inspectors[machine].look.remote(str(token_file))
        answer = self._inspecting[machine]
        if not ray.wait([answer], timeout=0)[0]:
            return None
        del self._inspecting[machine]
        try:
            found = ray.get(answer)
        except ray.exceptions.RayError:  # the actor or its node has died: asked again, if the node is still there
            del self._inspectors[machine]
            return None
        return NodeReport(versions=found["versions"], token=found["token"], devices=tuple(found["devices"]))

    def measure(self, machine: str) -> Mapping[str, Any] | None:
        """Measure a node in actors that hold all its GPUs; asked for again until the profile is there."""
        if machine not in self._measuring:
            self._measuring[machine] = self._begin_to_measure(machine)
        actors, answer = self._measuring[machine]
        if not ray.wait([answer], timeout=0)[0]:
            return None
        del self._measuring[machine]
        try:
            profile: dict[str, Any] = ray.get(answer).model_dump(mode="json")
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, LazytrainError):
                raise error.cause from error
            raise LazytrainError(f"measuring {machine} failed: {str(error.cause).splitlines()[0]}") from error
        except ray.exceptions.RayError:
            return None  # the actor or its node died; if the node is still there, it is measured again
        finally:
            for actor in actors:
                ray.kill(actor)
        return profile

    def _begin_to_measure(self, machine: str) -> tuple[list[Any], Any]:
        """The actors, one a GPU, and the answer of the one that leads."""
        found, node_id = self._node(machine)
        base = None
        if found.device == "emulated":
            base = hardware(found.kind).model_copy(update={"device": "emulated"})
        held: dict[str, Any] = {"num_gpus": 1, "max_restarts": 0, "scheduling_strategy": _on(node_id)}
        gpus = max(1, found.gpus)
        leader = ray.remote(num_cpus=1, max_concurrency=gpus + 1, **held)(NodeProfiler).remote(gpus)
        others = [ray.remote(num_cpus=0, **held)(Profiler).remote() for _ in range(gpus - 1)]
        reserve = int(self._settings.host_reserve)
        return [leader, *others], leader.measure_node.remote(base, self._settings.nvme_dir, reserve, others)

    def start(self, order: RunOrder) -> None:
        """Make the actor. Raises HardwareError when its node is not there any more."""
        _, node_id = self._node(order.node)
        files = JobFiles(order.run_dir)
        for asked in (files.stop, files.pause):
            asked.unlink(missing_ok=True)
        attempt = files.attempt(order.attempt)
        attempt.path.mkdir(parents=True, exist_ok=True)
        remote = ray.remote(RunHost).options(
            name=_PREFIX + order.claim,
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=0,
            num_gpus=0,  # it takes both for itself, in an actor of its own
            num_cpus=0,
            get_if_exists=True,
            scheduling_strategy=_on(node_id),
        )
        remote.remote(order.to_dict())
        write_json(attempt.started, {"claim": order.claim, "node": order.node})
        self._alive[1].add(order.claim)

    def runs(self) -> set[str]:
        """Claims of the actors that are alive or about to be."""
        return set(self._living())

    def look(self, claim: str, run_dir: Path, attempt: int) -> Look:
        """What the run's files say, and whether its actor is there."""
        files = JobFiles(run_dir).attempt(attempt)
        alive = claim in self._living()  # before the files: what ends in between is seen as ended
        beat = read_record(Beat, files.beat)
        figures = (beat.beat, beat.step) if beat is not None else (0, 0)
        if (ended := read_json(files.exit)) is not None:
            return Look(Phase.ENDED, *figures, outcome=_outcome(ended, read_record(Outcome, files.outcome), figures[1]))
        if not alive:
            return Look(Phase.LOST if files.started.exists() else Phase.ABSENT, *figures)
        if beat is None:
            return Look(Phase.STARTING)
        phase = Phase.PAUSED if beat.paused else Phase.RUNNING
        return Look(phase, *figures, beat.total_steps, beat.step_s, doing=beat.doing)

    def stop(self, claim: str, run_dir: Path) -> None:
        """Leave the file that the training looks for after each step."""
        (run_dir / STOP_FILE).touch()

    def pause(self, claim: str, run_dir: Path) -> None:
        """Leave the file that the training looks for after each step; its host then gives the GPU up."""
        (run_dir / PAUSE_FILE).touch()

    def resume(self, claim: str, run_dir: Path) -> None:
        """Have the host take the GPU again; it removes the file when it has it."""
        waiting = self._resuming.get(claim)
        if waiting is not None and not ray.wait([waiting], timeout=0)[0]:
            return
        self._resuming = {name: ref for name, ref in self._resuming.items() if name in self._alive[1]}
        try:
            host = ray.get_actor(_PREFIX + claim, NAMESPACE)
        except ValueError:  # it has ended: whoever looks will see
            return
        self._resuming[claim] = host.resume.remote()

    def switch(self, claim: str, run_dir: Path, policy: Mapping[str, Any]) -> None:
        """Leave the file that the training looks for after each step."""
        write_json(JobFiles(run_dir).next_policy, policy)

    def kill(self, claim: str) -> None:
        """Kill the actor: its keeper then ends the training process and all that it started."""
        try:
            ray.kill(ray.get_actor(_PREFIX + claim, NAMESPACE))
        except ValueError:  # it has ended
            return

    def close(self) -> None:
        """Disconnect; runs go on."""
        self._connection.close()

    def _living(self) -> set[str]:
        at, names = self._alive
        if time.monotonic() - at > _FRESH_S:
            try:
                listed = ray.util.list_named_actors()
            except (ray.exceptions.RayError, ConnectionError, RuntimeError) as error:
                raise _unreachable(error) from error
            names = {name.removeprefix(_PREFIX) for name in listed if name.startswith(_PREFIX)}
            self._alive = (time.monotonic(), names)
        return names

    def _nodes(self) -> dict[str, tuple[Machine, str]]:
        try:
            listed = ray.nodes()
        except (ray.exceptions.RayError, ConnectionError, RuntimeError) as error:
            raise _unreachable(error) from error
        found = [_machine(node) for node in listed if node["Alive"]]
        return {machine.name: (machine, node_id) for machine, node_id in found}

    def _node(self, name: str) -> tuple[Machine, str]:
        nodes = self._nodes()
        if name not in nodes:
            raise HardwareError(f"node {name} is not there", hint=f"there are: {', '.join(nodes) or 'none'}")
        return nodes[name]


def _unreachable(error: Exception) -> Unreachable:
    return Unreachable(f"Ray does not answer: {(str(error).splitlines() or [type(error).__name__])[0]}")


def _machine(node: Mapping[str, Any]) -> tuple[Machine, str]:
    labels, resources = node["Labels"], node["Resources"]
    machine = Machine(
        name=labels.get(NAME_LABEL) or node["NodeID"][:12],
        address=node["NodeManagerAddress"],
        kind=labels.get(KIND_LABEL, ""),
        device=labels.get(DEVICE_LABEL, "cuda"),
        cpus=resources.get("CPU", 0.0),
        gpus=int(resources.get("GPU", 0)) if KIND_LABEL in labels else 0,
    )
    return machine, node["NodeID"]


def _on(node_id: str) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node_id, soft=False)


def _outcome(ended: Mapping[str, Any], said: Outcome | None, step: int) -> Outcome:
    """What the training process said of its end, or, if it said nothing, what the keeper saw."""
    if said is not None:
        return said
    because = ended.get("because", "")
    if because == "host_lost":
        return Outcome(how="died", code=HOST_LOST, message="the process that held its GPU was gone", step=step)
    if because == "host_memory":
        used = ended.get("peak_host_bytes", 0)
        words = f"out of memory on host: the run used {used:,} bytes, more than its node has for jobs"
        return Outcome(how="died", code="out_of_memory", message=words, step=step)
    code, signal = (
        value if isinstance(value, int) else None for value in (ended.get("exit_code"), ended.get("signal"))
    )
    return Outcome(how="died", exit_code=code, signal=signal, step=step)
