"""Streams a small random model of every causal-LM architecture that transformers knows, against plain PyTorch.

    python tests/benchmarks/families.py [--quick] [--peaks] [--json] [--only NAME ...] [--resume FILE]

Each architecture's own configuration is scaled down by the names of its keys, and its model gets random weights. Two
batches of padded rows go through plain PyTorch and, under a policy drawn at random (homes of boundaries, recompute,
internals, resident layers), through the streamed model, in float32 and training mode, dropout included:

- a loss computed from the model's logits: ``exact`` means that it and **every** parameter gradient are bit-equal,
  ``close`` that they differ by at most 1e-6 of the gradient's norm;
- the model's own loss from ``labels``, which the engine computes in chunks of tokens: it must agree within 1e-6 too
  (a product over fewer rows is summed in another order, so bits may differ).

``refused`` are those that raise a typed error, with its text; ``unavailable`` those that plain PyTorch could not run
from a scaled-down configuration or on text alone; everything else is ``wrong``.

With ``--peaks`` each row has ``peaks`` too: the device memory that the program of a policy promises over what a step
takes, for policies that keep only boundaries, products, everything, and some of each.

A whole sweep takes ten minutes, twenty with ``--peaks``. With ``--resume`` each result is added to a file as a line of
JSON, and what the file has already is not run again.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import platform
import random
import resource
import sys
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from peaks import padded_batch, peak_in_turn, peak_over_time, policies
from resume import Kept
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, set_seed
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from lazytrain.jobs.errors import LazytrainError, ProgramError
from lazytrain.jobs.executor import stream
from lazytrain.jobs.introspect import model_facts
from lazytrain.jobs.model_facts import ModelFacts
from lazytrain.jobs.policy import LayerPolicy, Policy, lower

ROWS, LENGTH, LAYERS, VOCABULARY = 3, 17, 4, 96
PEAK_LENGTH = 64
"""Tokens of a row where memory is compared: fixed bytes must not hide those of activations."""
TOLERANCE = 1e-6
SECONDS, MEMORY_BYTES, WORKERS = 60, 6 << 30, 2
"""What one architecture may take, and how many run at once."""
QUICK = 16
"""With --quick, every so many-th architecture is run."""

SIZES: dict[int, str] = {
    64: "hidden_size d_model n_embd embedding_dim emb_dim lru_width word_embed_proj_dim embedding_size "
    "input_embedding_size output_embedding_size dim_model_base input_size max_position_embeddings "
    "n_positions max_seq_len context_length model_max_length original_max_position_embeddings max_target_positions "
    "hidden_size_global intermediate_size_mlp shared_intermediate_size adapter_out_dim out_hidden_size",
    96: "intermediate_size ffn_dim d_ff dff n_inner ffn_hidden_size dim_ff decoder_ffn_dim encoder_ffn_dim "
    "feed_forward_size dense_intermediate_size block_ff_dim",
    48: "moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size "
    "moe_shared_expert_intermediate_size shared_experts_intermediate_size router_hidden_size",
    128: "attention_hidden_size mamba_d_ssm d_inner",
    4: "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads encoder_attention_heads "
    "num_decoder_attention_heads num_encoder_attention_heads num_experts num_local_experts n_routed_experts "
    "moe_num_experts mamba_num_heads linear_num_value_heads linear_num_heads swa_num_attention_heads index_n_heads "
    "zero_expert_num num_query_groups num_hash_layers gated_norm_rank hc_lowrank loop_gate_rank",
    2: "num_key_value_heads num_kv_heads kv_n_heads linear_num_key_heads swa_num_key_value_heads num_experts_per_tok "
    "num_experts_per_token moe_topk moe_top_k moe_k top_k_experts n_mamba_heads num_global_key_value_heads "
    "index_topk_blocks",
    1: "n_group topk_group num_expert_group n_groups mamba_n_groups mamba_ngroups first_k_dense_replace "
    "moe_layer_start_index num_dense_layers adapter_rank n_layers_per_attn_res_block",
    16: "head_dim qk_nope_head_dim v_head_dim kv_lora_rank index_head_dim mamba_d_state state_size ssm_state_size "
    "linear_key_head_dim linear_value_head_dim linear_head_dim dim_head kv_channels attention_head_size d_kv d_head "
    "hidden_size_per_layer_input swa_head_dim global_head_dim mamba_d_head mamba_head_dim mamba_headdim laurel_rank "
    "time_step_rank mamba_dt_rank ngram_vocab_size_base ple_embed_dim d_rel rel_extent",
    8: "qk_rope_head_dim sliding_window sliding_window_size attention_window_size attention_chunk_size chunk_size "
    "mamba_chunk_size index_topk window_size local_attention block_size index_block_size keep_window_size "
    "rotary_dim swa_rope_dim mamba_n_heads o_lora_rank",
    32: "q_lora_rank attention_head_dim",
    24: "qk_head_dim",
}
SCALED = {key: value for value, keys in SIZES.items() for key in keys.split()}
LAYER_COUNTS = frozenset(
    (
        "num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers",
        "num_decoder_layers", "num_encoder_layers", "num_blocks", "depth",
    )
)  # fmt: skip

DROPPED = frozenset(("rope_parameters_by_layer", "transformers_version", "architectures"))
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": 4},
    {"head_dim": 32},
    {"num_key_value_heads": 4, "mamba_n_heads": 8, "intermediate_size": 128},
    {"n_groups": 1, "num_heads": 8, "mamba_num_heads": 8, "head_dim": 16},
    {"hidden_size": 128, "num_attention_heads": 8, "attention_hidden_size": 256},
    {"head_dim": 8},
    {"mamba_n_heads": 16},
    {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    {"is_decoder": True},
)
"""Tried in turn until plain PyTorch runs: relations between sizes differ from family to family."""


_LATENT = {"head_dim": 8, "num_key_value_heads": 4}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_MIXED = ["mamba", "hybrid"] * 2
_SLIDING = ["sliding_attention", "full_attention"] * 2
_INDEXER = {
    "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}  # fmt: skip
SPECIAL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "deepseek_v3", "longcat_flash", "youtu"), _LATENT),
    "deepseek_v2": {**_LATENT, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "num_key_value_heads": 4},
    **{name: {"head_dim": 16} for name in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    "nemotron": {"num_key_value_heads": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "zamba": {"layers_block_type": _MIXED},
    "zamba2": {"layers_block_type": _MIXED, "hybrid_layer_ids": [1, 3], "num_mem_blocks": 1, "mamba_headdim": 64},
    "xmod": {"default_language": "en_XX", "is_decoder": True},
    "gemma3n_text": {"num_kv_shared_layers": 2, "layer_types": _SLIDING},
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1, "layer_types": _SLIDING},
    "dots3_note_text": {"num_key_value_heads": 4, "swa_head_dim": 24, "head_dim": 24},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "prophetnet": {"max_position_embeddings": 128},
    **dict.fromkeys(("qwen4_exp", "qwen4_exp_text"), _INDEXER),
}
"""What the defaults of some architectures leave open, or what must go together in them; tried first."""


def small_config(model_type: str, **changes: Any) -> PretrainedConfig:
    """The architecture's default configuration with every size scaled down by its name."""
    config = AutoConfig.for_model(model_type)
    settings = _scaled(config.to_dict(), changes)
    settings.pop("model_type", None)
    return AutoConfig.for_model(model_type, **settings)


