from pathlib import Path

from lazytrain.jobs.tracking import SystemMetrics


def test_readings_are_true_and_seldom(tmp_path: Path) -> None:
    now = [0.0]
    system = SystemMetrics(tmp_path, clock=lambda: now[0])
    first = system.read()
    assert first["system/rss_bytes"] > 1 << 20
    assert first["system/host_available_bytes"] > 0
    assert first["system/disk_free_bytes"] > 0
    now[0] = 9.9
    assert system.read() == {}
    sum(i * i for i in range(300_000))
    now[0] = 10.0
    assert 0 <= system.read()["system/cpu_cores"] < 10
