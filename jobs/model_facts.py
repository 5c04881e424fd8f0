"""What the planner and the simulator must know about a model at one batch shape; `introspect` measures it.

A model is a chain of **units**: the modules with parameters of their own that run before the layers (embeddings),
the layers, those that run after them (the final norm), and the head, which turns the last hidden states into a loss in
chunks. Units are what the executor streams, one at a time.
"""

from __future__ import annotations

from typing import Literal

from .frozen import Frozen, digest

UnitKind = Literal["before", "layer", "after", "head"]
Internals = Literal["none", "matmuls", "all"]
"""What a layer keeps from its forward, so that its backward need not compute it again."""


class UnitFacts(Frozen):
    """One unit at the given batch shape. Bytes are those of tensors in the compute dtype."""

    name: str
    """Dotted module path in the Hugging Face model, for example ``model.layers.3``; a later call of the same module is
    a unit of its own that shares its weights, named ``model.layers.3#2`` and so on."""
    kind: UnitKind
    variety: str
    """What sort of unit it is, for example ``Qwen3DecoderLayer`` or ``Qwen3_5DecoderLayer/linear_attention``."""
    parameters: int
    """Parameters that the unit uses, shared and frozen ones included."""
    frozen_parameters: int = 0
    """Those among them that do not learn: they are streamed, and have neither gradient nor optimizer state."""
    weight_bytes: int
    """Bytes of one load of its weights."""
    frozen_bytes: int = 0
    """Bytes of the frozen ones among them."""
    shares_weights_with: str = ""
    """Name of the earlier unit that owns this unit's (tied) weights; they have one master there."""
    forward_flops: float
    """Floating-point operations of one forward of one micro-batch."""
    attention_flops: float = 0.0
    """Those of fused attention among them; all pairs of tokens count, also where one is masked."""
    input_bytes: int = 0
    """Bytes of its boundary, the tensor that it is run again from; 0 if that is as large as the output before it."""
    output_bytes: int
    """Bytes of its output: the boundary after it (0 for the head)."""
    saved_bytes: int
    """Bytes autograd keeps for backward when everything is kept, beside the weights and the unit's arguments."""
    saved_matmul_bytes: int
    """Bytes of the outputs of matrix products and of attention among them."""
    forward_workspace_bytes: int
    """Peak of a forward that keeps nothing, beyond its input, its weights and its output."""
    backward_workspace_bytes: int
    """Peak of re-forward and backward, beyond input, weights, incoming gradient, and the gradients it gives back."""
    keeping_matmuls_bytes: tuple[int, int] | None = None
    """Workspace of forward and of backward, beyond what is kept too, when outputs of products are kept. Negative where
    what is kept or given back is never there all at once; None where it was not measured."""
    keeping_all_bytes: tuple[int, int] | None = None
    """The same when everything that autograd saves is kept."""
    kernels_follow_graph: bool = False
    """Whether it runs other kernels where no graph is recorded (attention whose mask learns). Its first forward then
    records one too, of which nothing is kept, so that the second gives the same."""

    def kept_bytes(self, internals: Internals) -> int:
        """Bytes that it keeps from its forward to its backward, beside its boundary."""
        return {"none": 0, "matmuls": self.saved_matmul_bytes, "all": self.saved_bytes}[internals]

    def workspaces(self, internals: Internals) -> tuple[int, int]:
        """Bytes that a forward, and a backward, needs while it runs beside what it reads, keeps and gives back.

        Where that was not measured, a bound: all that is kept would otherwise be working memory of backward.
        """
        plain = (self.forward_workspace_bytes, self.backward_workspace_bytes)
        measured = {"none": plain, "matmuls": self.keeping_matmuls_bytes, "all": self.keeping_all_bytes}[internals]
        return measured or (plain[0], max(0, plain[1] - self.kept_bytes(internals)))

    @property
    def trainable_parameters(self) -> int:
        """Parameters that learn."""
        return self.parameters - self.frozen_parameters

    @property
    def gradient_bytes(self) -> int:
        """Bytes of one gradient of it; 0 if all of it is frozen."""
        return self.weight_bytes - self.frozen_bytes


class ModelFacts(Frozen):
    """A model at one micro-batch and sequence length."""

    architecture: str
    """Class name, for example ``Qwen3ForCausalLM``."""
    dtype: Literal["float32", "bfloat16"]
    micro_batch: int
    """Rows of one micro-batch."""
    sequence_length: int
    """Tokens of one row."""
    hidden_size: int
    vocabulary: int
    parameters: int
    """Parameters, frozen ones included and tied ones counted once."""
    side_bytes: int
    """Tensors that live on the device through the whole step beside the units: masks, rotary tables, ids, labels."""
    summed_bytes: int = 0
    """Bytes among them that a backward begins to take: gradients that the backwards of several layers add up."""
    input_stays: bool = False
    """Whether the model's code holds the first layer's input until its last layer has run, wherever its home is."""
    loose: tuple[str, ...] = ()
    """Parameters that are read outside any unit; one more unit before the others holds them, on the device all the
    step long."""
    loss: Literal["chunks", "whole"] = "chunks"
    """Whether the loss can be made from the last hidden states chunk by chunk, or only from all logits at once."""
    positions: int | None = None
    """Tokens of the longest row that the model is for, as its configuration has it; None where that does not say."""
    before: tuple[UnitFacts, ...]
    layers: tuple[UnitFacts, ...]
    after: tuple[UnitFacts, ...]
    head: UnitFacts

    @property
    def units(self) -> tuple[UnitFacts, ...]:
        """All units in the order of the forward pass."""
        return (*self.before, *self.layers, *self.after, self.head)

    @property
    def trainable_parameters(self) -> int:
        """Parameters that learn, tied ones counted once."""
        return sum(unit.trainable_parameters for unit in self.units if not unit.shares_weights_with)

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch."""
        return self.micro_batch * self.sequence_length

    @property
    def element_bytes(self) -> int:
        """Bytes of one streamed weight."""
        return 4 if self.dtype == "float32" else 2

    @property
    def boundary_bytes(self) -> tuple[int, ...]:
        """Bytes of boundary 0..L: boundary i is the input of layer i, boundary L the output of the last layer."""
        outputs = tuple(layer.output_bytes for layer in self.layers)
        before = (outputs[0], *outputs)  # the residual stream keeps its width
        inputs = tuple(layer.input_bytes or size for layer, size in zip(self.layers, before, strict=False))
        return (*inputs, outputs[-1])

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know who trains the model at this shape, though nothing keeps it from running."""
        if self.positions is None or self.sequence_length <= self.positions:
            return ()
        return (
            f"sequences of {self.sequence_length:,} tokens are longer than the {self.positions:,} that the model is "
            "for (max_position_embeddings): at the positions beyond, it has learned nothing yet",
        )

    @property
    def digest(self) -> str:
        """Identifies model and batch shape; a policy is valid only for the facts it was made from."""
        return digest(self.model_dump(mode="json", exclude={"positions"}))  # on which no program depends
