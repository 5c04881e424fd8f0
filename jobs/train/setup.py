"""What is settled before the first step: model, rows, policy, batch, and whether an earlier process got somewhere."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from ..adapters import weights_digest
from ..checkpoint import Checkpoint, CheckpointStore
from ..data import Prepared, packing_problem, prepare
from ..errors import CheckpointError, InputError, ModelError
from ..frozen import digest
from ..introspect import model_facts
from ..learning import select_learning
from ..model import describe_model, empty_model, load_model
from ..model_facts import ModelFacts
from ..objectives import Objective, objective_of
from ..optim import HybridAdamW
from ..policy import Home, Policy
from ..run_directory import RunDirectory, write_atomically
from ..spec import JobSpec
from .frozen_weights import frozen_weights, keep_frozen, take_frozen
from .position import Position, RowOrder

log = logging.getLogger(__name__)
DEFAULT_MICRO_BATCH = 8

OnPoint = Callable[[str], object]


@dataclass
class Setup:
    """A run that can begin, or go on."""

    spec: JobSpec
    directory: RunDirectory
    store: CheckpointStore
    checkpoint: Checkpoint | None
    """Where an earlier process of this run got to."""
    model: Any
    tokenizer: Any
    data: Prepared
    facts: ModelFacts
    policy: Policy
    objective: Objective
    base: str | None = None
    """Digest of the frozen weights that checkpoints do not hold; None where they hold all weights."""
    notes: list[str] = field(default_factory=list)
    """What is odd about the model at this shape, and what is different from before the checkpoint, in words."""

    @property
    def batch(self) -> int:
        """Sequences of one step."""
        batch = self.spec.train.batch
        return self.micro_batch * self.policy.accumulation if batch == "auto" else batch

    @property
    def micro_batch(self) -> int:
        """Sequences of one micro-batch: the policy's, or as many of them as make whole pairs."""
        return self.policy.micro_batch // self.objective.together * self.objective.together

    @property
    def packed(self) -> bool:
        """Whether rows share sequences."""
        return self.data.report.packed

    @property
    def policy_digest(self) -> str:
        """Identifies what the policy decides, not what was predicted of it."""
        return digest(self.policy.model_dump(mode="json", exclude={"predicted", "certificate"}))

    def order(self) -> RowOrder:
        """The order of the training rows."""
        return RowOrder(
            self.data.train,
            batch=self.batch,
            seed=self.spec.train.seed,
            buckets=not self.packed,
            together=self.objective.together,
        )

    @property
    def batches_between_evaluations(self) -> int:
        """Steps from one evaluation of the loss to the next."""
        return max(1, round(self.spec.evaluate.every * self.order().batches_per_epoch))

    def optimizer(self) -> HybridAdamW:
        """The optimizer that the job asks for."""
        return HybridAdamW(
            lr=self.spec.train.learning_rate,
            weight_decay=self.spec.train.weight_decay,
            max_grad_norm=self.spec.train.max_grad_norm,
            **self.spec.optimizer.arguments(),
        )


def set_up(spec: JobSpec, policy: Policy | None, directory: RunDirectory, on_point: OnPoint) -> Setup:
    """Read everything. Raises InputError and its kin; nothing but descriptions is written."""
    torch.manual_seed(spec.train.seed)
    store = CheckpointStore(directory.checkpoints, keep=spec.output.keep, on_point=on_point)
    checkpoint = store.latest()
    model, tokenizer, base = _model(spec, directory, checkpoint)
    on_point("loaded")
    data = prepare(spec.data, tokenizer, cache=directory.rows)
    on_point("prepared")
    objective = objective_of(spec.train)
    objective.check(data)
    _decide_packing(spec, model, data, checkpoint, objective)
    facts, policy = _policy(spec, model, data, policy)
    setup = Setup(spec, directory, store, checkpoint, model, tokenizer, data, facts, policy, objective, base)
    _check_pairs(setup)
    setup.notes = [*facts.notes, *_changes(setup)]
    for note in setup.notes:
        log.warning(note)
    write_atomically(directory.policy, policy.to_json())
    return setup


def _model(
    spec: JobSpec, directory: RunDirectory, checkpoint: Checkpoint | None
) -> tuple[PreTrainedModel, Any, str | None]:
    """Model, tokenizer and the digest of weights that are frozen and in no checkpoint.

    A model that goes on needs no weights but the checkpoint's, and no file outside the run's directory; one with
    adapters also needs those that it began with.
    """
    if checkpoint is not None:
        return _model_again(spec, directory, checkpoint)
    model, tokenizer = load_model(spec.model)
    describe_model(model, tokenizer, directory.start)
    base = None if spec.lora is None else weights_digest(model)
    select_learning(model, spec)
    if spec.train.freeze:
        base = keep_frozen(model, directory.frozen)
    return model, tokenizer, base


