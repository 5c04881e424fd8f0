"""The files under ``deploy/`` in the hands of the tools that will read them, or held against those tools' schemas."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.scripts.scripts import start

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SCHEMAS = Path(__file__).parent / "schemas"
TOOLS = Path(sys.executable).parent
KUBERNETES = json.loads((SCHEMAS / "kubernetes-1.37.json").read_text(encoding="utf-8"))
RAY_CLUSTER = json.loads((SCHEMAS / "raycluster.json").read_text(encoding="utf-8"))
KINDS = {
    "v1": "io.k8s.api.core.v1",
    "apps/v1": "io.k8s.api.apps.v1",
}


def tool(name: str, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program that a package of the test dependencies brings."""
    command = [str(TOOLS / name), *map(str, arguments)]
    variables = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **environment}
    return subprocess.run(command, capture_output=True, text=True, env=variables, check=False)


def manifests() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted((DEPLOY / "kuberay").glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            yield f"{path.stem}-{document['kind']}", document


def problems(schema: dict[str, Any], document: object) -> list[str]:
    found = jsonschema.Draft7Validator(schema).iter_errors(document)
    return [f"{'.'.join(map(str, each.absolute_path))}: {each.message}" for each in found]


def kubernetes(name: str, document: object) -> list[str]:
    """What Kubernetes 1.37 would say to a document of this type."""
    return problems({**KUBERNETES, "$ref": f"#/$defs/{name}"}, document)


def templates(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    return [group["template"] for group in groups]


# ---- Kubernetes


@pytest.mark.parametrize(
    ("name", "document"), list(manifests()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_manifests_are_what_kubernetes_takes(name: str, document: dict[str, Any]) -> None:
    if document["kind"] == "RayCluster":
        assert problems(RAY_CLUSTER, document) == []
        assert [problem for each in templates(document) for problem in _template_problems(each)] == []
    elif document["kind"] != "Kustomization":
        assert kubernetes(f"{KINDS[document['apiVersion']]}.{document['kind']}", document) == []


def _template_problems(template: dict[str, Any]) -> list[str]:
    return kubernetes("io.k8s.api.core.v1.PodTemplateSpec", template)


def test_the_schemas_would_notice() -> None:
    cluster = next(document for name, document in manifests() if document["kind"] == "RayCluster")
    cluster["spec"]["workerGroupSpecs"][0]["rayStartParams"]["labels"] = "lt/gpu-kind=H800"
    cluster["spec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] = 0
    cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["volumeMount"] = []
    assert len(problems(RAY_CLUSTER, cluster)) == 2, "the operator refuses labels there, and numbers are no words"
    assert len(_template_problems(templates(cluster)[0])) == 1
    deployment = next(document for name, document in manifests() if document["kind"] == "Deployment")
    deployment["spec"]["replicas"] = "one"
    assert kubernetes("io.k8s.api.apps.v1.Deployment", deployment)


def test_ray_knows_what_it_is_started_with() -> None:
    known = {name.lstrip("-") for parameter in start.params for name in parameter.opts}
    cluster = next(document for name, document in manifests() if document["kind"] == "RayCluster")
    for group in [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]:
        assert set(group["rayStartParams"]) <= known
    script = (DEPLOY / "ray" / "node.sh").read_text(encoding="utf-8")
    told = " ".join(line for line in script.splitlines() if "exec ray start" in line or line.startswith("common="))
    used = set(re.findall(r"--([a-z-]+)", told))
    assert {"head", "address", "num-gpus", "labels", "object-store-memory"} <= used <= known


def test_the_launcher_file_is_what_ray_takes() -> None:
    import ray.autoscaler

    schema = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text(encoding="utf-8"))
    lab = yaml.safe_load((DEPLOY / "ray" / "lab.yaml").read_text(encoding="utf-8"))
    assert problems(schema, lab) == []
    assert problems(schema, {**lab, "head_start_commands": []}), "a misspelt key is noticed"


# ---- Compose, images, scripts, units


def test_compose_reads_its_file() -> None:
    asked = {"POSTGRES_PASSWORD": "x", "RAY_HEAD": "10.0.0.1", "API_NAME": "gpu.example.org"}
    file = DEPLOY / "compose" / "compose.yaml"
    done = tool("docker-compose", "-f", file, "config", "--format", "json", **asked)
    assert (done.returncode, done.stderr) == (0, "")
    services = json.loads(done.stdout)["services"]
    assert services["server"]["command"] == ["serve", "--ray-address", "10.0.0.1:6379"]
    assert (
        services["server"]["environment"]["LAZYTRAIN_DATABASE"] == "postgresql://lazytrain:x@127.0.0.1:5432/lazytrain"
    )
    for name in asked:
        without = {key: value for key, value in asked.items() if key != name}
        assert name in tool("docker-compose", "-f", file, "config", "--quiet", **without).stderr


@pytest.mark.parametrize("path", sorted((DEPLOY / "images").glob("*.Dockerfile")), ids=lambda path: path.name)
def test_the_linter_has_nothing_to_say_of_an_image(path: Path) -> None:
    done = tool("hadolint", "--config", DEPLOY / "images" / ".hadolint.yaml", path)
    assert (done.returncode, done.stdout) == (0, "")


SCRIPTS = [*DEPLOY.rglob("*.sh"), *DEPLOY.rglob("*.sbatch")]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_the_linter_has_nothing_to_say_of_a_script(path: Path) -> None:
    done = tool("shellcheck", "--severity=info", path)
    assert (done.returncode, done.stdout) == (0, "")
