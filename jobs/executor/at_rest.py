"""Parameters of a streamed model between their uses, when they have no memory of their own.

Their values lie in their unit's flat weights on the host. Whoever reads a parameter there is given those values, on the
device; what is written into it, or into a view of it, goes to the master, and what was loaded of it before is loaded
anew. So weight noise, averaging, initialisation and merging do to a streamed model what they do to a plain one. What
cannot be done is refused in words: gradients and hooks of single parameters, and memory that others could keep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import numpy
import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from ..errors import ProgramError
from ..replay import outside_inference_mode
from .homes import BITS, Home, Keeper, Window, refuse
from .stores import HostUnit
from .stores.parameters import NOTED_VERSION


class _AtRest(torch.Tensor):
    """What parameters at rest and views of them answer."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in _AS_THEY_ARE:
                return func(*args, **(kwargs or {}))
            return _ANSWERS.get(func, _on_values)(func, args, kwargs or {})


class Resting(_AtRest, nn.Parameter):
    """The class of a streamed parameter while it has no memory. Its `Home` is its attribute ``_home``."""

    _home: Home

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied = memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.detach().clone(), self.requires_grad).__reduce_ex__(protocol)


class RestingView(_AtRest):
    """Part of a parameter at rest, or all of it without a gradient (``p.data``, ``p.detach()``, ``p[3:]``)."""

    _window: Window

    @classmethod
    def of(cls, window: Window) -> RestingView:
        held = torch.empty(0, dtype=window.home.unit.dtype, device=window.home.keeper.device)
        view: RestingView = torch.Tensor._make_subclass(cls, held)
        view._window = window
        return view


def check_parameters(model: nn.Module) -> None:
    """Raise ProgramError for what a model's parameters cannot be once it is streamed."""
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ProgramError(
                f"{name} has a hook on its gradient, which would not be called while the model is streamed",
                hint="remove the hook before stream(); freeze a parameter with requires_grad_(False)",
            )
        if type(parameter) is not nn.Parameter:
            raise ProgramError(
                f"{name} is a {type(parameter).__name__} and no plain parameter", hint="this model cannot be streamed"
            )
        if parameter.dtype not in BITS:
            raise ProgramError(
                f"{name} is {parameter.dtype}: weights stream in float32 or bfloat16",
                hint="model.to(torch.bfloat16), or model.float(), before stream()",
            )


def lay_to_rest(units: Iterable[HostUnit], keeper: Keeper) -> None:
    """Let the parameters of the units answer for their values from now on, wherever they have no memory."""
    for unit in units:
        for segment in unit.layout.segments:
            name = f"{unit.path}.{segment.name}" if unit.path else segment.name
            vars(unit.parameters[segment.name])["_home"] = Home(name, unit, segment, keeper)
        unit.at_rest = Resting
        unit.unbind(keeper.device)
        unit.note_versions()


def let_go(units: Iterable[HostUnit]) -> None:
    """Let them be plain parameters again."""
    for unit in units:
        unit.at_rest = nn.Parameter
        for parameter in unit.parameters.values():
            for name in ("_home", NOTED_VERSION):
                vars(parameter).pop(name, None)


# ---- what is answered


@dataclass
class _Opened:
    """The values that one operation works on, a flat copy for each parameter, and what they were given out as."""

    copies: dict[Home, tuple[int, torch.Tensor]] = field(default_factory=dict)
    """First element, and the values from there on."""
    given: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Values with the tensor at rest that they stand for."""

    def open(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy what these tensors at rest show."""
        by_home: dict[Home, list[Window]] = {}
        for tensor in tensors:
            by_home.setdefault(_window(tensor).home, []).append(_window(tensor))
        for home, windows in by_home.items():
            home.keeper.flush()
            first, last = min(w.offset for w in windows), max(w.stop for w in windows)
            learns = torch.is_grad_enabled() and any(window.learns for window in windows)
            self.copies[home] = first, _copied(home, first, last, learns=learns)

    def values(self, tensor: torch.Tensor) -> torch.Tensor:
        """What stands for a tensor at rest."""
        window = _window(tensor)
        first, copy = self.copies[window.home]
        values = copy.as_strided(window.size, window.stride, window.offset - first)
        self.given.append((values, tensor))
        return values

    def write_back(self) -> None:
        """Give the masters what the operation has changed."""
        for home, (first, copy) in self.copies.items():
            if copy._version:
                home.write(copy, first)

    def handed_out(self, result: torch.Tensor) -> torch.Tensor:
        """A result of the operation; one that shares memory with the values rests too."""
        for values, tensor in self.given:
            if result is values:
                return tensor
        if result.layout != torch.strided or torch._C._functorch.is_functorch_wrapped_tensor(result):
            return result  # which has no memory of its own to share
        storage = result.untyped_storage()._cdata
        for home, (first, copy) in self.copies.items():
            if copy.numel() and copy.untyped_storage()._cdata == storage:
                if result.dtype != copy.dtype:
                    refuse(home.name, f"be viewed as {result.dtype}", "clone() it first")
                offset = first + int(result.storage_offset())
                return RestingView.of(Window(home, result.size(), result.stride(), offset, result.requires_grad))
        return result


