from pathlib import Path

import pytest

from lazytrain.jobs.errors import InputError
from lazytrain.platform.settings import Settings


def test_defaults_need_no_environment() -> None:
    settings = Settings.read({"HOME": "/root", "OTHER": "1"})
    assert settings.home == Path.home() / ".lazytrain"
    assert settings.nvme_dir is None
    assert settings.ray_token_path.parent == settings.home


def test_values_are_parsed_once() -> None:
    settings = Settings.read(
        {"LAZYTRAIN_HOME": "/data/lt", "LAZYTRAIN_HOST_RESERVE": "2GiB", "LAZYTRAIN_NVME_DIR": "/n"}
    )
    assert settings.log_dir == Path("/data/lt/logs")
    assert settings.host_reserve == 2 * 2**30
    assert settings.nvme_dir == Path("/n")


def test_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(InputError) as caught:
        Settings.read({"LAZYTRAIN_HOM": "/x"})
    assert "LAZYTRAIN_HOM" in caught.value.message
    assert "LAZYTRAIN_HOME" in caught.value.hint


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LAZYTRAIN_RAY_AUTH", "none"),
        ("LAZYTRAIN_RAY_OBJECT_STORE", "300GiB"),  # Ray would take it from the memory that offloading needs
        ("LAZYTRAIN_START_TIMEOUT_S", "soon"),
    ],
)
def test_bad_value_names_the_variable(name: str, value: str) -> None:
    with pytest.raises(InputError, match=name):
        Settings.read({name: value})


def test_several_words_in_one_variable(tmp_path: Path) -> None:
    settings = Settings.read({"LAZYTRAIN_ROOTS": f"{tmp_path}, /data/", "LAZYTRAIN_API_NAMES": "gpu.example.org"})
    assert settings.allowed_roots == (tmp_path.resolve(), Path("/data"), settings.runs_dir)
    assert settings.api_names == ("gpu.example.org",)


def test_where_the_service_keeps_its_things(tmp_path: Path) -> None:
    settings = Settings.read({"LAZYTRAIN_HOME": str(tmp_path)})
    assert settings.database_url == f"sqlite:///{tmp_path}/lazytrain.db"
    assert settings.tracking_uri == f"sqlite:///{tmp_path}/mlflow.db"
    assert settings.api_url == "http://127.0.0.1:8470"
    assert Path.home() in settings.allowed_roots
    other = Settings.read({"LAZYTRAIN_DATABASE": "postgresql://db/lab", "LAZYTRAIN_API_HOST": "0.0.0.0"})
    assert (other.database_url, other.api_url) == ("postgresql://db/lab", "http://127.0.0.1:8470")
