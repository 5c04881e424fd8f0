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

from lazytrain.platform.cluster.local import DEVICE_LABEL, KIND_LABEL
from lazytrain.platform.settings import PREFIX, Settings
from lazytrain.schedulers.hardware import known_gpus

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
FILES = sorted(path for path in DEPLOY.rglob("*") if path.is_file())
DEFAULTS = Settings()
SECRETS = {"lazytrain-database": "postgres-password", "lazytrain-ray": "auth_token"}
"""The secrets that a person makes (kustomization.yaml), with their keys; KubeRay looks for the second one's key."""
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


def pods() -> list[tuple[dict[str, str], dict[str, Any]]]:
    """All pods of the Kubernetes manifests with their labels; those of Ray's head have the operator's."""
    templates = [each["spec"]["template"] for kind in ("Deployment", "StatefulSet") for each in manifests(kind)]
    ray = manifests("RayCluster")[0]
    head = {"ray.io/cluster": ray["metadata"]["name"], "ray.io/node-type": "head"}
    return [
        *((each["metadata"]["labels"], each["spec"]) for each in templates),
        (head, ray["spec"]["headGroupSpec"]["template"]["spec"]),
        *(({}, group["template"]["spec"]) for group in ray["spec"]["workerGroupSpecs"]),
    ]


def server() -> dict[str, Any]:
    """The container with controller and API on Kubernetes."""
    head = manifests("RayCluster")[0]["spec"]["headGroupSpec"]["template"]["spec"]
    return next(container for container in head["containers"] if container["name"] == "server")


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
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path), "RAY_AUTH_TOKEN": "secret", **environment}
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


def test_a_node_has_the_token_of_the_settings(tmp_path: Path) -> None:
    code, _, said = node_command(tmp_path, "head", RAY_AUTH_TOKEN="")
    assert code == 2 and f"no token of Ray in {tmp_path}/.lazytrain/ray_token" in said
    for setting, file in (("LAZYTRAIN_HOME", "home/ray_token"), ("LAZYTRAIN_RAY_TOKEN", "other")):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("secret", encoding="utf-8")
        value = str((tmp_path / file).parent if setting == "LAZYTRAIN_HOME" else tmp_path / file)
        _, words, _ = node_command(tmp_path, "head", RAY_AUTH_TOKEN="", **{setting: value})
        assert f"RAY_AUTH_TOKEN_PATH={tmp_path / file}" in words
        assert Settings.read({setting: value}).ray_token_path == tmp_path / file


def test_unlike_gpus_and_wrong_roles_are_refused(tmp_path: Path) -> None:
    code, _, said = node_command(tmp_path, "worker", gpus="NVIDIA H800\nNVIDIA L4\n", NODE_HEAD="h")
    assert (code, "unlike GPUs" in said) == (2, True)
    assert node_command(tmp_path, "chief")[0] == 2
    assert node_command(tmp_path, "worker")[0] != 0, "a worker needs the address of the head"


def test_the_launcher_file_starts_every_node_with_the_script() -> None:
    lab = dict(documents("ray"))["lab.yaml"]
    workers = lab["provider"]["worker_ips"]
    assert lab["provider"]["type"] == "local"
    assert len(set(workers)) == len(workers) == lab["max_workers"]
    assert "node.sh head" in lab["head_start_ray_commands"][-1]
    assert "NODE_HEAD=$RAY_HEAD_IP" in lab["worker_start_ray_commands"][-1]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(DEPLOY)))
def test_every_variable_is_a_setting(path: Path) -> None:
    names = set(re.findall(rf"\b{PREFIX}([A-Z_]+)\b", text_of(path)))
    assert {name.lower() for name in names} <= set(Settings.model_fields)


def test_the_api_has_its_port_everywhere() -> None:
    port = str(DEFAULTS.api_port)
    assert f"EXPOSE {port}" in text_of(DEPLOY / "images" / "server.Dockerfile")
    compose = dict(documents("compose"))["compose.yaml"]
    assert compose["services"]["server"]["environment"]["LAZYTRAIN_API_PORT"] == port
    assert {"name": "LAZYTRAIN_API_PORT", "value": port} in server()["env"]
    assert [str(each["containerPort"]) for each in server()["ports"]] == [port]


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
    bases = {line.split()[1] for line in lines if line.startswith("FROM ")}
    assert bases == {"python:3.12.12-slim-bookworm"}, "Ray compares the Python of its nodes, patch level included"
    users = [line for line in lines if line.startswith("USER ")]
    assert users == ["USER 10001"], "a name says nothing to Kubernetes, which has to know that it is not root"
    assert not re.search(r"(?i)(password|token|secret)\s*=", text_of(path))
    assert text_of(path).count("apt-get install") == text_of(path).count("rm -rf /var/lib/apt/lists")
    assert lines.index("USER 10001") < next(i for i, line in enumerate(lines) if line.startswith("ENTRYPOINT"))


@pytest.mark.parametrize("image", ["server", "worker"])
def test_what_an_image_copies_is_what_the_build_is_sent(image: str) -> None:
    text = text_of(DEPLOY / "images" / f"{image}.Dockerfile")
    sent = [
        line[1:]
        for line in text_of(DEPLOY / "images" / f"{image}.Dockerfile.dockerignore").splitlines()
        if line.startswith("!")
    ]
    assert all((ROOT / path).exists() for path in sent)
    copied = [word for line in text.splitlines() if line.startswith("COPY ") for word in line.split()[1:-1]]
    files = [word for word in copied if not word.startswith("--") and word not in (".", "/wheels")]
    assert set(files) <= set(sent)
    assert {".links", "jobs", "schedulers", "platform", "dashboards", "pyproject.toml", "setup.py", "LICENSE"} <= set(
        sent
    )


