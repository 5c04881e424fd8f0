"""The platform's own settings, read once from ``LAZYTRAIN_*`` variables; nothing else reads the environment."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, ValidationError

from ..jobs.errors import InputError

PREFIX = "LAZYTRAIN_"


def _split(value: object) -> object:
    return tuple(word.strip() for word in value.split(",") if word.strip()) if isinstance(value, str) else value


Words = Annotated[tuple[str, ...], BeforeValidator(_split)]
"""Several words in one variable, separated by commas."""


class Settings(BaseModel):
    """How this installation runs. Each field is read from ``LAZYTRAIN_`` and its name in capitals."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    home: Path = Field(default_factory=lambda: Path.home() / ".lazytrain")
    """Where logs, tokens and the service's own files are kept."""
    nvme_dir: Path | None = None
    """Directory of the NVMe tier; without it a job must name one."""
    ray_auth: Literal["token", "disabled"] = "token"
    """Whether a local Ray asks every connection for the token in ``ray_token_path``."""
    ray_token: Path | None = None
    """File with the token of Ray; by default ``ray_token`` in ``home``, made at first use."""
    ray_temp: Path = Path("/tmp")
    """Parent of the session directory of a local Ray: a short path, because a Unix socket's has 107 bytes at most."""
    ray_object_store: ByteSize = Field(default=ByteSize(80 * 2**20), ge=80 * 2**20, le=2**30)
    """Shared memory of a local Ray. No tensor travels through it, so that the memory is left for offloading."""
    ray_memory_threshold: float = Field(default=0.97, gt=0.0, le=1.0)
    """Share of the host memory in use from which Ray kills a worker before the kernel kills something else."""
    ray_address: str = ""
    """``HOST:PORT`` of the Ray cluster whose nodes measure models where torch is not installed; `serve` sets it."""
    start_timeout_s: float = Field(default=120.0, gt=0)
    """Longest wait for a process on the cluster to start."""
    stop_timeout_s: float = Field(default=20.0, gt=0)
    """Longest wait for a training process to flush and leave after it was asked to."""
    database: str = ""
    """``sqlite:///PATH`` or ``postgresql://...`` of the service; by default a SQLite file in ``home``."""
    api_host: str = "127.0.0.1"
    """Address that the API listens on; another than a loopback one is for a reverse proxy with TLS in front of it."""
    api_port: int = Field(default=8470, ge=0, le=65535)
    """Port of the API."""
    api_names: Words = ()
    """Host names, separated by commas, under which a reverse proxy is reached."""
    tls_cert: Path | None = None
    """Certificate chain of the API, for an address that is no loopback one and has no proxy in front of it."""
    tls_key: Path | None = None
    """Private key that belongs to ``tls_cert``."""
    requests_per_minute: int = Field(default=600, ge=1)
    """Requests that one user may send to the API."""
    roots: Words = ()
    """Folders, separated by commas, below which submitted jobs may read and write; by default the home directory."""
    trusted_models: Words = ()
    """Models, separated by commas, whose own Python code may run when a job asks for it."""
    batch_search: bool = True
    """Whether a job with ``train.batch: auto`` that is expected to run for half an hour measures batches on its node
    before it trains; else the plan decides it."""
    probe_s: float = Field(default=4.0, gt=0)
    """Steps of a batch that is tried are measured for at least so long, and for three times as long while they
    differ."""
    rules: Path | None = None
    """YAML file with the rules by which jobs share the GPUs (`controller.rules`); without one those of `Rules`."""
    mlflow_uri: str = ""
    """Where runs of the service are logged; by default a SQLite file in ``home``."""
    mlflow_pages: str = Field(default="", pattern=r"^(https?://[^\s\"'<>]+)?$")
    """Where people reach MLflow's pages, which the pages of jobs link to."""
    host_reserve: ByteSize = Field(default=ByteSize(2**30), ge=0)
    """Host memory that no plan may use: the operating system and the processes beside the training process."""

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Settings from the environment. Raises InputError for an unknown name or a value that does not validate."""
        source = os.environ if environ is None else environ
        given = {name[len(PREFIX) :].lower(): text for name, text in source.items() if name.startswith(PREFIX)}
        _refuse_unknown(given)
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            first = error.errors()[0]
            name = PREFIX + str(first["loc"][0]).upper()
            raise InputError(f"{name}={first['input']} is not valid: {first['msg']}") from error

    @property
    def database_url(self) -> str:
        """The service's database."""
        return self.database or f"sqlite:///{self.home.absolute() / 'lazytrain.db'}"

    @property
    def tracking_uri(self) -> str:
        """The MLflow store."""
        return self.mlflow_uri or f"sqlite:///{self.home.absolute() / 'mlflow.db'}"

    @property
    def allowed_roots(self) -> tuple[Path, ...]:
        """Folders below which submitted jobs may read and write."""
        named = tuple(Path(os.path.realpath(Path(root).expanduser())) for root in self.roots)
        return (*(named or (Path.home(),)), self.runs_dir)

    @property
    def runs_dir(self) -> Path:
        """Where jobs that name no folder leave their results."""
        return self.home.absolute() / "runs"

    @property
    def api_token_path(self) -> Path:
        """File with the token of the API's first user, readable by its owner only."""
        return self.home / "token"

    @property
    def api_url(self) -> str:
        """Where the API of this machine answers."""
        return f"http://{'127.0.0.1' if self.api_host in ('0.0.0.0', '::') else self.api_host}:{self.api_port}"

    @property
    def log_dir(self) -> Path:
        """Where the traces of unexpected errors go."""
        return self.home / "logs"

    @property
    def facts_dir(self) -> Path:
        """Where the facts of models that were measured are kept."""
        return self.home.absolute() / "facts"

    @property
    def step_times_path(self) -> Path:
        """Where the controller says how long its steps take."""
        return self.home / "run" / "controller-steps.json"

    @property
    def ray_token_path(self) -> Path:
        """File with the token of Ray, readable by its owner only."""
        return self.ray_token or self.home / "ray_token"


def _refuse_unknown(given: Mapping[str, str]) -> None:
    for name in given:
        if name not in Settings.model_fields:
            near = difflib.get_close_matches(name, Settings.model_fields, n=1)
            meant = f"did you mean {PREFIX}{near[0].upper()}?" if near else "unset it"
            raise InputError(f"the environment variable {PREFIX}{name.upper()} is no setting of lazytrain", hint=meant)
