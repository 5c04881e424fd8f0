"""A model that is not trained: its exact match on a job's rows, and what it writes after a person's words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..adapters import load_with_adapters
from ..data import prepare, render_prompt
from ..errors import InputError
from ..evaluate import exact_match
from ..executor import Emulated, Streamed, stream
from ..frozen import Frozen
from ..generate import GREEDY, Sampling
from ..introspect import model_facts
from ..policy import Home, Policy
from ..run_directory import RunDirectory
from ..spec import JobSpec, Model
from .evaluation import answers

_ANY_LENGTH = 16
"""Tokens of the shape that facts are taken at: without a backward, nothing depends on it."""


class Evaluated(Frozen):
    """Exact match of a model on the evaluation rows of a job."""

    model: str
    exact_match: float
    correct: int
    total: int
    interval: tuple[float, float]
    """Holds the true rate with 95 % confidence (Wilson)."""
    verdicts: str
    """File with prompt, output, expected, predicted and verdict of every row."""


def trained_model(path: str | Path) -> str:
    """The model, or the adapters, of a run whose directory ``path`` is; else ``path`` itself."""
    directory = RunDirectory(Path(path))
    return str(directory.model) if directory.spec.exists() and directory.model.is_dir() else str(path)


def evaluate_model(spec: JobSpec, *, model: str, device: str | Emulated, verdicts: Path) -> Evaluated:
    """Generate for the job's evaluation rows and compare. Raises InputError when it has none."""
    section, settings = spec.model.model_copy(update={"path": model}), spec.evaluate
    with opened(section, device) as (streamed, tokenizer):
        data = prepare(spec.data, tokenizer)
        if not len(data.eval) or data.report.pairs:
            raise InputError("the job has no evaluation rows with answers", hint="set data.split or data.eval")
        sampling = Sampling(settings.temperature, settings.top_p, settings.seed)
        match = exact_match(
            lambda prompts: answers(
                streamed,
                tokenizer,
                prompts,
                max_new_tokens=settings.max_new_tokens,
                batch=settings.batch,
                sampling=sampling,
            ),
            data.eval,
            marker=settings.answer,
            limit=settings.limit,
        )
    verdicts.parent.mkdir(parents=True, exist_ok=True)
    match.save(verdicts)
    return Evaluated(
        model=model,
        exact_match=match.rate,
        correct=match.correct,
        total=match.total,
        interval=match.interval,
        verdicts=str(verdicts),
    )


def complete(
    section: Model,
    prompts: Sequence[str],
    *,
    device: str | Emulated = "auto",
    max_new_tokens: int = 256,
    batch: int = 64,
    sampling: Sampling = GREEDY,
    template: bool = True,
) -> list[str]:
    """What the model answers; with ``template`` each prompt becomes a user's turn, else it is continued as it is."""
    with opened(section, device) as (streamed, tokenizer):
        rendered = [render_prompt(tokenizer, prompt) if template else prompt for prompt in prompts]
        return answers(streamed, tokenizer, rendered, max_new_tokens=max_new_tokens, batch=batch, sampling=sampling)


@contextmanager
def opened(section: Model, device: str | Emulated) -> Iterator[tuple[Streamed, Any]]:
    """A model (adapters bring theirs) under streaming, in evaluation mode and without gradients, and its tokenizer."""
    model, tokenizer = load_with_adapters(section)
    facts = model_facts(model, micro_batch=1, sequence_length=_ANY_LENGTH, dtype=section.dtype)
    homes: list[Home] = ["host" for _ in facts.layers]
    with stream(model, Policy.from_homes(facts, [*homes, "gpu"]), device=device, facts=facts) as streamed:
        streamed.model.eval()
        with torch.no_grad():
            yield streamed, tokenizer
