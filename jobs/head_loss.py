"""The loss, from the last hidden states, in chunks of tokens: all logits never exist at once.

The model's own forward runs, but its base model hands on the hidden states of no token, so the head has nothing to do;
where the model then asks for the loss of its logits, it gets the loss that was made in chunks from the states. What
else a model adds to its loss (the balance of its experts) is thereby kept.

The logits of a chunk come from the model's own code (its head, scaling and soft-caps): the causal-LM model's forward
runs with its base model replaced by one that returns the chunk.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, ModelOutput

from .errors import ProgramError

LOGIT_CHUNK_ELEMENTS = 2**26
"""Most logits (tokens x vocabulary) that exist at once: 256 MiB in float32."""
IGNORED = -100
"""Label of a position that has no loss, as in torch.nn.functional.cross_entropy."""


class _States(BaseModelOutputWithPast):
    """Hidden states, and None for whatever else a model looks for in its base model's output (router logits, ...)."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _GivenStates(nn.Module):
    """Stands in for the base model and returns the hidden states it was made with."""

    def __init__(self, states: torch.Tensor) -> None:
        super().__init__()
        self.states = states

    def forward(self, *args: Any, **kwargs: Any) -> _States:
        return _States(last_hidden_state=self.states)


class Logits:
    """The model's own map from hidden states (N, H) to logits (N, V); ``forward`` is the causal-LM model's forward."""

    def __init__(self, model: PreTrainedModel, forward: Callable[..., Any], vocabulary: int) -> None:
        self.vocabulary, self._model, self._forward = vocabulary, model, forward

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        modules, base = self._model._modules, str(self._model.base_model_prefix)
        original = modules[base]
        modules[base] = _GivenStates(states[None])
        try:
            output = self._forward(inputs_embeds=states[None], use_cache=False, return_dict=True)
        finally:
            modules[base] = original
        logits: torch.Tensor = output.logits[0]
        return logits


RowLoss = Callable[[torch.Tensor], torch.Tensor]
"""A scalar loss from the sum of the log-probabilities of each row's supervised tokens, (B,) float32."""

ChunkedLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Loss from hidden states (B, T, H) and labels (B, T)."""


def forward_in_chunks(
    model: PreTrainedModel, forward: Callable[..., Any], loss: ChunkedLoss, args: Any, kwargs: Any, labels: torch.Tensor
) -> Any:
    """The model's own ``forward`` with ``labels``, its logits' loss being ``loss`` of the base model's states.

    Raises ProgramError where the model's code makes that impossible, see the module's text.
    """
    base, asked = model.base_model, _Asked()
    run_base = base.forward

    def without_tokens(*args: Any, **kwargs: Any) -> Any:
        output = run_base(*args, **kwargs)
        asked.states = output[0]
        return _with_states(output, output[0][:, :0])

    def chunked(logits: torch.Tensor, labels_: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = kwargs.get("labels", labels_)
        if asked.states is None or given is not labels or tuple(logits.shape[:2]) != (len(labels), 0):
            raise _no_chunks(model)
        asked.losses += 1
        return loss(asked.states, labels)

    hidden = vars(base).get("forward")
    base.forward, model.loss_function = without_tokens, chunked
    try:
        output = forward(*args, labels=labels, **kwargs)
    finally:
        del model._loss_function, base.forward
        if hidden is not None:
            base.forward = hidden
    if asked.losses != 1:
        raise _no_chunks(model)
    return output


class _Asked:
    states: torch.Tensor | None = None
    losses = 0


def _no_chunks(model: PreTrainedModel) -> ProgramError:
    return ProgramError(f"the loss of {type(model).__name__} cannot be made from its last hidden states in chunks")


def _with_states(output: Any, states: torch.Tensor) -> Any:
    if isinstance(output, ModelOutput):
        output = copy.copy(output)
        output[next(iter(output.keys()))] = states
        return output
    return (states, *output[1:])


class Targets(NamedTuple):
    """The supervised tokens of a batch."""

    rows: torch.Tensor
    """Which of the flattened (B * T, H) states predict one: (N,) int64."""
    tokens: torch.Tensor
    """What they are: (N,) int64."""
    shape: torch.Size
    """(B, T)."""

    @classmethod
    def of(cls, labels: torch.Tensor) -> Targets:
        """Those of unshifted ``labels`` (B, T): the state at position t predicts label t + 1.

        How many there are is known only when the device of ``labels`` has counted them. So that nobody waits for a GPU
        that is busy with a forward, ask before the forward, and with labels on the host if they are there.
        """
        targets = nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:].reshape(-1)
        rows = (targets != IGNORED).nonzero().squeeze(1)
        return cls(rows, targets[rows], labels.shape)

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> Targets:
        """The same with its tensors moved."""
        return Targets(move(self.rows), move(self.tokens), self.shape)


def takes_a_count(model: nn.Module) -> bool:
    """Whether the model's own loss is divided by the number of tokens that its forward is given.

    What the class says of itself counts, as in the trainer of ``transformers``, else what its forward accepts.
    """
    said = getattr(model, "accepts_loss_kwargs", None)
    if said is not None:
        return bool(said)
    parameters = inspect.signature(type(model).forward).parameters.values()
    return any(p.kind is p.VAR_KEYWORD or p.name == "num_items_in_batch" for p in parameters)


def loss_only(logits: Logits, states: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Sum of the cross-entropies of ``targets`` (N,) given rows ``rows`` (N,) of ``states`` (B * T, H), in float32."""
    total = torch.zeros((), dtype=torch.float32, device=states.device)
    for part in _chunks(logits, len(targets)):
        total += nn.functional.cross_entropy(logits(states[rows[part]]).float(), targets[part], reduction="sum")
    return total