def _model_again(
    spec: JobSpec, directory: RunDirectory, checkpoint: Checkpoint
) -> tuple[PreTrainedModel, Any, str | None]:
    """The model of a run that goes on: what the checkpoint holds is still to be taken up."""
    base = checkpoint.trainer["base"]
    if spec.lora is not None:
        model, tokenizer = _base_again(spec, directory, checkpoint)
    else:
        model, tokenizer = empty_model(spec.model, directory.start)
    select_learning(model, spec)
    if spec.train.freeze:
        take_frozen(model, frozen_weights(directory.frozen, base))
    return model, tokenizer, base


def _base_again(spec: JobSpec, directory: RunDirectory, checkpoint: Checkpoint) -> tuple[PreTrainedModel, Any]:
    """The model that the run's adapters are for. Raises CheckpointError when it is gone or another one."""
    hint = f"put the model back at {spec.model.path}, or delete {directory.path} to start again"
    try:
        model, tokenizer = load_model(spec.model)
    except ModelError as error:
        raise CheckpointError(
            f"the checkpoints in {directory.path} hold adapters alone, and {error.message}", hint=hint
        ) from error
    if weights_digest(model) != checkpoint.trainer["base"]:
        raise CheckpointError(
            f"the weights of {spec.model.path} are not those that the adapters in {directory.path} began with",
            hint=hint,
        )
    return model, tokenizer


def _check_pairs(setup: Setup) -> None:
    """Raise InputError where a step or a micro-batch cannot hold whole pairs."""
    together = setup.objective.together
    if setup.micro_batch == 0:
        raise InputError(
            "a preference pair is two rows, the policy takes one at a time",
            hint="plan for a batch of 2 or more, or leave out --policy",
        )
    if setup.batch % together:
        raise InputError(
            f"train.batch is {setup.batch}: a preference pair is two rows of a step, so it must be even",
            hint=f"set train.batch to {setup.batch + 1}",
        )


def _decide_packing(
    spec: JobSpec, model: Any, data: Prepared, checkpoint: Checkpoint | None, objective: Objective
) -> None:
    """Pack where the model keeps rows apart. Raises InputError where packing is required and it does not."""
    report = data.report
    if checkpoint is not None:
        report.packed = checkpoint.trainer["packed"]
        return
    wanted = spec.data.packing
    problem = _pairs_apart(objective) or packing_problem(model) if wanted else None
    if problem is not None and wanted == "required":
        raise InputError(f"rows cannot be packed: {problem}", hint="set data.packing to true or false")
    report.packed = bool(wanted) and problem is None
    report.packing_refused = problem or ""


def _pairs_apart(objective: Objective) -> str | None:
    return "the rows of a preference pair need sequences of their own" if objective.together > 1 else None


def _policy(spec: JobSpec, model: Any, data: Prepared, policy: Policy | None) -> tuple[ModelFacts, Policy]:
    """The model's facts at the policy's batch shape, and the policy: by default, every boundary waits on the host."""
    longest = data.train.longest
    if policy is not None and policy.sequence_length < longest:
        raise InputError(
            f"the policy is for {policy.sequence_length} tokens a row, the data has a row of {longest}",
            hint="plan again, or set data.max_length",
        )
    batch = spec.train.batch
    facts = model_facts(
        model,
        micro_batch=policy.micro_batch if policy else DEFAULT_MICRO_BATCH if batch == "auto" else batch,
        sequence_length=policy.sequence_length if policy else longest,
        dtype=spec.model.dtype,
    )
    homes: list[Home] = ["host" for _ in facts.layers]
    return facts, policy or Policy.from_homes(facts, [*homes, "gpu"])


def _changes(setup: Setup) -> list[str]:
    """What a run goes on with that was otherwise when its checkpoint was saved."""
    if setup.checkpoint is None:
        return []
    notes, trainer = [], setup.checkpoint.trainer
    position = Position.from_dict(trainer["position"])
    if trainer["batch"] != setup.batch:
        left = setup.order().steps(position, setup.spec.train.epochs) - position.steps
        notes.append(
            f"from step {position.steps} on a step takes {setup.batch} rows instead of {trainer['batch']}: the rows "
            f"that this epoch has left are each used once, {left} steps are left in all, and the learning rate follows "
            "the share of all steps that is done"
        )
    if trainer["policy"] != setup.policy_digest and trainer["batch"] == setup.batch:
        notes.append(
            "another policy than before: what is learned stays the same, but sums are taken in another order, so "
            "weights may differ in their last bits from those of a run that was never stopped"
        )
    return notes
