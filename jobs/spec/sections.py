"""The job file as values. The sentence under a field is its documentation; its default is what an absent key means."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..units import MOST_SOLVE_S, MOST_TOKENS, Duration, Moment
from .types import AutoBytes, AutoCount, Count, Name, Rows, Seed, Share, Targets, Text


class Section(BaseModel):
    """Strict with people: an unknown key, a number written as text or a NaN is refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class Model(Section):
    """The model that is trained."""

    path: Text
    """Folder in Hugging Face layout, hub id, or configuration file of the model."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of weights and activations on the device; master weights are always float32."""
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """Attention implementation that transformers is asked for."""
    trust_remote_code: bool = False
    """Whether Python code that lies beside the model may run."""


class Source(Section):
    """Rows of one kind."""

    path: Text
    """JSON array, JSON lines (either may be gzipped) or parquet file, a folder of them, or hf:// and a hub id."""
    format: Literal[
        "auto", "alpaca", "question/answer", "query/response", "sharegpt", "messages", "text", "preference"
    ] = "auto"
    """Keys of a row; auto tells it from the first row that fits a known format."""
    name: Text | None = None
    """Entry of the dataset_info.json that path is or holds; for a hub id, its configuration."""
    part: Text = "train"
    """Which part of a data set on the hub is read."""
    columns: Annotated[dict[str, str], Field(strict=False)] = {}
    """Keys that a format expects, each with the key that stands for it in the rows."""
    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Times that each training row is used in an epoch; a fraction uses as many rows as it says, drawn by the seed."""


class Split(Section):
    """How usable rows are divided into a training and an evaluation part."""

    train: Share = 0.7
    """Share of the rows that is trained on."""
    eval: Share = 0.3
    """Share of the rows that is held out."""
    seed: Seed = 42
    """Decides which rows go where."""

    @model_validator(mode="before")
    @classmethod
    def _rest(cls, value: Any) -> Any:
        """One share alone means that the other is the rest."""
        if not isinstance(value, Mapping):
            return value
        for one, other in (("train", "eval"), ("eval", "train")):
            share = value.get(one)
            if isinstance(share, int | float) and other not in value and 0 <= share <= 1:
                return {**value, other: round(1 - share, 12)}
        return value

    @model_validator(mode="after")
    def _at_most_all(self) -> Split:
        if self.train + self.eval > 1 + 1e-9:
            raise ValueError(f"train and eval add up to {self.train + self.eval:g}; they may add up to 1 at most")
        if self.train == 0:
            raise ValueError("train is 0: no row would be trained on")
        return self


class Data(Section):
    """The rows that are trained and evaluated on."""

    train: Annotated[tuple[Source, ...], Field(min_length=1, strict=False)]
    """Files of training rows."""
    eval: Annotated[tuple[Source, ...], Field(strict=False)] = ()
    """Files of evaluation rows; without any, split holds rows out of train."""
    split: Split | None = None
    """Shares of the training files' rows; 0.7 and 0.3 unless eval names files, then all rows are trained on."""
    max_length: Annotated[int, Field(ge=2, le=MOST_TOKENS)] = 1024
    """Tokens of the longest row; longer ones are cut there and counted."""
    packing: bool | Literal["required"] = True
    """Puts several rows into one sequence where a check shows that the model keeps them apart, else rows of like length
    into a batch; required refuses a model that fails the check."""
    loss_on: Literal["assistant"] = "assistant"
    """Whose tokens carry the loss."""
    supervise_generation_prompt: bool = False
    """Whether what the chat template puts before an answer, and inference supplies, carries the loss too."""
    chat_template: Text | None = None
    """Template by name (chatml, alpaca, vicuna) or a file with one; null takes the tokenizer's own."""
    system_policy: Literal["fold", "error"] = "fold"
    """What becomes of a system turn that the template refuses: part of the first user turn, or the job is refused."""
    cache: Text | None = None
    """Folder where tokenized rows are kept under the digest of all they depend on; null keeps them with the run."""

    @model_validator(mode="before")
    @classmethod
    def _default_split(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and not value.get("eval") and value.get("split") is None:
            return {**value, "split": {}}
        return value

    @model_validator(mode="after")
    def _eval_or_split(self) -> Data:
        if self.eval and self.split is not None:
            raise ValueError("eval names files and split holds rows out; give one of the two")
        return self


class Dpo(Section):
    """Direct preference optimization (Rafailov et al. 2023)."""

    beta: Annotated[float, Field(gt=0, le=10)] = 0.1
    """How closely the model is held to the one that it was at the start; smaller lets it go further."""


class Train(Section):
    """The loop."""

    objective: Literal["sft", "dpo"] = "sft"
    """What is learned: sft the answers of the rows, dpo to prefer each pair's chosen answer to its rejected one."""
    dpo: Dpo = Dpo()
    """Settings of the objective dpo."""
    epochs: Count = 1
    """Times that every training row is used."""
    max_steps: Count | None = None
    """Optimizer steps after which training ends, even within an epoch."""
    batch: AutoCount = "auto"
    """Sequences of one optimizer step, a preference pair being two; auto searches the size with the highest
    throughput."""
    learning_rate: Annotated[float, Field(gt=0, le=10)] = 1e-5
    """Highest learning rate."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """How the learning rate falls after the warm-up: to zero along a half cosine or a line, not at all, or (wsd) along
    a line at the end only."""
    warmup: Annotated[float, Field(ge=0)] = 0.03
    """Steps of linear warm-up: below 1 a share of all steps, from 1 a number of steps."""
    decay: Annotated[float, Field(ge=0)] = 0.1
    """Steps of decay at the end of wsd: below 1 a share of all steps, from 1 a number of steps."""
    patience: Count | None = None
    """Evaluations of the loss in a row without a lower one after which training ends; null never ends it early."""
    weight_decay: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """Decoupled weight decay."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Global gradient norm above which gradients are scaled down; null turns clipping off."""
    freeze: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """Names or patterns (*embed_tokens*, model.layers.[0-3]) of parameters and modules that do not learn: they are
    streamed as they are, without gradient and optimizer state. Empty trains all."""
    seed: Seed = 42
    """Seed of row order, dropout and everything else that is drawn."""

    @model_validator(mode="after")
    def _whole_steps(self) -> Train:
        for name, value in (("warmup", self.warmup), ("decay", self.decay)):
            if value >= 1 and not float(value).is_integer():
                raise ValueError(f"{name} {value:g} is neither a share below 1 nor a whole number of steps")
        return self

    def warmup_steps(self, total_steps: int) -> int:
        """Steps of warm-up in a run of ``total_steps``, at most all of them."""
        return _steps(self.warmup, total_steps)

    def decay_steps(self, total_steps: int) -> int:
        """Steps of decay of the schedule wsd, at most those after the warm-up."""
        return min(_steps(self.decay, total_steps), total_steps - self.warmup_steps(total_steps))


def _steps(amount: float, total_steps: int) -> int:
    return min(int(amount if amount >= 1 else math.ceil(amount * total_steps)), total_steps)


class Lora(Section):
    """Low-rank adapters (Hu et al. 2022): the model's own weights are frozen and streamed as they are."""

    rank: Count = 16
    """Inner dimension of every adapter."""
    alpha: Annotated[float, Field(gt=0, le=10_000)] = 32.0
    """What an adapter adds is scaled by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of an adapter's inputs that is dropped while training."""
    target_modules: Targets = "all-linear"
    """Modules that get an adapter, by the last part of their name ([q_proj, v_proj]); all-linear means every linear
    one but the head."""


class Optimizer(Section):
    """AdamW on the host."""

    name: Literal["hybrid8bit", "adamw"] = "hybrid8bit"
    """hybrid8bit keeps both moments in 8 bits, adamw in float32."""
    betas: Annotated[
        tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]], Field(strict=False)
    ] = (
        0.9,
        0.999,
    )
    """Decay of the first and of the second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the second moment."""
    master: Literal["split", "bf16_stochastic"] = "split"
    """split keeps exact float32 master weights, as the bfloat16 halves that are streamed and the low halves (6.03 bytes
    a parameter with the states); bf16_stochastic keeps bfloat16 alone, rounded so that updates are right on average
    (4.03 bytes)."""
    state_bits: Literal[8, 32] = 8
    """Bits of each moment of hybrid8bit; 32 is adamw."""
    block_size: Count = 256
    """Neighbouring moments that share a scale."""
    eight_bit_fraction: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of every tensor whose moments are kept in 8 bits; the LazyTrain paper: 0.02, with a block_size of 4096."""
    min_8bit_size: Count = 4096
    """Tensors of fewer elements keep float32 moments, as those of one dimension do."""
    fp32_states: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """Patterns of parameter names that keep float32 moments, such as *embed_tokens*."""
    no_decay: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """Patterns of parameter names without weight decay, beside norms and biases, which never have it."""
    threads: Count | None = None
    """Most threads of an update; null takes PyTorch's number. Never more than the job was given."""

    def arguments(self) -> dict[str, Any]:
        """What HybridAdamW is made with, apart from what the section train says."""
        return self.model_dump(exclude={"name", "state_bits"}) | {
            "state_bits": self.state_bits if self.name == "hybrid8bit" else 32
        }