def _on_values(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run any operation on copies of the values, and keep what it changes."""
    leaves, spec = tree_flatten((tuple(args), dict(kwargs)))
    opened, rests = _Opened(), [leaf for leaf in leaves if isinstance(leaf, _AtRest)]
    with outside_inference_mode():  # else there would be no telling what was written
        opened.open(rests)
    args, kwargs = tree_unflatten([opened.values(x) if isinstance(x, _AtRest) else x for x in leaves], spec)
    result = func(*args, **kwargs)
    with outside_inference_mode():
        opened.write_back()
        return tree_map_only(torch.Tensor, opened.handed_out, result)


def _copied(home: Home, start: int, stop: int, *, learns: bool) -> torch.Tensor:
    """A copy on the device; where it ``learns``, torch treats it as the parameter, and nobody gets its gradient."""
    copy = home.part(start, stop).to(home.keeper.device, copy=True)
    if learns:
        copy.requires_grad_().register_hook(partial(_lose, home.name))
    return copy


def _lose(name: str, gradient: torch.Tensor) -> NoReturn:
    refuse(
        name,
        "have a gradient of what is computed of it outside a forward of the model",
        "detach() it there; weight decay is the optimizer's (weight_decay=...)",
    )


def _window(tensor: Any) -> Window:
    if isinstance(tensor, RestingView):
        return tensor._window
    home: Home = tensor._home
    seen = home.seen
    return Window(home, seen.size(), seen.stride(), 0, tensor.requires_grad)


def _of_shape(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What needs no values."""
    window = _window(args[0])
    shown = window.home.part(0, window.home.segment.numel)
    start = int(shown.storage_offset()) + window.offset
    return func(shown.as_strided(window.size, window.stride, start), *args[1:], **kwargs)


def _array(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """As numpy has it, for reading: what is written there would be lost."""
    array: numpy.ndarray[Any, Any] = _on_values(func, args, kwargs)
    array.flags.writeable = False
    return array


def _written_out(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """For people: as a plain parameter is."""
    with torch.no_grad():
        values = _on_values(torch.clone, args[:1], {})
    return func(values.requires_grad_(_window(args[0]).learns), *args[1:], **kwargs)


def _gradient(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``.grad``: None as long as there are no gradients, or only those that a trainer was shown."""
    parameter = args[0]
    if isinstance(parameter, Resting) and parameter.requires_grad and parameter._home.keeper.has_gradients():
        refuse(
            parameter._home.name,
            "have its gradient in .grad",
            "read streamed.gradients(), forget them with streamed.zero_grad(), and let streamed.step() clip "
            "(max_grad_norm of the optimizer); loops that clip themselves take streamed.trainer_optimizer()",
        )
    if len(args) > 1 and args[1] is not None:
        refuse(_window(parameter).home.name, "be given a gradient", "let backward() make it")
    return func(*args, **kwargs)


def _set_data(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """``.data = values``."""
    parameter, given = args
    window = _window(parameter)
    name, unit, device = window.home.name, window.home.unit, window.home.keeper.device
    values = _on_values(torch.clone, (given,), {}) if isinstance(given, _AtRest) else given
    same = isinstance(parameter, Resting) and (values.shape, values.dtype) == (window.size, unit.dtype)
    if not same or values.device.type != device.type:
        refuse(name, "be given memory of another shape, dtype or device", "resize or convert it before stream()")
    with outside_inference_mode():
        window.home.write(values.detach().reshape(-1), 0)


def _refused(what: str, hint: str) -> Callable[..., NoReturn]:
    def refused(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> NoReturn:
        rests = [leaf for leaf in tree_flatten((tuple(args), dict(kwargs)))[0] if isinstance(leaf, _AtRest)]
        refuse(_window(rests[0]).home.name, what, hint)

    return refused


def _getters(names: str) -> set[Any]:
    return {getattr(torch.Tensor, name).__get__ for name in names.split()}


def _methods(names: str) -> set[Any]:
    return {getattr(torch.Tensor, name) for name in names.split()}


_GRAD: Any = torch.Tensor.grad
_AS_THEY_ARE = frozenset(
    _getters("dtype device layout requires_grad is_leaf grad_fn _version is_cuda is_cpu is_meta is_sparse is_quantized")
    | _getters("is_mkldnn is_nested is_xpu is_mps retains_grad _backward_hooks output_nr")
    | _methods("requires_grad_ is_floating_point is_complex get_device element_size is_inference")
    | {torch.Tensor.requires_grad.__set__, torch.is_floating_point, torch.is_complex}  # type: ignore[attr-defined]
)
"""What a tensor without memory knows of itself."""
_ANSWERS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(
        _getters("shape ndim nbytes itemsize")
        | _methods("size numel nelement dim ndimension stride is_contiguous __len__")
        | {torch.numel},
        _of_shape,
    ),
    **dict.fromkeys(_methods("numpy __array__"), _array),
    **dict.fromkeys(_methods("__repr__ __format__"), _written_out),
    **dict.fromkeys((_GRAD.__get__, _GRAD.__set__, _GRAD.__delete__), _gradient),
    torch.Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    **dict.fromkeys(
        _methods("data_ptr untyped_storage storage _typed_storage __dlpack__ set_ resize_ resize_as_ share_memory_"),
        _refused("give its memory away between its uses", "clone() it, or read model.state_dict()"),
    ),
    **dict.fromkeys(
        _methods("register_hook register_post_accumulate_grad_hook"),
        _refused(
            "have a hook on its gradient", "say in the loss what its gradient is to be, or freeze it before stream()"
        ),
    ),
    **dict.fromkeys(
        (torch.autograd.grad, torch.autograd.backward),
        _refused("be asked for its gradient alone", "call loss.backward(), and read streamed.gradients()"),
    ),
}
