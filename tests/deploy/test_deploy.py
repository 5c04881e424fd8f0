"""The files under ``deploy/`` say what the code says, and are well-formed as far as that shows without an engine."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lazytrain.platform.cluster.local import KIND_LABEL
from lazytrain.platform.settings import PREFIX, Settings
from lazytrain.schedulers.hardware import known_gpus

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
FILES = sorted(path for path in DEPLOY.rglob("*") if path.is_file())
DEFAULTS = Settings()
WITH_SERVICE = pytest.mark.skipif(
    "api_port" not in Settings.model_fields, reason="this branch has the platform without its API"
)
"""The settings of the service come with it."""
IMAGE = re.compile(r"lazytrain-(?:server|worker|mlflow):[\w.]+")


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def documents(folder: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every YAML document of a folder with the name of its file."""
    for path in sorted((DEPLOY / folder).glob("*.yaml")):
        for document in yaml.safe_load_all(text_of(path)):
            yield path.name, document


def manifests(kind: str) -> list[dict[str, Any]]:
    return [document for _, document in documents("kuberay") if document["kind"] == kind]


def pods() -> list[dict[str, Any]]:
    """All pod templates of the Kubernetes manifests."""
    templates = [each["spec"]["template"] for kind in ("Deployment", "StatefulSet") for each in manifests(kind)]
    ray = manifests("RayCluster")[0]["spec"]
    groups = [ray["headGroupSpec"], *ray["workerGroupSpecs"]]
    return [template["spec"] for template in [*templates, *(group["template"] for group in groups)]]


def test_there_is_no_python() -> None:
    assert FILES
    assert not [path for path in FILES if path.suffix == ".py" or text_of(path).startswith("#!/usr/bin/env python")]


@pytest.mark.parametrize("path", [p for p in FILES if p.suffix in (".sh", ".sbatch")], ids=lambda path: path.name)
def test_bash_reads_every_script(path: Path) -> None:
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "set -euo pipefail" in text_of(path)


def node_command(tmp_path: Path, *arguments: str, gpus: str = "", **environment: str) -> tuple[int, list[str], str]:
    """What ``node.sh`` would run, on a machine whose GPUs have these names."""
    tools = {"nvidia-smi": f"printf '%s' '{gpus}'", "ray": 'for word in "$@"; do echo "$word"; done; env | grep ^RAY_'}
    for name, body in tools.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", **environment}
    script = ["bash", str(DEPLOY / "ray" / "node.sh"), *arguments]
    done = subprocess.run(script, capture_output=True, text=True, env=variables, check=False)
    return done.returncode, done.stdout.splitlines(), done.stderr


def test_a_worker_says_what_it_is(tmp_path: Path) -> None:
    code, words, _ = node_command(
        tmp_path, "worker", gpus="NVIDIA GeForce RTX 3090\nNVIDIA GeForce RTX 3090\n", NODE_HEAD="h", NODE_NAME="box"
    )
    assert code == 0
    given = dict(zip(words[1::2], words[2::2], strict=False))
    assert given["--address"] == "h:6379"
    assert given["--num-gpus"] == "2"
    assert given["--labels"] == f"lt/node-name=box,{KIND_LABEL}=RTX-3090,lt/device=cuda"
    assert int(given["--object-store-memory"]) == DEFAULTS.ray_object_store
    assert f"RAY_memory_usage_threshold={DEFAULTS.ray_memory_threshold}" in words


def test_a_head_without_gpus_has_no_kind(tmp_path: Path) -> None:
    code, words, _ = node_command(tmp_path, "head", NODE_NAME="head", NODE_BLOCK="--block")
    assert code == 0
    assert words[:4] == ["start", "--head", "--port", "6379"]
    assert "lt/node-name=head" in words
    assert "--block" in words


def test_unlike_gpus_and_wrong_roles_are_refused(tmp_path: Path) -> None:
    code, _, said = node_command(tmp_path, "worker", gpus="NVIDIA H800\nNVIDIA L4\n", NODE_HEAD="h")
    assert (code, "unlike GPUs" in said) == (2, True)
    assert node_command(tmp_path, "chief")[0] == 2
    assert node_command(tmp_path, "worker")[0] != 0, "a worker needs the address of the head"