class Plan(Section):
    """What the planner may use. Memory is that of the machine unless it is given."""

    planner: Literal["full", "paper", "megatrain", "every_layer", "keep_all"] = "full"
    """Which planner decides the policy."""
    gpu_memory: AutoBytes = "auto"
    """GPU memory that may be used."""
    host_memory: AutoBytes = "auto"
    """Host memory that may be used."""
    nvme: Text | None = None
    """Folder on a fast disk for boundaries that fit nowhere else; null uses no disk."""
    solve_seconds: Annotated[float, Field(gt=0, le=MOST_SOLVE_S)] = 20.0
    """Longest time for the solver."""


class Evaluate(Section):
    """What is measured on the evaluation rows."""

    metric: Literal["exact_match"] = "exact_match"
    """Share of rows whose generated answer is the expected one."""
    every: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Share of an epoch between two evaluations of the loss."""
    answer: Text = "The answer is:"
    """Text before the final answer."""
    limit: Count | None = None
    """Most rows to generate for, spread evenly over the evaluation rows; null takes all."""
    max_new_tokens: Count = 256
    """Longest generated answer."""
    batch: Rows = 64
    """Rows generated for at once."""
    temperature: Annotated[float, Field(ge=0, le=100)] = 0.0
    """0 writes the likeliest token each time; above it, tokens are drawn, 1 being the model's own probabilities."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Draws only from the likeliest tokens that together have this probability."""
    seed: Seed = 0
    """Seed of what is drawn."""


