"""One GPU, at most six minutes: what the links and the card can do, whether numbers are right, how fast training is.

    python tests/benchmarks/gpu.py [--device auto|cuda|cpu|emulated] [--model SHAPE] [--minutes 6] [--out gpu.json]
                                   [--compile] [--liger] [--quick] [--json]

Needs only torch, transformers, numpy, pydantic and this source tree (no installation; with a C++ compiler it builds the
optimizer's kernel first). It takes the largest of ``SHAPES`` whose state fits the host, with random weights, and the
batch and policy that the simulator finds fastest; with OR-Tools installed, the planner's. Runs, each in bf16:

- ``every_layer``: every boundary kept, on the GPU while it fits, then on the host; our overlapped optimizer;
- ``ours``: what planner or search decide, after the first run has shown how fast layers really are;
- ``megatrain``: one boundary in four, the optimizer after backward (their rule); ``megatrain_overlapped``, last and
  only if there is time, with our optimizer, so that it is clear what comes from where;
- ``plain_hf``: the model whole on the GPU, gradient checkpointing, torch's fused AdamW with bf16 states; if it fits.

``--device emulated`` and ``cpu`` run the same script on a toy, to prove the script.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import gc
import json
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT / ".links") not in sys.path:
    sys.path.insert(0, str(ROOT / ".links"))  # the source tree, whatever is installed

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel  # noqa: E402

from lazytrain.jobs.errors import DoesNotFit, LazytrainError  # noqa: E402
from lazytrain.jobs.executor import Emulated, Streamed, stream  # noqa: E402
from lazytrain.jobs.introspect import model_facts  # noqa: E402
from lazytrain.jobs.model_facts import ModelFacts  # noqa: E402
from lazytrain.jobs.optim import HybridAdamW, native  # noqa: E402
from lazytrain.jobs.policy import LayerPolicy, Policy  # noqa: E402
from lazytrain.platform.probe import host_memory, measure  # noqa: E402
from lazytrain.schedulers.baselines import every_layer, megatrain, shortages  # noqa: E402
from lazytrain.schedulers.hardware import Budgets, HardwareProfile, model_config  # noqa: E402
from lazytrain.schedulers.simulator import predict  # noqa: E402

SHAPES = ("qwen2.5-7b", "qwen2.5-3b", "toy")
TOY = {
    "model_type": "qwen2", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "tie_word_embeddings": False,
}  # fmt: skip
HOST_BYTES_PER_PARAMETER = 10.5
"""8.03 of state, and while weights are taken over the model's own copy beside it."""
HOST_RESERVE = 10 * 2**30
LENGTH, TOY_LENGTH = 1024, 64
BATCHES, TOY_BATCHES = (2, 4, 8, 16, 24, 32, 48), (2, 4)
ASSUMED_EFFICIENCY = 0.6
TIMED_STEPS, FEWEST_STEPS = 6, 2
EMULATED = Emulated(memory_bytes=2**30, h2d_bytes_s=4e9, d2h_bytes_s=4e9)

Make = Callable[[], PreTrainedModel]


def say(text: str) -> None:
    print(f"[{time.perf_counter() - STARTED:6.1f} s] {text}", file=sys.stderr, flush=True)


STARTED = time.perf_counter()


# ---- before anything runs