def test_the_launcher_file_starts_every_node_with_the_script() -> None:
    lab = dict(documents("ray"))["lab.yaml"]
    workers = lab["provider"]["worker_ips"]
    assert lab["provider"]["type"] == "local"
    assert len(set(workers)) == len(workers) == lab["min_workers"] == lab["max_workers"]
    assert "node.sh head" in lab["head_start_ray_commands"][-1]
    assert "NODE_HEAD=$RAY_HEAD_IP" in lab["worker_start_ray_commands"][-1]


@WITH_SERVICE
@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(DEPLOY)))
def test_every_variable_is_a_setting(path: Path) -> None:
    names = set(re.findall(rf"\b{PREFIX}([A-Z_]+)\b", text_of(path)))
    assert {name.lower() for name in names} <= set(Settings.model_fields)


@WITH_SERVICE
def test_the_api_has_its_port_everywhere() -> None:
    port = str(DEFAULTS.api_port)  # type: ignore[attr-defined]
    assert f"EXPOSE {port}" in text_of(DEPLOY / "images" / "server.Dockerfile")
    compose = dict(documents("compose"))["compose.yaml"]
    assert compose["services"]["server"]["environment"]["LAZYTRAIN_API_PORT"] == port
    server = next(each for each in manifests("Deployment") if each["metadata"]["name"] == "lazytrain-server")
    container = server["spec"]["template"]["spec"]["containers"][0]
    assert {"name": "LAZYTRAIN_API_PORT", "value": port} in container["env"]
    assert [str(each["containerPort"]) for each in container["ports"]] == [port]


def test_images_have_one_name_and_the_version_of_the_project() -> None:
    version = re.search(r'^version = "(.+)"$', text_of(ROOT / "pyproject.toml"), re.M)
    assert version is not None
    used = {image for path in FILES for image in IMAGE.findall(text_of(path))}
    built = {f"lazytrain-{path.stem}:{version[1]}" for path in (DEPLOY / "images").glob("*.Dockerfile")}
    assert used == built


def test_ray_has_the_version_of_the_project() -> None:
    wanted = re.search(r'"ray\[.+\]>=([\d.]+),', text_of(ROOT / "pyproject.toml"))
    assert wanted is not None
    assert manifests("RayCluster")[0]["spec"]["rayVersion"].startswith(f"{wanted[1]}.")


@pytest.mark.parametrize("path", sorted((DEPLOY / "images").glob("*.Dockerfile")), ids=lambda path: path.name)
def test_images_are_pinned_and_run_as_a_user(path: Path) -> None:
    lines = [line.strip() for line in text_of(path).splitlines()]
    bases = [line.split()[1] for line in lines if line.startswith("FROM ")]
    assert all(":" in base and not base.endswith(":latest") for base in bases)
    users = [line for line in lines if line.startswith("USER ")]
    assert users == ["USER lab"]
    assert not re.search(r"(?i)(password|token|secret)\s*=", text_of(path))
    assert all("rm -rf /var/lib/apt/lists" in text_of(path) for line in lines if "apt-get install" in line)
    assert lines.index("USER lab") < next(i for i, line in enumerate(lines) if line.startswith("ENTRYPOINT"))


