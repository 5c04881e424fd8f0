from __future__ import annotations

import pickle

import pytest

from lazytrain.jobs import errors
from lazytrain.jobs.errors import (
    DoesNotFit,
    InputError,
    InvariantBroken,
    LazytrainError,
    OutOfMemory,
    SpecError,
    StepFailed,
    StorageError,
)

CASES = [
    SpecError("unknown key epoch", field="train.epoch", line=7, hint="did you mean epochs?"),
    OutOfMemory(tier="gpu", requested_bytes=10, used_bytes=95, budget_bytes=100),
    DoesNotFit("no plan fits", reasons=({"resource": "host_memory", "shortfall_bytes": 3},)),
    StepFailed("it failed", op="load.3", stream="h2d", hint="do this"),
    StorageError("it failed", tier="nvme", nbytes=4096, hint="do this"),
    InvariantBroken("one_update", "update.3", "it was updated before"),
    *(
        kind("it failed", hint="do this")
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, LazytrainError) and "__init__" not in vars(kind)
    ),
]


@pytest.mark.parametrize("error", CASES, ids=lambda error: type(error).__name__)
def test_an_error_survives_pickling_with_its_fields(error):
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    assert type(copy) is type(error)
    assert (str(copy), copy.to_dict(), vars(copy)) == (str(error), error.to_dict(), vars(error))


def test_the_class_decides_the_exit_code():
    assert {kind.exit_code for kind in (SpecError, errors.DataError, errors.ModelError, errors.HardwareError)} == {2}
    assert (InputError.exit_code, DoesNotFit.exit_code, LazytrainError.exit_code) == (2, 3, 1)


def test_codes_are_distinct():
    kinds = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, LazytrainError)]
    assert len({kind.code for kind in kinds}) == len(kinds)


def test_the_message_shows_the_hint():
    assert str(SpecError("wrong", hint="right")) == "wrong\n  hint: right"