@pytest.mark.parametrize("role", ["server", "worker"])
def test_a_role_has_dependencies_of_the_project_in_its_versions(role: str) -> None:
    """What it does with them, and that it needs no others, is in ``tests/platform/test_roles.py``."""
    project = Requirements(text_of(ROOT / "pyproject.toml"))
    file = DEPLOY / "images" / f"{role}.txt"
    lines = [line for line in text_of(file).splitlines() if not line.startswith("#")]
    for line in lines:
        name = re.split(r"[^a-z0-9-]", line)[0].removesuffix("-skinny")
        assert project.versions[name] == re.sub(r"^[a-z0-9-]+(\[.+\])?", "", line), line
    image = text_of(file.with_suffix(".Dockerfile"))
    assert f"--requirement /opt/lazytrain/{role}.txt" in image and "--no-deps /wheels/*.whl" in image


class Requirements:
    """Every requirement of the project, also of its extras, as name and versions."""

    def __init__(self, text: str) -> None:
        lines = re.findall(r'"([a-z0-9-]+)(?:\[[a-z,]+\])?((?:[<>=]=?[\d.]+,?)+)"', text)
        self.versions = dict(lines)


def test_compose_starts_in_order_and_hides_what_is_inside() -> None:
    compose = dict(documents("compose"))["compose.yaml"]
    services = compose["services"]
    assert set(services) == {"postgres", "mlflow", "head", "server"}
    assert services["server"]["pid"] == "service:head", "a client of Ray looks for the raylet among the processes"
    assert all("ray:/tmp/ray" in services[name]["volumes"] for name in ("head", "server"))
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


def test_batches_are_not_searched_on_nodes_without_a_solver() -> None:
    assert "ortools" not in text_of(DEPLOY / "images" / "worker.txt")
    server = dict(documents("compose"))["compose.yaml"]["services"]["server"]
    assert server["environment"]["LAZYTRAIN_BATCH_SEARCH"] == "false"
    assert '{name: LAZYTRAIN_BATCH_SEARCH, value: "false"}' in text_of(DEPLOY / "kuberay" / "raycluster.yaml")


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
    for _, pod in pods():
        volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
        for volume in volumes.values():
            assert volume.get("persistentVolumeClaim", {}).get("claimName", "lab") in claims
            assert volume.get("configMap", {}).get("name", "postgres-init") in maps
        for container in pod["containers"]:
            assert "memory" in container["resources"]["limits"] and "cpu" in container["resources"]["requests"]
            assert {mount["name"] for mount in container["volumeMounts"]} <= set(volumes) | own
            for variable in container["env"]:
                held = variable.get("valueFrom", {}).get("secretKeyRef")
                assert held is None or SECRETS[held["name"]] == held["key"]
                assert held is not None or not re.search("PASSWORD|TOKEN", variable["name"])
    ray = manifests("RayCluster")[0]["spec"]
    assert SECRETS[ray["authOptions"]["secretName"]] == "auth_token"
    making = text_of(DEPLOY / "kuberay" / "kustomization.yaml")
    assert all(f"generic {name}" in making and f"{key}=" in making for name, key in SECRETS.items())


def test_services_reach_one_pod_each_which_is_probed() -> None:
    for service in manifests("Service"):
        reached = [pod for labels, pod in pods() if labels == service["spec"]["selector"]]
        assert len(reached) == 1, service["metadata"]["name"]
        ports = {
            port["name"]: (port["containerPort"], container)
            for container in reached[0]["containers"]
            for port in container["ports"]
        }
        for port in service["spec"]["ports"]:
            number, container = ports[port["targetPort"]]
            assert number == port["port"] and "livenessProbe" in container
            assert "readinessProbe" in container or container is not server()


def test_the_controller_sees_the_processes_and_the_sockets_of_rays_head() -> None:
    head = manifests("RayCluster")[0]["spec"]["headGroupSpec"]["template"]["spec"]
    assert head["shareProcessNamespace"] is True
    ray = {"name": "ray", "mountPath": "/tmp/ray"}
    assert all(ray in container["volumeMounts"] for container in head["containers"])
    assert {container["image"] for container in head["containers"]} == {server()["image"]}
    name = manifests("RayCluster")[0]["metadata"]["name"]
    assert server()["args"] == ["serve", "--ray-address", f"{name}-head-svc:6379"]


def test_groups_of_the_ray_cluster_name_gpus_that_the_planner_knows() -> None:
    ray = manifests("RayCluster")[0]["spec"]
    for group in ray["workerGroupSpecs"]:
        start = group["rayStartParams"]
        assert group["labels"][KIND_LABEL] in known_gpus() and group["labels"][DEVICE_LABEL] == "cuda"
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
    # It also says which programs of the unit are not on this machine.
    mine = [line for line in done.stderr.splitlines() if unit in line and "is not executable" not in line]
    assert mine == []


def test_slurm_asks_for_a_requeue_and_uses_the_node_script() -> None:
    text = text_of(DEPLOY / "slurm" / "cluster.sbatch")
    assert re.search(r"^#SBATCH --requeue$", text, re.M) and re.search(r"^#SBATCH --signal=B:USR1@\d+$", text, re.M)
    assert "trap requeue USR1" in text and "scontrol requeue" in text and "ray/node.sh" in text


def test_the_readme_names_every_folder() -> None:
    text = text_of(DEPLOY / "README.md")
    assert all(f"`{path.name}/`" in text for path in DEPLOY.iterdir() if path.is_dir())