def row_log_probabilities(
    logits: Logits, states: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor, shape: Sequence[int]
) -> torch.Tensor:
    """Sum of the log-probabilities of each row's ``targets``, (B,) float32; ``states`` are (B * T, H), shape (B, T)."""
    sums = torch.zeros(shape[0], dtype=torch.float32, device=states.device)
    for part in _chunks(logits, len(targets)):
        losses = nn.functional.cross_entropy(logits(states[rows[part]]).float(), targets[part], reduction="none")
        sums.index_add_(0, rows[part] // shape[1], -losses)
    return sums


def log_probabilities_of_rows(logits: torch.Tensor, targets: Targets) -> torch.Tensor:
    """The same from all logits (B, T, V), for models whose loss needs them at once."""
    rows, tokens, shape = targets
    losses = nn.functional.cross_entropy(logits.flatten(0, 1)[rows].float(), tokens, reduction="none")
    sums = torch.zeros(shape[0], dtype=torch.float32, device=logits.device)
    return sums.index_add(0, rows // shape[1], -losses)


def row_loss_with_gradients(
    logits: Logits,
    states: torch.Tensor,
    rows: torch.Tensor,
    targets: torch.Tensor,
    shape: Sequence[int],
    row_loss: RowLoss,
    parameters: Sequence[nn.Parameter],
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor | None]]:
    """``row_loss`` of the rows' log-probabilities and its gradients, as in `loss_with_gradients`.

    The logits are made twice, chunk by chunk: what a token weighs is known only when all of its row were seen.
    """
    with torch.no_grad():
        sums = row_log_probabilities(logits, states, rows, targets, shape)
    with torch.enable_grad():
        loss = row_loss(sums.requires_grad_())
        (slopes,) = torch.autograd.grad(loss, sums)
    weights = -slopes[rows // shape[1]]
    _, of_states, of_parameters = loss_with_gradients(logits, states, rows, targets, 1.0, parameters, weights=weights)
    return loss.detach(), of_states, of_parameters


def loss_with_gradients(
    logits: Logits,
    states: torch.Tensor,
    rows: torch.Tensor,
    targets: torch.Tensor,
    normaliser: float | torch.Tensor,
    parameters: Sequence[nn.Parameter],
    *,
    weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor | None]]:
    """The loss `loss_only` / ``normaliser`` and its gradients: for ``states`` (B * T, H) and for ``parameters``.

    ``weights`` (N,) multiply the losses of the targets. Gradients of parameters that are frozen are None.
    """
    total = torch.zeros((), dtype=torch.float32, device=states.device)
    state_gradient = torch.zeros_like(states)
    parameter_gradients = [torch.zeros_like(p) if p.requires_grad else None for p in parameters]
    learned = [gradient for gradient in parameter_gradients if gradient is not None]
    for part in _chunks(logits, len(targets)):
        with torch.enable_grad():
            chunk = states[rows[part]].requires_grad_()
            if weights is None:
                loss = nn.functional.cross_entropy(logits(chunk).float(), targets[part], reduction="sum") / normaliser
            else:
                losses = nn.functional.cross_entropy(logits(chunk).float(), targets[part], reduction="none")
                loss = (losses * weights[part]).sum() / normaliser
        found = torch.autograd.grad(loss, [chunk, *(p for p in parameters if p.requires_grad)])
        total += loss.detach()
        state_gradient.index_copy_(0, rows[part], found[0])
        for held, new in zip(learned, found[1:], strict=True):
            held += new
        del chunk, loss, found
    return total, state_gradient, parameter_gradients


def chunk_tokens(vocabulary: int) -> int:
    """Tokens whose logits exist at once."""
    return max(1, LOGIT_CHUNK_ELEMENTS // vocabulary)


def _chunks(logits: Logits, rows: int) -> Iterator[slice]:
    size = chunk_tokens(logits.vocabulary)
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))