class Resources(Section):
    """Where the job may run."""

    gpu: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """Names of the GPUs it may run on; empty means any."""


class Queue(Section):
    """How the job waits."""

    priority: Annotated[int, Field(ge=0, le=100)] = 50
    """Higher goes first."""
    max_duration: Annotated[Duration, Field(gt=0)] | None = None
    """Longest run time, for example 24h; null sets no limit."""
    deadline: Moment | None = None
    """When it should have ended, for example 2027-01-31 08:00 (local time unless a zone is given); null sets none."""
    retries: Annotated[int, Field(ge=0, le=1000)] = 2
    """Times that a job is started again after its node failed."""


class Output(Section):
    """What the job leaves behind."""

    dir: Text
    """Folder of checkpoints, metrics and results; by default runs/ and the job's name."""
    save_every: Count = 500
    """Steps between two checkpoints."""
    keep: Count = 3
    """Newest checkpoints that are kept."""


class JobSpec(Section):
    """One fine-tuning job: the whole job file, checked."""

    name: Name
    """Name of the job; by default that of the file."""
    model: Model
    """The model that is trained."""
    data: Data
    """The rows that are trained and evaluated on."""
    train: Train = Train()
    """The loop."""
    lora: Lora | None = None
    """Trains adapters alone; null trains all parameters."""
    optimizer: Optimizer = Optimizer()
    """AdamW on the host."""
    plan: Plan = Plan()
    """What the planner may use."""
    evaluate: Evaluate = Evaluate()
    """What is measured on the evaluation rows."""
    resources: Resources = Resources()
    """Where the job may run."""
    queue: Queue = Queue()
    """How the job waits."""
    output: Output
    """What the job leaves behind."""

    @model_validator(mode="after")
    def _one_choice(self) -> JobSpec:
        if self.lora is not None and self.train.freeze:
            raise ValueError("lora freezes all weights but its adapters; remove train.freeze or lora")
        return self

    def to_yaml(self) -> str:
        """The job file that loads to an equal value, with every default written out."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
