"""GPUs by name, and what they cannot train."""

import pytest

from tests.helpers.plan_cases import H200, debug_config
from titan_tts.plan.devices import DEVICES, Cluster, check_device, device_of, find_device
from torchtitan.models.dit_tts.errors import InputError


@pytest.mark.parametrize(
    "reported, name",
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H200 NVL", "H200 NVL"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("NVIDIA RTX A1000", None),
    ],
)
def test_devices_are_found_by_the_drivers_names(reported, name):
    device = device_of(reported)
    assert (device and device.name) == name


def test_figures_of_devices():
    assert H200.memory_gib == 139 and Cluster(H200, 8, 2).inter_node == 8 * 50e9
    assert Cluster(H200, 8, 2, 25.0).inter_node == 25e9 and Cluster(H200, 8, 3).gpus == 24
    assert {each.name for each in DEVICES if each.gpus_per_node != 8} == {"GH200"}
    assert find_device("GH200").gpus_per_node == 4
    sizes = {(64, 0): (8, 8), (4, 0): (4, 1), (64, 16): (16, 4), (8, 0): (8, 1)}
    for (gpus, in_node), expected in sizes.items():
        cluster = Cluster.of(H200, gpus, in_node, 25.0)
        assert (cluster.gpus_per_node, cluster.nodes, cluster.inter_node_gbps) == (*expected, 25.0)


def test_what_a_device_cannot_train():
    fp8 = debug_config("--model.converters=float8")
    check_device(fp8, H200)
    with pytest.raises(InputError, match="A100 has no fp8"):
        check_device(fp8, find_device("A100"))