def test_compose_starts_in_order_and_hides_what_is_inside() -> None:
    compose = dict(documents("compose"))["compose.yaml"]
    services = compose["services"]
    assert set(services) == {"postgres", "mlflow", "server"}
    assert services["mlflow"]["depends_on"]["postgres"]["condition"] == "service_healthy"
    assert "healthcheck" in services["postgres"]
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert all(port.startswith("127.0.0.1:") for port in ports)
    passwords = re.findall(r"postgresql://lazytrain:(.+?)@", text_of(DEPLOY / "compose" / "compose.yaml"))
    assert passwords and all(word.startswith("${POSTGRES_PASSWORD:?") for word in passwords)
    for service in services.values():
        if "build" in service:
            assert (DEPLOY / "compose" / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert not source.startswith("./") or (DEPLOY / "compose" / source).is_file()
            assert source.startswith((".", "/")) or source in compose["volumes"]


def test_the_kustomization_lists_every_manifest() -> None:
    kustomization = dict(documents("kuberay"))["kustomization.yaml"]
    listed = set(kustomization["resources"]) | {"kustomization.yaml"}
    assert listed == {path.name for path in (DEPLOY / "kuberay").glob("*.yaml")}
    assert {name for _, each in documents("kuberay") for name in [each.get("kind")]} >= {"RayCluster", "Namespace"}


def test_pods_have_requests_limits_and_what_they_mount() -> None:
    claims = {each["metadata"]["name"] for each in manifests("PersistentVolumeClaim")}
    maps = {each["metadata"]["name"] for each in manifests("ConfigMap")}
    own = {
        claim["metadata"]["name"] for each in manifests("StatefulSet") for claim in each["spec"]["volumeClaimTemplates"]
    }
    for pod in pods():
        volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
        for volume in volumes.values():
            assert volume.get("persistentVolumeClaim", {}).get("claimName", "lab") in claims
            assert volume.get("configMap", {}).get("name", "postgres-init") in maps
        for container in pod["containers"]:
            assert "memory" in container["resources"]["limits"] and "cpu" in container["resources"]["requests"]
            assert {mount["name"] for mount in container["volumeMounts"]} <= set(volumes) | own
            for variable in container["env"]:
                held = variable.get("valueFrom", {}).get("secretKeyRef")
                assert held is None or (held["name"], held["key"] in ("postgres-password", "ray-token")) == (
                    "lazytrain",
                    True,
                )
                assert held is not None or not re.search("PASSWORD|TOKEN", variable["name"])


def test_services_reach_their_pods_and_long_running_pods_are_probed() -> None:
    for service in manifests("Service"):
        wanted = service["spec"]["selector"]
        owners = [
            each for kind in ("Deployment", "StatefulSet") for each in manifests(kind)
            if each["spec"]["template"]["metadata"]["labels"] == wanted == each["spec"]["selector"]["matchLabels"]
        ]  # fmt: skip
        assert len(owners) == 1, service["metadata"]["name"]
        container = owners[0]["spec"]["template"]["spec"]["containers"][0]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert all(ports[port["targetPort"]] == port["port"] for port in service["spec"]["ports"])
        assert {"readinessProbe", "livenessProbe"} <= set(container)


def test_groups_of_the_ray_cluster_name_gpus_that_the_planner_knows() -> None:
    ray = manifests("RayCluster")[0]["spec"]
    for group in ray["workerGroupSpecs"]:
        start = group["rayStartParams"]
        labels = dict(pair.split("=") for pair in start["labels"].split(","))
        assert labels[KIND_LABEL] in known_gpus() and labels["lt/device"] == "cuda"
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        assert str(limits["nvidia.com/gpu"]) == start["num-gpus"]
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    for group in [ray["headGroupSpec"], *ray["workerGroupSpecs"]]:
        assert int(group["rayStartParams"]["object-store-memory"]) == DEFAULTS.ray_object_store
        variables = {each["name"]: each.get("value") for each in group["template"]["spec"]["containers"][0]["env"]}
        assert float(variables["RAY_memory_usage_threshold"]) == DEFAULTS.ray_memory_threshold


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
@pytest.mark.parametrize("unit", ["lazytrain-ray@.service", "lazytrain-server.service"])
def test_systemd_reads_the_units(unit: str) -> None:
    path = DEPLOY / "systemd" / unit
    done = subprocess.run(["systemd-analyze", "verify", str(path)], capture_output=True, text=True, check=False)
    mine = [line for line in done.stderr.splitlines() if unit in line and "not executable" not in line]
    assert not [line for line in mine if "Unknown" in line or "Failed to parse" in line or "Invalid" in line], mine


def test_slurm_asks_for_a_requeue_and_uses_the_node_script() -> None:
    text = text_of(DEPLOY / "slurm" / "cluster.sbatch")
    assert re.search(r"^#SBATCH --requeue$", text, re.M) and re.search(r"^#SBATCH --signal=B:USR1@\d+$", text, re.M)
    assert "trap requeue USR1" in text and "scontrol requeue" in text and "ray/node.sh" in text


def test_the_readme_names_every_folder() -> None:
    text = text_of(DEPLOY / "README.md")
    assert all(f"`{path.name}/`" in text for path in DEPLOY.iterdir() if path.is_dir())
