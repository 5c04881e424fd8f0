import pytest

from lazytrain.jobs.errors import HardwareError
from lazytrain.platform.cluster.inventory import require
from lazytrain.platform.cluster.local import label_value
from lazytrain.platform.cluster.port import Node

NODES = [Node("a", "10.0.0.1", "H800", 32, 8), Node("b", "10.0.0.2", "RTX3090", 8, 1), Node("c", "10.0.0.3", "", 64, 0)]


@pytest.mark.parametrize(
    ("wanted", "kind"),
    [({"CPU": 32, "GPU": 8}, "H800"), ({"CPU": 8, "GPU": 1}, ""), ({"CPU": 64}, ""), ({"GPU": 1}, "RTX3090")],
)
def test_what_an_idle_node_could_give_is_accepted(wanted: dict[str, float], kind: str) -> None:
    require(NODES, wanted, kind)


@pytest.mark.parametrize(
    ("wanted", "kind"),
    [({"GPU": 2}, "RTX3090"), ({"CPU": 9, "GPU": 1}, "RTX3090"), ({"CPU": 64, "GPU": 1}, ""), ({"GPU": 1}, "H100")],
)
def test_what_ray_would_wait_for_for_ever_is_refused(wanted: dict[str, float], kind: str) -> None:
    with pytest.raises(HardwareError) as caught:
        require(NODES, wanted, kind)
    assert "10.0.0.2: RTX3090, 1 GPUs" in caught.value.hint


def test_an_empty_cluster_says_so() -> None:
    with pytest.raises(HardwareError) as caught:
        require([], {"GPU": 1})
    assert "none" in caught.value.hint


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("NVIDIA GeForce RTX 3090", "NVIDIA-GeForce-RTX-3090"),
        ("NVIDIA H800 PCIe", "NVIDIA-H800-PCIe"),
        ("a/b (c)", "a-b-c"),
        ("x" * 100, "x" * 63),
    ],
)
def test_any_gpu_name_becomes_a_label(name: str, label: str) -> None:
    assert label_value(name) == label
