"""One process of its own per case, so that each finds Ray as it is after its import."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.ray

SCRIPT = """
import json, os, subprocess, sys, time
from pathlib import Path
import ray, psutil
from lazytrain.platform.settings import Settings
from lazytrain.platform.cluster.local import LocalRay
from lazytrain.platform.cluster.inventory import list_nodes
os.environ.pop("OMP_NUM_THREADS", None)
before = dict(os.environ)
settings = Settings(home=Path(sys.argv[1]) / "home", ray_temp="/tmp")
# Children of this process that are none of Ray's; only where they can be ended again.
others = [subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL)] if sys.argv[2] == "end" else []
with LocalRay(settings, kind="NVIDIA GeForce RTX 3090", cpus=2) as local:
    if others:
        others.append(subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL))
        time.sleep(1.5)  # it is looked for children every half second
    children = [p for p in psutil.Process().children(recursive=True) if p.pid not in {o.pid for o in others}]
    listening = [c.laddr.ip for p in children for c in p.net_connections() if c.status == "LISTEN"]
    @ray.remote(num_cpus=0, num_gpus=1)
    class Holder:
        def pid(self): return os.getpid()
    holder = Holder.remote()
    facts = {
        "pids": [p.pid for p in children] + [ray.get(holder.pid.remote())],
        "listening": sorted(set(listening)),
        "kind": list_nodes()[0].kind,
        "store": ray.cluster_resources()["object_store_memory"],
        "token_mode": oct(settings.ray_token_path.stat().st_mode),
        "token_in_force": ray._raylet.get_authentication_mode() == ray._raylet.AuthenticationMode.TOKEN,
        "session": str(local._directory),
    }
    print(json.dumps(facts), flush=True)
    if sys.argv[2] == "wait":
        time.sleep(600)
    if sys.argv[2] == "fail":
        raise SystemExit(3)
restored = "OMP_NUM_THREADS" not in os.environ and all(os.environ.get(n) == before[n] for n in before)
answers = None
if others:  # a Ray calls back the process that makes an actor: here one that was in a Ray with tokens before
    with LocalRay(settings.model_copy(update={"ray_auth": "disabled"}), cpus=2):
        answers = ray.get(Holder.remote().pid.remote(), timeout=60) > 0
alone = [p.poll() is None for p in others]
print(json.dumps({"environment_restored": restored, "left_alone": alone, "answers": answers}), flush=True)
for other in others:
    other.kill()
"""


def start(tmp_path: Path, how: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path), how], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def facts_of(process: "subprocess.Popen[str]") -> dict[str, object]:
    assert process.stdout is not None
    found: dict[str, object] = json.loads(process.stdout.readline())
    return found


def assert_gone(facts: dict[str, object]) -> None:
    processes = []
    for pid in facts["pids"]:  # type: ignore[attr-defined]
        try:
            processes.append(psutil.Process(pid))
        except psutil.NoSuchProcess:
            continue
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert alive == []


@pytest.mark.slow
def test_loopback_token_label_small_store_a_clean_end_and_one_without_tokens_after_it(tmp_path: Path) -> None:
    process = start(tmp_path, "end")
    facts = facts_of(process)
    assert all(address.endswith("127.0.0.1") for address in facts["listening"])  # type: ignore[attr-defined]
    assert facts["kind"] == "NVIDIA-GeForce-RTX-3090"
    assert facts["store"] <= 2**30  # type: ignore[operator]
    assert facts["token_mode"] == "0o100600"
    assert facts["token_in_force"]
    assert facts_of(process) == {"environment_restored": True, "left_alone": [True, True], "answers": True}
    assert process.wait(30) == 0
    assert_gone(facts)
    assert not Path(str(facts["session"])).exists()


@pytest.mark.slow
@pytest.mark.parametrize(("how", "number"), [("fail", None), ("wait", signal.SIGINT), ("wait", signal.SIGKILL)])
def test_nothing_is_left_however_it_ends(tmp_path: Path, how: str, number: "signal.Signals | None") -> None:
    process = start(tmp_path, how)
    facts = facts_of(process)
    if number is not None:
        process.send_signal(number)
    process.wait(60)
    assert_gone(facts)
    assert not Path(str(facts["session"])).exists()
