"""States beside parameters on a GPU: bitsandbytes' update, which its CPU operators let us watch without one."""

import pytest
import torch
from bitsandbytes.optim import AdamW8bit

from lazytrain.jobs.errors import CheckpointError, InputError
from lazytrain.jobs.optim import HybridAdamW, on_gpu
from lazytrain.jobs.optim.on_gpu import GpuUnit, gpu_unit
from lazytrain.jobs.optim.split import join, split

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
SHAPE = (70, 100)


def gradients(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(SHAPE, generator=generator) for _ in range(count)]


def weights() -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(2))


def step_all(unit: GpuUnit, given: list[torch.Tensor], first: int = 1, scale: float = 1.0) -> None:
    for step, gradient in enumerate(given, first):
        unit.apply(gradient.reshape(-1), step=step, scale=scale, options=OPTIONS)


def theirs(given: list[torch.Tensor]) -> torch.Tensor:
    parameter = torch.nn.Parameter(weights())
    optimizer = AdamW8bit([parameter], **OPTIONS)
    for gradient in given:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach().reshape(-1)


def test_fp32_weights_move_as_under_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_gpu, "_CHUNK", 512)
    unit = GpuUnit(weights().reshape(-1), "plain", quantised=True)
    step_all(unit, gradients(5))
    assert torch.equal(unit.streamed, theirs(gradients(5)))


def test_a_split_master_keeps_what_bf16_would_lose() -> None:
    high, low = torch.empty(SHAPE, dtype=torch.bfloat16), torch.empty(SHAPE, dtype=torch.int16)
    split(weights(), high, low)
    unit = GpuUnit(high.reshape(-1), "split", quantised=True)
    unit.load_state({**unit.state_beside_streamed(), "master.low": low.reshape(-1)})
    step_all(unit, gradients(5))
    assert torch.equal(join(unit.streamed, unit.state_beside_streamed()["master.low"]), theirs(gradients(5)))


def test_stochastic_bf16_weights_follow_on_average() -> None:
    unit = GpuUnit(weights().bfloat16().reshape(-1), "stochastic", quantised=True)
    step_all(unit, gradients(20))
    difference = unit.streamed.float() - theirs(gradients(20))
    assert difference.abs().max() < 0.1
    assert difference.mean().abs() < 1e-3


def test_small_tensors_keep_exact_states() -> None:
    unit = GpuUnit(weights().reshape(-1), "plain", quantised=False)
    step_all(unit, gradients(5))
    parameter = torch.nn.Parameter(weights())
    exact = torch.optim.AdamW([parameter], **OPTIONS)
    for gradient in gradients(5):
        parameter.grad = gradient
        exact.step()
    assert torch.allclose(unit.streamed, parameter.detach().reshape(-1), rtol=1e-6, atol=1e-7)


def test_the_clip_factor_scales_the_gradient() -> None:
    clipped, halved = (GpuUnit(weights().reshape(-1), "plain", quantised=True) for _ in range(2))
    step_all(clipped, gradients(3), scale=0.5)
    step_all(halved, [gradient * 0.5 for gradient in gradients(3)])
    assert torch.equal(clipped.streamed, halved.streamed)


def test_a_state_goes_on_where_it_was_saved_and_no_other_is_taken() -> None:
    whole, first = (GpuUnit(weights().reshape(-1), "plain", quantised=True) for _ in range(2))
    step_all(whole, gradients(6))
    step_all(first, gradients(6)[:3])
    second = GpuUnit(first.streamed.clone(), "plain", quantised=True)
    second.load_state({name: tensor.clone() for name, tensor in first.state_beside_streamed().items()})
    step_all(second, gradients(6)[3:], first=4)
    assert torch.equal(second.streamed, whole.streamed)
    with pytest.raises(CheckpointError, match=r"expected \['gpu\.m\.codes'"):
        second.load_state(GpuUnit(weights().reshape(-1), "plain", quantised=False).state_beside_streamed())


def test_other_devices_and_formats_are_refused() -> None:
    parameter = torch.nn.Parameter(torch.empty(SHAPE, device="meta"))
    parameter.grad = torch.empty(SHAPE, device="meta")
    optimizer = HybridAdamW([parameter])
    with pytest.raises(InputError, match="does not train parameters on meta"):
        optimizer._unit_of(parameter, optimizer.param_groups[0])


@pytest.mark.parametrize("wrong", [{"block_size": 512}, {"fraction": 0.02}])
def test_what_the_kernels_cannot_do_is_refused(wrong: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu(torch.Tensor):
        device = torch.device("cuda")

    settings = {"master": "plain", "state_bits": 8, "min_8bit_size": 4096, "block_size": 256, "fraction": 1.0}
    parameter = torch.Tensor._make_subclass(OnGpu, weights())
    with pytest.raises(InputError, match="blocks of 256"):
        gpu_unit(parameter, **{**settings, **wrong})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_a_gpu() -> None:
    parameter = torch.nn.Parameter(weights().cuda())
    optimizer = HybridAdamW([parameter], **OPTIONS)
    for gradient in gradients(5):
        parameter.grad = gradient.cuda()
        optimizer.step()
    assert torch.allclose(parameter.detach().cpu().reshape(-1), theirs(gradients(5)), atol=1e-3)
