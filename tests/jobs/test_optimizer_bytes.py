"""Planned bytes are those that the optimizer takes."""

import pytest
import torch

from lazytrain.jobs.layout import Layout
from lazytrain.jobs.optim import HybridAdamW
from lazytrain.jobs.optimizer_bytes import OptimizerOptions

LAYOUT = Layout.of({"w": (2048, 1024)})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"master": "bf16_stochastic"},
        {"state_bits": 32},
        {"block_size": 64},
        {"eight_bit_fraction": 0.02, "block_size": 4096},
    ],
)
def test_every_option_costs_what_is_planned_for_it(dtype: torch.dtype, options: dict[str, object]) -> None:
    planned = OptimizerOptions(**options).bytes_per_parameter(dtype.itemsize)  # type: ignore[arg-type]
    unit = HybridAdamW(**options).unit(LAYOUT, torch.zeros(LAYOUT.numel), dtype)  # type: ignore[arg-type]
    taken = unit.bytes / LAYOUT.numel
    assert taken == pytest.approx(planned["weights"] + planned["master"] + planned["optimizer_state"], rel=1e-3)
    assert planned["gradients"] == dtype.itemsize


def test_the_default_is_8_03_bytes() -> None:
    assert sum(OptimizerOptions().bytes_per_parameter().values()) == pytest.approx(8.03125)


def test_units_that_keep_float32_states_by_their_name_are_planned_with_them() -> None:
    options = {"fp32_states": ("*embed_tokens*",)}
    for path, layout in (("model.embed_tokens", Layout.of({"weight": (2048, 1024)})), ("model.layers.0", LAYOUT)):
        unit = HybridAdamW(**options).unit(layout, None, torch.bfloat16, path=path)
        planned = OptimizerOptions(**options).bytes_per_parameter(unit=path)
        taken = unit.bytes / layout.numel
        assert taken == pytest.approx(planned["weights"] + planned["master"] + planned["optimizer_state"], rel=1e-3)
        assert planned["optimizer_state"] == pytest.approx(8 if "embed" in path else 2.03125)