def build_kernel() -> str:
    """Compile the optimizer's kernel into the source tree if it is not there; what updates will use."""
    target = ROOT / f"jobs/optim/_kernel{sysconfig.get_config_var('EXT_SUFFIX')}"
    compiler = shutil.which("g++") or shutil.which("clang++")
    if not native.available() and compiler:
        tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
        flags = next(
            ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "FLAGS"
        )
        source = str(ROOT / "jobs/optim/kernel/kernel.cpp")
        command = [compiler, "-shared", "-fPIC", *flags, "-fopenmp", source, "-o", str(target)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            say(f"the kernel did not compile: {done.stderr.strip().splitlines()[-1]}")
        native._load.cache_clear()
    return native.describe()


def choose_shape(name: str | None, room: int) -> tuple[str, dict[str, Any]]:
    """The shape named, or the largest whose state fits ``room`` bytes of the host."""
    for shape in [name] if name else SHAPES:
        config = dict(TOY) if shape == "toy" else model_config(shape)
        facts = model_facts(dict(config), micro_batch=1, sequence_length=TOY_LENGTH, dtype="bfloat16")
        needed = facts.parameters * HOST_BYTES_PER_PARAMETER + (0 if shape == "toy" else HOST_RESERVE)
        if name or needed <= room:
            say(f"{shape}: {facts.parameters / 1e9:.2f} B parameters, about {needed / 2**30:.0f} GiB of the host")
            return shape, config
    raise SystemExit("not even the toy fits this host")


@contextlib.contextmanager
def no_initialisation() -> Iterator[None]:
    """Let modules leave their weights as the allocator gives them: filling billions of numbers one by one is slow."""
    kept = {name: getattr(torch.nn.init, name) for name in dir(torch.nn.init) if name.endswith("_")}
    initialise = PreTrainedModel.init_weights
    for name, function in kept.items():
        if callable(function) and not name.startswith("_"):
            setattr(torch.nn.init, name, lambda tensor, *_, **__: tensor)
    PreTrainedModel.init_weights = lambda self, *_, **__: None
    try:
        yield
    finally:
        PreTrainedModel.init_weights = initialise
        for name, function in kept.items():
            setattr(torch.nn.init, name, function)


def make_model(config: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """A model with random weights, made by copying one block of random numbers over and over."""
    values = dict(config)
    chosen = AutoConfig.for_model(values.pop("model_type"), **values)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with no_initialisation():
            model = AutoModelForCausalLM.from_config(chosen, dtype=dtype)
    finally:
        torch.set_default_dtype(default)
    model.tie_weights()
    block = (0.02 * torch.randn(4_000_037, generator=torch.Generator().manual_seed(0))).to(dtype)
    with torch.no_grad():
        for number, (name, parameter) in enumerate(model.named_parameters()):
            if parameter.ndim < 2:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                fill(parameter.view(-1), block, start=7919 * number % len(block))
    return model.train()


def fill(flat: torch.Tensor, block: torch.Tensor, start: int) -> None:
    """Copy ``block`` into ``flat`` from ``start`` on, as often as it takes."""
    done = 0
    while done < len(flat):
        part = block[start : start + len(flat) - done]
        flat[done : done + len(part)] = part
        done, start = done + len(part), 0


def measured_profile(kind: str) -> HardwareProfile:
    """This machine; for ``emulated``, with the emulated card's memory and links."""
    profile = measure(host_reserve_bytes=0).profile
    changes: dict[str, Any] = {"efficiency": ASSUMED_EFFICIENCY}
    if kind == "emulated":
        changes |= {
            "device": "emulated", "gpu_memory_bytes": EMULATED.memory_bytes,
            "h2d_bytes_s": EMULATED.h2d_bytes_s, "d2h_bytes_s": EMULATED.d2h_bytes_s,
        }  # fmt: skip
    return profile.model_copy(update=changes)


# ---- right numbers


def parity(device: str | Emulated) -> dict[str, Any]:
    """Loss and gradients of a small float32 model: streamed with a policy of every kind, against plain PyTorch."""
    place = "cuda" if device == "cuda" else "cpu"
    batch = make_batch(TOY, 3, TOY_LENGTH, place)
    facts = model_facts(dict(TOY), micro_batch=3, sequence_length=TOY_LENGTH, dtype="float32")
    plain = make_model(TOY, torch.float32).to(place)
    loss = plain(**batch, use_cache=False).loss
    loss.backward()
    wanted = {name: p.grad.cpu() for name, p in plain.named_parameters() if p.grad is not None}
    homes = ["host", "gpu", "recompute", "nvme", "gpu", "host", "gpu"]
    kept = [("none", "gpu"), ("none", "gpu"), ("none", "gpu"), ("matmuls", "host"), ("all", "host"), ("matmuls", "gpu")]
    layers = tuple(LayerPolicy(index=i, internals=what, internals_home=home) for i, (what, home) in enumerate(kept))
    policy = Policy.from_homes(facts, homes).model_copy(update={"layers": layers}).parked(gradients=[5])
    with stream(make_model(TOY, torch.float32), policy, device=device, facts=facts) as streamed:
        ours = streamed.model(**batch).loss
        ours.backward()
        got = streamed.gradients()
    worst = max(((got[n] - g).abs().max() / g.abs().max().clamp_min(1e-30)).item() for n, g in wanted.items())
    return {
        "loss_difference": abs(ours.item() - loss.item()),
        "worst_gradient_error": worst,
        "bit_equal": all(torch.equal(got[name], gradient) for name, gradient in wanted.items()),
    }


def make_batch(config: dict[str, Any], rows: int, length: int, place: str = "cpu") -> dict[str, torch.Tensor]:
    ids = torch.randint(0, config["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(rows))
    return {"input_ids": ids.to(place), "labels": ids.to(place)}


# ---- policies


def fits(policy: Policy, facts: ModelFacts, profile: HardwareProfile) -> bool:
    return not shortages(policy, facts, Budgets.of(profile))


def fastest(
    candidates: Callable[[ModelFacts], Iterator[Policy]], by_batch: list[ModelFacts], profile: HardwareProfile
) -> tuple[Policy, ModelFacts] | None:
    """The candidate with the most tokens per second, over all batches; None if none fits."""
    best, speed = None, 0.0
    for facts in by_batch:
        for policy in candidates(facts):
            if fits(policy, facts, profile):
                rate = predict(policy, facts, profile).tokens_per_s
                if rate > speed:
                    best, speed = (policy, facts), rate
    return best


def every_layer_candidates(profile: HardwareProfile) -> Callable[[ModelFacts], Iterator[Policy]]:
    def candidates(facts: ModelFacts) -> Iterator[Policy]:
        with contextlib.suppress(DoesNotFit):
            yield every_layer(facts, profile)

    return candidates


def our_candidates(profile: HardwareProfile, compiled: bool) -> Callable[[ModelFacts], Iterator[Policy]]:
    """The planner's answer where OR-Tools is there; otherwise internals of the last layers, on either side.

    Compiled layers cannot keep their products, of which the planner knows nothing.
    """
    if compiled:
        return searched(profile, (("all", "gpu"), ("all", "host")))
    try:
        from lazytrain.schedulers.planner import plan
    except ImportError:
        return searched(profile, (("matmuls", "gpu"), ("all", "gpu"), ("matmuls", "host")))

    def candidates(facts: ModelFacts) -> Iterator[Policy]:
        answer = plan(facts, profile, solve_seconds=4.0)
        if answer.policy is not None:
            yield answer.policy

    return candidates


def searched(
    profile: HardwareProfile, choices: tuple[tuple[str, str], ...]
) -> Callable[[ModelFacts], Iterator[Policy]]:
    def candidates(facts: ModelFacts) -> Iterator[Policy]:
        count = len(facts.layers)
        for base in every_layer_candidates(profile)(facts):
            for slots in (2, 3):
                yield base.model_copy(update={"weight_slots": slots})
                for kept, home in choices:
                    for share in (1, 2, 4, 8):
                        first = count - count // share
                        layers = tuple(
                            LayerPolicy(index=i, internals=kept if i >= first else "none", internals_home=home)
                            for i in range(count)
                        )
                        yield base.model_copy(update={"weight_slots": slots, "layers": layers})

    return candidates


def rule_candidates(facts: ModelFacts) -> Iterator[Policy]:
    yield megatrain(facts, interval=4)


# ---- runs


def timed(step: Callable[[], None], until: float) -> float:
    """Median-free mean seconds of a step, after one to warm up; fewer steps when time runs out."""
    step()
    settle()
    begun, steps = time.perf_counter(), 0
    while steps < TIMED_STEPS and (steps < FEWEST_STEPS or time.perf_counter() < until):
        step()
        steps += 1
    settle()
    return (time.perf_counter() - begun) / steps


def settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def streamed_run(
    model: PreTrainedModel,
    config: dict[str, Any],
    chosen: tuple[Policy, ModelFacts],
    device: str | Emulated,
    until: float,
    *,
    serial: bool = False,
    options: dict[str, bool],
) -> dict[str, Any]:
    policy, facts = chosen
    batch = make_batch(config, facts.micro_batch, facts.sequence_length)
    optimizer = HybridAdamW(lr=1e-6, max_grad_norm=1.0)
    begun = time.perf_counter()
    with stream(model, policy, device=device, optimizer=optimizer, facts=facts, **options) as streamed:
        say(f"  weights taken over in {time.perf_counter() - begun:.0f} s")
        streamed.device.reset_peak()
        seconds = timed(lambda: one_step(streamed, batch, serial), until)
        streamed.flush()
        return {
            **result(facts, seconds, streamed.device.peak_bytes),
            "promised_gpu_bytes": predict_peak(policy, facts),
            "host_bytes": sum(streamed.host_bytes().values()),
            "stall_s": streamed.stall_s(),
        }


def predict_peak(policy: Policy, facts: ModelFacts) -> int:
    from lazytrain.jobs.policy import lower

    return lower(policy, facts).peak_bytes("gpu")


def one_step(streamed: Streamed, batch: dict[str, torch.Tensor], serial: bool) -> None:
    streamed.model(**batch).loss.backward()
    streamed.step()
    if serial:
        streamed.flush()


def plain_run(
    model: PreTrainedModel, config: dict[str, Any], facts: ModelFacts, place: str, until: float
) -> dict[str, Any]:
    """Plain training of the whole model on the device; its weights come back to the host at the end."""
    model.to(place)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    batch = make_batch(config, facts.micro_batch, facts.sequence_length, place)
    if place == "cuda":
        torch.cuda.reset_peak_memory_stats()

    def step() -> None:
        optimizer.zero_grad()
        model(**batch, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    try:
        seconds = timed(step, until)
        return result(facts, seconds, torch.cuda.max_memory_allocated() if place == "cuda" else 0)
    finally:
        optimizer.zero_grad()
        model.gradient_checkpointing_disable()
        model.to("cpu")


def result(facts: ModelFacts, seconds: float, peak: int) -> dict[str, Any]:
    rate = facts.tokens / seconds
    return {
        "micro_batch": facts.micro_batch,
        "step_s": seconds,
        "tokens_per_s": rate,
        "tflops_6n": 6 * facts.parameters * rate / 1e12,
        "peak_gpu_bytes": peak,
    }


class Session:
    """The runs of one machine, one after the other until the time is up."""

    def __init__(
        self, device: str | Emulated, config: dict[str, Any], minutes: float, options: dict[str, bool]
    ) -> None:
        self.device, self.config, self.options = device, config, options
        self.end = STARTED + 60 * minutes
        self.runs: list[dict[str, Any]] = []
        self.longest_s = 0.0
        begun = time.perf_counter()
        self.model = make_model(config)
        say(f"random weights made in {time.perf_counter() - begun:.0f} s")

    def add(self, name: str, run: Callable[[float], dict[str, Any]] | None, why_not: str = "") -> dict[str, Any]:
        """Do one run, unless another as long as the longest would end too late, and note what came of it."""
        left = self.end - time.perf_counter()
        entry: dict[str, Any] = {"policy": name}
        if run is None or left < 1.1 * self.longest_s:
            entry["skipped"] = why_not or f"only {left:.0f} s were left"
        else:
            begun = time.perf_counter()
            try:
                entry |= run(begun + max(10.0, left / 4))
            except (torch.OutOfMemoryError, LazytrainError) as error:
                entry["skipped"] = str(error).splitlines()[0]
            self.longest_s = max(self.longest_s, time.perf_counter() - begun)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self.runs.append(entry)
        say(
            f"{name}: "
            + entry.get(
                "skipped", f"{entry.get('tokens_per_s', 0):.0f} tokens/s, {entry.get('tflops_6n', 0):.1f} TFLOPS"
            )
        )
        return entry

    def streamed(self, name: str, chosen: tuple[Policy, ModelFacts] | None, **how: Any) -> dict[str, Any]:
        def run(until: float) -> dict[str, Any]:
            assert chosen is not None
            return streamed_run(self.model, self.config, chosen, self.device, until, options=self.options, **how)

        return self.add(name, run if chosen else None, "" if chosen else "no batch fits")


def plain_of_any_batch(session: Session, largest: ModelFacts, by_batch: list[ModelFacts], place: str) -> dict[str, Any]:
    """Plain training with the largest of these batches that its memory allows."""

    def attempt(until: float) -> dict[str, Any]:
        sizes = [facts for facts in reversed(by_batch) if facts.micro_batch <= largest.micro_batch]
        for facts in sizes[:-1]:
            with contextlib.suppress(torch.OutOfMemoryError):
                return plain_run(session.model, session.config, facts, place, until)
            gc.collect()
            torch.cuda.empty_cache()
        return plain_run(session.model, session.config, sizes[-1], place, until)

    return session.add("plain_hf", attempt)


def train_all(session: Session, by_batch: list[ModelFacts], profile: HardwareProfile, place: str) -> HardwareProfile:
    chosen = fastest(every_layer_candidates(profile), by_batch, profile)
    first = session.streamed("every_layer", chosen)
    if chosen and "step_s" in first:
        expected = predict(chosen[0], chosen[1], profile).step_s
        efficiency = min(1.0, max(0.02, profile.efficiency * expected / first["step_s"]))
        profile = profile.model_copy(update={"efficiency": efficiency})
        say(f"layers reach {efficiency:.2f} of the card's product rate")
    ours = fastest(our_candidates(profile, "compile" in session.options), by_batch, profile)
    rule = fastest(rule_candidates, by_batch, profile)
    session.streamed("ours", ours)
    session.streamed("megatrain", rule, serial=True)
    plain_of_any_batch(session, (ours or chosen or ("", by_batch[0]))[1], by_batch, place)
    session.streamed("megatrain_overlapped", rule)
    return profile


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    kind = arguments.device if arguments.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    device: str | Emulated = EMULATED if kind == "emulated" else kind
    toy = kind != "cuda" or arguments.quick
    optimizer = build_kernel()
    profile = measured_profile(kind)
    say(f"{profile.name}: links {profile.h2d_bytes_s / 1e9:.1f} and {profile.d2h_bytes_s / 1e9:.1f} GB/s; {optimizer}")
    checked = parity(device)
    say(f"parity: {checked}")
    shape, config = choose_shape(arguments.model or ("toy" if toy else None), host_memory().free_bytes)
    length, batches = (TOY_LENGTH, TOY_BATCHES) if shape == "toy" else (LENGTH, BATCHES)
    by_batch = [model_facts(dict(config), micro_batch=n, sequence_length=length, dtype="bfloat16") for n in batches]
    options = {name: True for name in ("compile", "liger") if getattr(arguments, name)}
    session = Session(device, config, arguments.minutes, options)
    profile = train_all(session, by_batch, profile, "cuda" if kind == "cuda" else "cpu")
    return {
        "device": profile.name if kind == "cuda" else kind,
        "model": shape,
        "parameters": by_batch[0].parameters,
        "sequence_length": length,
        "copy_gbps": {"h2d": profile.h2d_bytes_s / 1e9, "d2h": profile.d2h_bytes_s / 1e9},
        "matmul_tflops": profile.matmul_flops["bfloat16"] / 1e12,
        "parity": checked,
        "runs": session.runs,
        "layer_efficiency": profile.efficiency,
        "optimizer": optimizer,
        "options": options,
        "update_parameters_s": profile.update_parameters_s,
        "seconds": time.perf_counter() - STARTED,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu", "emulated"))
    parser.add_argument("--model", help="shape of machines.json, or toy; default: the largest that fits the host")
    parser.add_argument("--minutes", type=float, default=6.0, help="no run begins that would end later")
    parser.add_argument("--out", type=Path, default=Path("gpu.json"), help="where the result is saved")
    parser.add_argument("--compile", action="store_true", help="compile the layers with torch.compile")
    parser.add_argument("--liger", action="store_true", help="use Liger's kernels, if installed")
    parser.add_argument("--quick", action="store_true", help="a toy model: under 50 s")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    found = run(arguments)
    arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if arguments.json:
        print(json.dumps(found, indent=1))
        return
    for entry in found["runs"]:
        told = entry.get("skipped") or f"{entry['tokens_per_s']:10.0f} tokens/s {entry['tflops_6n']:8.2f} TFLOPS (6N)"
        print(f"{entry['policy']:12} {told}")


if __name__ == "__main__":
    main()
