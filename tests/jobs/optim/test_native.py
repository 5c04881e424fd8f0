"""The native kernel: the same bits as the torch operations, for every format, instruction set and number of threads."""

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lazytrain.jobs.errors import InputError
from lazytrain.jobs.layout import Layout
from lazytrain.jobs.optim import HybridAdamW, UnitOptimizer, native, squares
from lazytrain.jobs.optim.native import Kernel

built = pytest.mark.skipif(not native.available(), reason=native.reason())
SETS = pytest.mark.parametrize("instruction_set", native.instruction_sets() or ["baseline"])
FORMATS = pytest.mark.parametrize(
    ("weights", "gradients_dtype", "master"),
    [
        (torch.bfloat16, torch.bfloat16, "split"),
        (torch.bfloat16, torch.float32, "split"),
        (torch.float32, torch.float32, "split"),
        (torch.float32, torch.bfloat16, "split"),
        (torch.bfloat16, torch.bfloat16, "bf16_stochastic"),
        (torch.bfloat16, torch.float32, "bf16_stochastic"),
    ],
)


def test_it_is_built_wherever_the_tests_run_with_a_compiler() -> None:
    import shutil

    if shutil.which("g++") or shutil.which("clang++"):
        assert native.available(), native.reason()


def gradients(numel: int, steps: int, size: float, seed: int = 0) -> Iterator[torch.Tensor]:
    """Of very different sizes within and between blocks, with zeros."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp(3 * torch.randn(numel, generator=generator))
    spread[torch.rand(numel, generator=generator) < 0.05] = 0
    for _ in range(steps):
        yield torch.randn(numel, generator=generator) * spread * size


def run(
    kernel: str, layout: Layout, dtype: torch.dtype, stream: list[torch.Tensor], **options: object
) -> UnitOptimizer:
    weights = torch.randn(layout.numel, generator=torch.Generator().manual_seed(1))
    unit = HybridAdamW(kernel=kernel, weight_decay=0.1, **options).unit(layout, weights, dtype)  # type: ignore[arg-type]
    for step, gradient in enumerate(stream, 1):
        unit.update(gradient, step=step, scale=0.37, lr=1e-2)
    return unit


def assert_same_bits(a: UnitOptimizer, b: UnitOptimizer) -> None:
    ours, theirs = a.state(), b.state()
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name].view(torch.uint8), theirs[name].view(torch.uint8)), name


@built
@SETS
@FORMATS
@pytest.mark.parametrize("state_bits", [8, 32])
def test_bits_are_those_of_the_torch_operations(
    instruction_set: str, weights: torch.dtype, gradients_dtype: torch.dtype, master: str, state_bits: int
) -> None:
    layout = Layout.of({"w": (67, 131), "bias": (77,), "v": (64, 64)})
    stream = [g.to(gradients_dtype) for g in gradients(layout.numel, 12, 1e-2)]
    options = {"master": master, "state_bits": state_bits, "threads": 1}
    ours = run(instruction_set, layout, weights, stream, **options)
    assert_same_bits(ours, run("torch", layout, weights, stream, **options))


@built
@SETS
@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 700),
    st.sampled_from([1, 7, 32, 64, 100, 256, 4096]),
    st.integers(-12, 4),
    st.sampled_from(["split", "bf16_stochastic"]),
    st.integers(0, 1000),
)
def test_bits_for_any_shape_block_and_scale(
    instruction_set: str, numel: int, block: int, exponent: int, master: str, seed: int
) -> None:
    layout = Layout.of({"w": (numel, 1)})
    stream = [g.bfloat16() for g in gradients(layout.numel, 3, 10.0**exponent, seed)]
    options = {"master": master, "block_size": block, "min_8bit_size": 1, "threads": 1}
    ours = run(instruction_set, layout, torch.bfloat16, stream, **options)
    assert_same_bits(ours, run("torch", layout, torch.bfloat16, stream, **options))


@built
@SETS
@pytest.mark.parametrize("size", [1e-42, 1e-38, 1e-30, 1e15, 1e25, 1e37])
def test_bits_at_the_ends_of_fp32(instruction_set: str, size: float) -> None:
    layout = Layout.of({"w": (64, 64)})
    stream = [g.clamp(-3e38, 3e38) for g in gradients(layout.numel, 8, size)]
    ours = run(instruction_set, layout, torch.bfloat16, stream)
    assert_same_bits(ours, run("torch", layout, torch.bfloat16, stream))
    assert ours.master().isfinite().all()


@built
def test_threads_and_instruction_sets_give_the_same_bits() -> None:
    layout = Layout.of({"w": (1000, 333)})
    stream = [g.bfloat16() for g in gradients(layout.numel, 2, 1e-3)]
    first = run("baseline", layout, torch.bfloat16, stream, threads=1)
    for name in native.instruction_sets():
        unit = run(name, layout, torch.bfloat16, stream)
        assert unit._kernel is not None
        unit = HybridAdamW(kernel=name).unit(layout, torch.zeros(layout.numel), torch.bfloat16)
        unit._kernel = Kernel(name, 3)
        again = run(name, layout, torch.bfloat16, [])
        again._kernel = Kernel(name, 3)
        for step, gradient in enumerate(stream, 1):
            again.update(gradient, step=step, scale=0.37, lr=1e-2)
        assert_same_bits(again, first)


@built
@SETS
@pytest.mark.parametrize("numel", [0, 1, 31, 65, (1 << 16) + 1, 300_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_squares(instruction_set: str, numel: int, dtype: torch.dtype) -> None:
    gradient = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    one, three = (Kernel(instruction_set, threads).squares(gradient) for threads in (1, 3))
    assert one == three == Kernel("baseline", 1).squares(gradient)
    assert one == pytest.approx(squares(gradient), rel=1e-13, abs=0)


@built
@SETS
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_squares_are_not_finite_when_one_gradient_is_not(instruction_set: str, bad: float) -> None:
    gradient = torch.zeros(5000, dtype=torch.bfloat16)
    gradient[4999] = bad
    assert not math.isfinite(Kernel(instruction_set, 1).squares(gradient))
    assert Kernel(instruction_set, 1).squares(torch.full((10,), 1e30)) == pytest.approx(1e61, rel=1e-6)


def test_a_kernel_that_cannot_run_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="unknown optimizer kernel 'sse'"):
        HybridAdamW(kernel="sse")


def test_without_a_library_torch_operations_take_over_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "_load", lambda: (None, "it was not built: install a C++ compiler"))
    native._say_once.cache_clear()
    parameter = torch.nn.Parameter(torch.ones(100, 100))
    parameter.grad = torch.ones_like(parameter)
    for _ in range(2):
        HybridAdamW([parameter], lr=0.1).step()
    native._say_once.cache_clear()
    assert parameter.mean().item() == pytest.approx(0.8, abs=0.01)
    assert [record.message for record in caplog.records] == [
        "no native optimizer kernel, updates are over 100 times slower: it was not built: install a C++ compiler"
    ]
    assert not native.available()
    assert native.describe().endswith("install a C++ compiler")
    assert native.instruction_sets() == ()
    with pytest.raises(InputError, match="'avx2' cannot run here"):
        HybridAdamW(kernel="avx2")


@built
def test_descriptions_name_the_instruction_set() -> None:
    assert native.reason() == ""
    assert native.instruction_sets()[-1] in native.describe()
