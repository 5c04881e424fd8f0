"""Batches that other systems get wrong: the loss, its gradients and the step are those of plain PyTorch on each row."""

from __future__ import annotations

import copy
import math
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lazytrain.jobs.executor import stream
from lazytrain.jobs.introspect import model_facts
from lazytrain.jobs.optim import HybridAdamW
from lazytrain.jobs.policy import Policy

families = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "families.py")))


def streamed_of(model, rows, length, *, dtype="float32", optimizer=None, accumulation=1):
    facts = model_facts(model, micro_batch=rows, sequence_length=length, dtype=dtype)
    homes = [*("host" for _ in facts.layers), "gpu"]
    policy = Policy.from_homes(facts, homes, accumulation=accumulation)
    return stream(model, policy, device="cpu", facts=facts, optimizer=optimizer)


def test_the_first_token_of_an_answer_is_part_of_the_mean(make_model) -> None:
    """Five tokens, of which two are the answer; only the first of these is hard: the loss is half of its own."""
    model = make_model("qwen2")
    ids = torch.tensor([[3, 4, 5, 6, 7]])
    labels = torch.tensor([[-100, -100, -100, 6, 7]])
    with torch.no_grad():
        each = -model(input_ids=ids).logits.log_softmax(-1)[0, [2, 3], [6, 7]]
    with streamed_of(model, 1, 5) as streamed:
        loss = streamed.model(input_ids=ids, labels=labels).loss.item()
    assert loss == pytest.approx(each.mean().item(), rel=1e-6)
    assert abs(each[0] - each[1]) > 1e-2, "or a dropped first token would not show"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_padded_on_the_left_are_the_rows_alone(make_model, attention: str, dtype: str) -> None:
    """Whose first queries see nothing, which makes NaN of some attentions."""
    model = make_model("qwen2", attn_implementation=attention).to(getattr(torch, dtype))
    rows = [torch.arange(3, 5), torch.arange(3, 19)]
    wanted = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    for row in rows:
        plain = copy.deepcopy(model)
        plain(input_ids=row[None], labels=row[None], num_items_in_batch=16).loss.backward()
        for name, parameter in plain.named_parameters():
            wanted[name] += parameter.grad.float()
    ids, labels, mask = torch.full((2, 16), 2), torch.full((2, 16), -100), torch.zeros((2, 16), dtype=torch.long)
    for at, row in enumerate(rows):
        ids[at, 16 - len(row) :], mask[at, 16 - len(row) :] = row, 1
        labels[at, 17 - len(row) :] = row[1:]  # what comes before the first token is no part of the row
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with streamed_of(model, 2, 16, dtype=dtype) as streamed:
        batch = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "labels": labels}
        streamed.model(**batch, num_items_in_batch=16).loss.backward()
        got = streamed.gradients()
    for name, gradient in got.items():
        assert gradient.isfinite().all(), name
        limit = 1e-5 if dtype == "float32" else 0.05
        assert (gradient.float() - wanted[name]).norm() <= limit * max(1e-3, wanted[name].norm()), name


def test_experts_without_a_token_get_a_step_with_a_gradient_of_zero() -> None:
    """One token decides; experts that it does not reach change by weight decay alone."""
    model = families.small_model("mixtral")
    plain = copy.deepcopy(model)
    ids = torch.tensor([[5, 6]])
    loss = plain(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    experts = {name: p for name, p in plain.named_parameters() if ".experts." in name and p.dim() == 3}
    idle = {name: p.grad.flatten(1).abs().amax(1) == 0 for name, p in experts.items()}
    assert all(none.any() and not none.all() for none in idle.values())
    before = {name: p.detach().clone() for name, p in experts.items()}
    decayed = [p for p in plain.parameters() if p.dim() > 1]
    groups = [{"params": decayed}, {"params": [p for p in plain.parameters() if p.dim() < 2], "weight_decay": 0.0}]
    torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1).step()
    optimizer = HybridAdamW(lr=1e-2, weight_decay=0.1, state_bits=32)
    with streamed_of(model, 1, 2, optimizer=optimizer) as streamed:
        streamed.model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        streamed.step()
        after = streamed.state_dict()
    for name, parameter in plain.named_parameters():
        sure = parameter.grad.abs() > 1e-6  # the first step of smaller ones is the sign of rounding
        assert torch.allclose(after[name][sure], parameter[sure], rtol=1e-4, atol=1e-5), name
    for name, none in idle.items():
        assert torch.allclose(after[name][none], before[name][none] * (1 - 1e-2 * 0.1), rtol=1e-6), name


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_the_step_counts_its_tokens_whatever_the_model_knows_of_it(make_model, make_batch, accumulation: int) -> None:
    """A model class without the argument for it would take the mean of each micro-batch."""
    model = make_model("qwen2")
    known = type(model)

    class Custom(known):
        accepts_loss_kwargs = False

        def forward(self, input_ids=None, attention_mask=None, position_ids=None, labels=None, use_cache=None):
            return super().forward(
                input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, labels=labels,
                use_cache=use_cache,
            )  # fmt: skip

    whole = make_batch(rows=4)
    count = int((whole["labels"][:, 1:] >= 0).sum())
    gradients = {}
    for cls in (known, Custom):
        taken = copy.deepcopy(model)
        taken.__class__ = cls
        with streamed_of(taken, 4 // accumulation, 17, accumulation=accumulation) as streamed:
            total = 0.0
            for part in range(accumulation):
                rows = slice(part * 4 // accumulation, (part + 1) * 4 // accumulation)
                batch = {name: tensor[rows] for name, tensor in whole.items()}
                loss = streamed.model(**batch, num_items_in_batch=count).loss
                loss.backward()
                total += loss.item()
            gradients[cls] = streamed.gradients()
        assert math.isfinite(total)
    for name, gradient in gradients[known].items():
        assert torch.allclose(gradients[Custom][name], gradient, rtol=1e-4, atol=1e-6), name
    plain = copy.deepcopy(model)
    plain(**whole, num_items_in_batch=count).loss.backward()
    for name, parameter in plain.named_parameters():
        assert torch.allclose(gradients[Custom][name], parameter.grad, rtol=1e-4, atol=1e-6), name