def _scaled(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    counts = {settings[key] for key in LAYER_COUNTS if isinstance(settings.get(key), int)}
    return {k: _scaled_value(k, v, counts, changes) for k, v in settings.items() if k not in DROPPED}


def _scaled_value(key: str, value: Any, counts: set[int], changes: dict[str, Any]) -> Any:
    if key in changes:
        return changes[key]
    if isinstance(value, dict):
        by_layer = {k: v for k, v in value.items() if not str(k).isdigit() or int(k) < LAYERS}
        return _scaled(by_layer, changes)
    if isinstance(value, (list, tuple)):
        return _few(list(value)) if len(value) in counts and len(value) > LAYERS else value
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if key in LAYER_COUNTS:
        return min(value, LAYERS)
    if "vocab_size" in key:
        return VOCABULARY
    if key.endswith(("token_id", "token_index")):
        return min(value, 3)
    return min(value, SCALED.get(key, value)) if value > 0 else value


def _few(kinds: list[Any]) -> list[Any]:
    """The first layers' kinds; a kind that only comes later takes the last places."""
    few = kinds[:LAYERS]
    late = [kind for i, kind in enumerate(kinds) if kind not in kinds[:i] and kind not in few]
    for place, kind in enumerate(late[: LAYERS - 1]):
        few[LAYERS - 1 - place] = kind
    return few


def small_model(model_type: str, **changes: Any) -> PreTrainedModel:
    """A model of the architecture with random weights, in training mode."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(small_config(model_type, **changes), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.nan_to_num_(0.0, 0.0, 0.0).add_(0.02 * torch.randn_like(parameter))  # none is zero, none alike
    return model.train()


def make_batch(seed: int) -> dict[str, torch.Tensor]:
    """Rows of different lengths, padded on the right, with labels on their later part."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, VOCABULARY, (ROWS, LENGTH), generator=generator)
    mask, labels = torch.ones_like(ids), ids.clone()
    labels[:, : LENGTH // 3] = -100
    for row in range(1, ROWS):
        ids[row, LENGTH - 2 * row :], mask[row, LENGTH - 2 * row :], labels[row, LENGTH - 2 * row :] = 2, 0, -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def random_policy(facts: ModelFacts, seed: int, *, recompute: bool = True, internals: bool = True) -> Policy:
    """Any home for any boundary, any internals for any layer, where allowed."""
    choose = random.Random(seed)
    homes = [choose.choice(("gpu", "host", "nvme", "recompute")) for _ in facts.layers]
    homes = ["host" if home == "recompute" and (i == 0 or not recompute) else home for i, home in enumerate(homes)]
    policy = Policy.from_homes(facts, [*homes, "gpu"], weight_slots=choose.choice((2, 3)))
    layers = tuple(
        LayerPolicy(
            index=i,
            internals="none"
            if not internals or (*homes, "gpu")[i + 1] == "recompute"
            else choose.choice(("none", "matmuls", "all")),
            internals_home=choose.choice(("gpu", "host")),
            resident=choose.random() < 0.3,
        )
        for i in range(len(facts.layers))
    )
    return policy.model_copy(update={"layers": layers})


def loss_of(model: PreTrainedModel, batch: dict[str, torch.Tensor], *, own: bool) -> torch.Tensor:
    """The model's own loss, or one computed from its logits."""
    set_seed(99)
    if own:
        return model(**batch, use_cache=False).loss
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    logits = model(**inputs, use_cache=False).logits
    targets = batch["labels"][:, 1:].reshape(-1)
    return torch.nn.functional.cross_entropy(logits[:, :-1].reshape(len(targets), -1).float(), targets)


def plain(
    model: PreTrainedModel, batch: dict[str, torch.Tensor], *, own: bool
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of plain PyTorch."""
    model.zero_grad(set_to_none=True)
    loss = loss_of(model, batch, own=own)
    loss.backward()
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return loss.item(), gradients


class Unavailable(Exception):
    """Plain PyTorch cannot run this architecture from a scaled-down configuration on text alone."""


def runnable_model(model_type: str) -> tuple[PreTrainedModel, list[tuple[float, dict[str, torch.Tensor]]]]:
    """The first variant that plain PyTorch can train, with its results: from logits, and with its own loss."""
    failures = []
    for changes in (SPECIAL.get(model_type, {}), *VARIANTS):
        try:
            model = small_model(model_type, **changes)
            plain(model, make_batch(0), own=False)  # some switch their attention for short rows in their first call
            results = [plain(model, make_batch(0), own=own) for own in (False, True)]
        except Exception as error:  # whatever the family's code raises for sizes that do not go together
            failures.append(f"{type(error).__name__}: {error}")
            continue
        finite = all(g.isfinite().all() for _, gradients in results for g in gradients.values())
        if finite and any(g.any() for g in results[0][1].values()):
            return model, results
        failures.append("gradients that are not finite, or all zero")
    raise Unavailable("; ".join(dict.fromkeys(failures)) if os.environ.get("FAMILIES_ALL") else failures[0])


def difference(got: tuple[float, dict[str, torch.Tensor]], wanted: tuple[float, dict[str, torch.Tensor]]) -> float:
    """0 if everything is bit-equal, otherwise the largest error relative to a norm."""
    (loss, gradients), (wanted_loss, wanted_gradients) = got, wanted
    idle = wanted_gradients.keys() - gradients.keys()  # parameters that text does not reach are not streamed
    if gradients.keys() - wanted_gradients.keys() or any(wanted_gradients[name].any() for name in idle):
        return float("inf")
    largest = max(g.norm().item() for g in wanted_gradients.values())
    worst = abs(loss - wanted_loss) / abs(wanted_loss)
    for name in gradients:
        gradient = wanted_gradients[name]
        if not torch.equal(gradients[name], gradient):
            error = (gradients[name] - gradient).norm().item()
            worst = max(worst, error / max(gradient.norm().item(), 1e-3 * largest), 1e-12)
    return worst if worst == worst else float("inf")


def streamed(model: PreTrainedModel, policy: Policy, facts: ModelFacts) -> list[tuple[float, dict[str, torch.Tensor]]]:
    """Loss and gradients of the streamed model: from logits, and with its own loss."""
    results = []
    with stream(model, policy, device="cpu", facts=facts) as running:
        for own in (False, True):
            loss = loss_of(running.model, make_batch(0), own=own)
            loss.backward()
            results.append((loss.item(), running.gradients()))
    return results


def streamed_as_allowed(model: PreTrainedModel, facts: ModelFacts, seed: int) -> tuple[list[Any], list[str]]:
    """`streamed` with a random policy; a decision that is refused for this model, with a hint, is left out."""
    allowed = {"recompute": True, "internals": True}
    while True:
        try:
            got = streamed(model, random_policy(facts, seed, **allowed), facts)
            return got, [decision for decision, is_allowed in allowed.items() if not is_allowed]
        except ProgramError as error:
            refused = {"another home": "recompute", "internals: none": "internals"}
            decision = next((d for hint, d in refused.items() if hint in error.hint), "")
            if not allowed.get(decision):
                raise
            allowed[decision] = False


def check(model_type: str, begun: Callable[[str], object] = print, *, with_peaks: bool = False) -> dict[str, Any]:
    """What came of one architecture; ``begun`` is told when plain PyTorch is done."""
    try:
        model, wanted = runnable_model(model_type)
    except Unavailable as error:
        return {"status": "unavailable", "reason": str(error)[:300]}
    begun("streaming")
    try:
        facts = model_facts(model, micro_batch=ROWS, sequence_length=LENGTH, dtype="float32")
        got, limits = streamed_as_allowed(model, facts, sum(model_type.encode()))
    except LazytrainError as error:
        return {"status": "refused", "reason": f"{type(error).__name__}: {error.message}"}
    from_logits, own = (difference(g, w) for g, w in zip(got, wanted, strict=True))
    worst = max(from_logits, own)
    status = "wrong" if worst > TOLERANCE else "exact" if from_logits == 0 else "close"
    row = {"status": status, "error": from_logits, "own_loss_error": own, "without": limits}
    return row | ({"peaks": promised_over_real(model)} if with_peaks else {})


def promised_over_real(model: PreTrainedModel) -> dict[str, float]:
    """For each of some policies, the device memory that its program promises over what a step takes."""
    facts = model_facts(model, micro_batch=ROWS, sequence_length=PEAK_LENGTH, dtype="float32")
    batch, found = padded_batch(model, ROWS, PEAK_LENGTH, VOCABULARY), {}
    for name, policy in policies(facts).items():
        try:
            found[name] = round(peak_over_time(lower(policy, facts)) / peak_in_turn(model, policy, facts, batch), 4)
        except ProgramError:  # a decision that is refused for this model, with a hint
            continue
    return found


def _child(model_type: str, pipe: Any, with_peaks: bool) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (resource.getrlimit(resource.RLIMIT_AS)[0], -1))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    try:
        result = check(model_type, pipe.send, with_peaks=with_peaks)
    except Exception as error:  # an untyped error is a defect, and one architecture must not end the sweep
        result = {"status": "wrong", "reason": f"{type(error).__name__}: {error}"[:300]}
        if os.environ.get("FAMILIES_TRACEBACK"):
            raise
    pipe.send(result)


def check_apart(model_type: str, seconds: float = SECONDS, *, with_peaks: bool = False) -> dict[str, Any]:
    """`check` in a process of its own, so that neither a crash nor an endless loop ends the sweep."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(model_type, theirs, with_peaks), daemon=True)
    start = time.perf_counter()
    process.start()
    theirs.close()
    try:
        result = {"status": "unavailable", "reason": f"plain PyTorch took more than {seconds} s"}
        if ours.poll(seconds):
            result = ours.recv()
        if result == "streaming":
            result = ours.recv() if ours.poll(seconds) else {"status": "wrong", "reason": f"no answer in {seconds} s"}
    except EOFError:
        result = {"status": "wrong", "reason": "the process died"}
    process.kill()
    process.join()
    return {"architecture": model_type, **result, "seconds": round(time.perf_counter() - start, 2)}


def architectures() -> list[str]:
    """Model types of the causal-LM mapping of the installed transformers."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The rows, counted and listed by outcome."""
    by_status = {
        s: [r for r in rows if r["status"] == s] for s in ("exact", "close", "refused", "wrong", "unavailable")
    }
    return {
        "architectures": len(rows),
        "exact": len(by_status["exact"]),
        "close": len(by_status["close"]),
        "refused": [{"architecture": r["architecture"], "reason": r["reason"]} for r in by_status["refused"]],
        "wrong": by_status["wrong"],
        "unavailable": [{"architecture": r["architecture"], "reason": r["reason"]} for r in by_status["unavailable"]],
        "exact_list": [r["architecture"] for r in by_status["exact"]],
        "close_list": by_status["close"],
        "worst_own_loss_error": max((r["own_loss_error"] for r in by_status["exact"]), default=None),
        "peaks": _peaks(rows),
        "without": {r["architecture"]: r["without"] for r in rows if r.get("without")},
        "seconds": round(sum(r["seconds"] for r in rows), 1),
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "versions": {"python": platform.python_version(), **{n: version(n) for n in ("torch", "transformers")}},
    }


def _peaks(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How near the promised memory is to what steps took; ``off`` are architectures beyond a percent, worst first."""
    found = {r["architecture"]: r["peaks"] for r in rows if r.get("peaks")}
    if not found:
        return {}
    worst = {name: max(peaks.values(), key=lambda ratio: abs(ratio - 1)) for name, peaks in found.items()}
    off = sorted((name for name in found if abs(worst[name] - 1) > 0.01), key=lambda name: -abs(worst[name] - 1))
    return {
        "compared": len(found),
        "within_1_percent": len(found) - len(off),
        "lowest": min(((min(peaks.values()), name) for name, peaks in found.items())),
        "highest": max(((max(peaks.values()), name) for name, peaks in found.items())),
        "off": {name: found[name] for name in off},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"every {QUICK}th architecture")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--only", nargs="+", default=[], help="run these architectures")
    parser.add_argument("--resume", type=Path, help="file that keeps results, and gives those it has")
    parser.add_argument("--workers", type=int, default=WORKERS, help="architectures that run at once")
    parser.add_argument("--peaks", action="store_true", help="compare promised and real device memory too")
    options = parser.parse_args()
    names = options.only or architectures()[:: QUICK if options.quick else 1]
    kept, rows = Kept(options.resume), []
    with ThreadPool(options.workers) as pool:
        run = functools.partial(
            check_apart, seconds=4 * SECONDS if options.peaks else SECONDS, with_peaks=options.peaks
        )
        for row in pool.imap(lambda name: kept.result(name, lambda: run(name)), names):
            rows.append(row)
            told = f"{row['status']:12} {row.get('reason', row.get('error'))} {row['seconds']} s"
            print(f"{row['architecture']:32} {told}", file=sys.stderr)
    result = summary(rows)
    if options.json:
        json.dump(result, sys.stdout, indent=1)
        print()
        return
    print(
        {
            k: v if isinstance(v, int) else len(v)
            for k, v in result.items()
            if k in ("exact", "close", "refused", "wrong", "unavailable")
        }
    )


if __name__ == "__main__":
    main()
