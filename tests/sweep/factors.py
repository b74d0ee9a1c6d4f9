"""The factors of the sweep: their values, with the flags of Megatron that each one stands for.

A case takes one value of every factor. Values that mean nothing apart stand together, such as the
sizes of a topology. `RULES` say which values the host takes together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

DIVISOR = 24.0


class Topology(NamedTuple):
    ranks: int
    flags: str = ""
    divided: int = 1  # ranks that share one rank's samples: TP x PP x CP
    layers: int = 2


class Mode(NamedTuple):
    """An aggregation, and what `tests.oracle.step_weights` calls it."""

    flags: str
    mode: str
    divisor: float | None = None


TP2 = "--tensor-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
CP2 = "--context-parallel-size 2"
EP2 = "--expert-model-parallel-size 2"
SP = "--sequence-parallel"
VPP2 = f"{PP2} --num-virtual-stages-per-pipeline-rank 2"

TOPOLOGIES = {
    "dp1": Topology(1),
    "dp2": Topology(2),
    "dp4": Topology(4),
    "tp2-dp2": Topology(4, TP2, 2),
    "tp2-sp": Topology(2, f"{TP2} {SP}", 2),
    "tp2-sp-cp2": Topology(4, f"{TP2} {SP} {CP2}", 4),
    "tp2-pp2-mapping": Topology(4, f"{TP2} {PP2} --use-tp-pp-dp-mapping", 4),
    "cp2": Topology(2, CP2, 2),
    "cp2-dp2": Topology(4, CP2, 2),
    "cp4": Topology(4, "--context-parallel-size 4", 4),
    "pp2-dp2": Topology(4, PP2, 2),
    "pp2-cp2": Topology(4, f"{PP2} {CP2}", 4),
    "pp2-tp2-sp": Topology(4, f"{PP2} {TP2} {SP}", 4),
    "pp2-uneven": Topology(2, f"{PP2} --decoder-first-pipeline-num-layers 3", 2, layers=4),
    "pp2-layout": Topology(2, f"{PP2} --pipeline-model-parallel-layout Ettt|tL", 2, layers=4),
    "vpp2": Topology(2, f"{PP2} --num-layers-per-virtual-pipeline-stage 1", 2, layers=4),
    "vpp2-dp2": Topology(4, VPP2, 2, layers=4),
    "vpp2-cp2": Topology(4, f"{VPP2} {CP2} --overlap-p2p-communication-warmup-flush", 4, layers=4),
    "vpp2-group": Topology(
        2, f"{VPP2} --microbatch-group-size-per-virtual-pipeline-stage 3", 2, layers=4
    ),
    "ep2": Topology(2, EP2),
    "ep2-cp2": Topology(4, f"{EP2} {CP2}", 2),
    "ep2-pp2": Topology(4, f"{EP2} {PP2}", 2),
    "ep2-tp2-sp": Topology(4, f"{EP2} {TP2} {SP} --expert-tensor-parallel-size 1", 2),
    "etp2": Topology(4, f"{TP2} {SP} --expert-tensor-parallel-size 2", 2),
    "hybrid-cp": Topology(2, f"{CP2} --hybrid-context-parallel --max-seqlen-per-dp-cp-rank 32", 2),
}

# Under its name on the command line, with more flags; and for `tests.oracle.step_weights`.
_PLAIN = ("token_mean", "sample_mean", "rollout_mean", "prompt_mean", "sample_sum")
_DIVISOR = f"--loss-aggregation-divisor {DIVISOR}"
_FUNCTION = "--loss-aggregation-function tests.sweep.data:sixty_fourth"
MODES = {
    **{name: Mode(name, name) for name in _PLAIN},
    "constant": Mode(f"constant {_DIVISOR}", "constant", DIVISOR),
    "sum": Mode("sum", "sum"),
    "sum-divisor": Mode(f"sum {_DIVISOR}", "sum", DIVISOR),
    "microbatch_mean": Mode("microbatch_mean", "microbatch_mean"),
    "custom": Mode(f"custom {_FUNCTION}", "sum", 64.0),
    "trl/dapo": Mode("trl/dapo", "token_mean"),
    "slime/sample_mean": Mode("slime/sample_mean", "rollout_mean"),
}

ADAM = "--optimizer adam"  # elsewhere SGD; see `cases._optimizer`
DISTRIBUTED = f"{ADAM} --use-distributed-optimizer"
OVERLAP = "--overlap-grad-reduce"
FSDP = "--use-megatron-fsdp --ckpt-format fsdp_dtensor --data-parallel-sharding-strategy"

# Values whose flags decide the model or its data, and so the reference too.
MODEL: dict[str, str] = {
    "gpt": "",
    "swiglu-gqa-untied": "--swiglu --normalization RMSNorm --untie-embeddings-and-output-weights "
    "--group-query-attention --num-query-groups 2 --disable-bias-linear",
    "learned-positions": "--position-embedding-type learned_absolute",
    "qk-norm": "--qk-layernorm --apply-residual-connection-post-layernorm --add-qkv-bias",
    "mtp": "--mtp-num-layers 1 --mtp-loss-scaling-factor 0",
    "moe": "--num-experts 4 --disable-bias-linear --moe-router-load-balancing-type none",
    "moe-alltoall-shared": "--num-experts 4 --disable-bias-linear "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0 --swiglu "
    "--moe-token-dispatcher-type alltoall --moe-shared-expert-intermediate-size 16",
    "moe-sigmoid-mixed": "--num-experts 4 --disable-bias-linear --moe-layer-freq ([0]+[1])*{half} "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0 "
    "--moe-router-score-function sigmoid --moe-router-dtype fp32 --moe-z-loss-coeff 0",
}

DATA: dict[str, str] = {
    "rows": "--no-create-attention-mask-in-dataloader",
    "rows-masked": "",
    "documents": "--sweep-data documents --no-create-attention-mask-in-dataloader",
    "documents-eod": "--sweep-data documents --eod-mask-loss "
    "--no-create-attention-mask-in-dataloader",
    "documents-reset-positions": "--sweep-data documents --reset-position-ids",
    "documents-reset-all": "--sweep-data documents --reset-position-ids --reset-attention-mask "
    "--eod-mask-loss",
    "documents-packed": "--sweep-data documents --dataloader-inter-document-masking "
    "--no-create-attention-mask-in-dataloader",
    "documents-packed-eod": "--sweep-data documents --dataloader-inter-document-masking "
    "--eod-mask-loss --no-create-attention-mask-in-dataloader",
    "sft": "--sweep-data packs --sft --no-create-attention-mask-in-dataloader",
}

MASKS = {kind: f"--sweep-masks {kind}" for kind in ("uneven", "fractional", "sparse")}

# Microbatch size, and microbatches of a data-parallel rank.
BATCHES = {"1x1": (1, 1), "1x2": (1, 2), "1x3": (1, 3), "2x1": (2, 1), "2x2": (2, 2), "1x6": (1, 6)}

# Everything else only the launch is told, and must not change what is computed.
WAYS: dict[str, dict[str, str]] = {
    "loss": {
        "stock": "",
        "per-token": "--calculate-per-token-loss",
        "fused": "--cross-entropy-loss-fusion",
        "per-token-fused": "--calculate-per-token-loss --cross-entropy-loss-fusion",
    },
    "gradients": {
        "ddp": "",
        "overlap-small-buckets": f"{OVERLAP} --ddp-bucket-size 500",
        "overlap-unaligned": f"{OVERLAP} --ddp-num-buckets 3 --no-align-grad-reduce",
        "average": "--ddp-average-in-collective",
        "clip": "--clip-grad 1e9",
        "distributed": DISTRIBUTED,
        "distributed-gather": f"{DISTRIBUTED} {OVERLAP} --overlap-param-gather",
        "distributed-gather-unaligned": f"{DISTRIBUTED} {OVERLAP} --overlap-param-gather "
        "--no-align-param-gather --ddp-average-in-collective",
        "distributed-fp32-scatter": f"{DISTRIBUTED} --ddp-reduce-scatter-with-fp32-accumulation",
        "distributed-instances": f"{DISTRIBUTED} --num-distributed-optimizer-instances 2 {OVERLAP}",
        "distributed-padded": f"{DISTRIBUTED} --ddp-pad-buckets-for-high-nccl-busbw "
        "--disable-gloo-process-groups",
        "whole-gradients": f"{ADAM} --save-wgrads-interval 1 --save {{folder}} --save-interval 100",
    },
    "precision": {
        "fp32": "",
        "bf16": "--bf16",
        "bf16-reduced": "--bf16 --grad-reduce-in-bf16",
        "bf16-accumulated": "--bf16 --accumulate-allreduce-grads-in-fp32",
        "fp16": "--fp16 --initial-loss-scale 8",
        "fp16-static": "--fp16 --loss-scale 4",
    },
    "recompute": {
        "none": "",
        "selective": "--recompute-granularity selective",
        "uniform": "--recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1",
        "block": "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
        "distributed": "--recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1 --distribute-saved-activations",
    },
    "evaluation": {
        "none": "--eval-iters 0 --eval-interval 100",
        "each-step": "--eval-iters 2 --eval-interval 1",
        "late": "--eval-iters 1 --eval-interval 1 --start-eval-at-iter 2",
        "full-sets": "--full-validation --multiple-validation-sets --eval-interval 1 "
        "--eval-iters 1",
        "own-batch": "--eval-iters 1 --eval-interval 1 --eval-micro-batch-size 1 "
        "--eval-global-batch-size {eval_batch}",
    },
    "restart": {
        "none": "",
        "torch": "--ckpt-format torch",
        "torch-dist": f"--ckpt-format torch_dist {ADAM}",
        "torch-dist-parallel": f"--ckpt-format torch_dist {ADAM} --ckpt-fully-parallel-load",
        "weights-only": "--ckpt-format torch --no-load-optim --no-load-rng",
        "finetune": "--ckpt-format torch --finetune",
    },
    "steps": {
        "one": "",
        "two": "",
        "samples": "",
        "schedule": "",
        "skip-second": "--iterations-to-skip 2",
        "skip-first": "--iterations-to-skip 1",
    },
    "checks": {
        "default": "",
        "rerun-off": "--rerun-mode disabled",
        "no-nan-check": "--no-check-for-nan-in-loss-and-grad",
        "spiky": "--check-for-spiky-loss",
        "large-gradients": "--check-for-large-grads",
        "logged": "--log-num-zeros-in-grad --log-params-norm --log-progress --log-throughput",
        "hash": "--check-weight-hash-across-dp-replicas-interval 1",
    },
    "loader": {
        "single": "--dataloader-type single",
        "cyclic": "--dataloader-type cyclic",
        "cyclic-unsharded": "--dataloader-type cyclic --no-data-sharding",
        "workers": "--dataloader-type single --num-workers 0",
    },
    "aggregation": {
        "keys": "",
        "empty-skip": "--loss-aggregation-empty skip",
        "empty-count": "--loss-aggregation-empty count",
        "audit": "--loss-aggregation-audit",
        "empty-step-error": "--loss-aggregation-empty-step error",
        "empty-step-skip": "--loss-aggregation-empty-step skip",
        "reader": "--loss-aggregation-batch tests.sweep.data:read_by_number",
        "rejected": "--loss-aggregation-rejected count",
    },
}

# Other wrappers than Megatron's DDP, each alone: not in pairs.
WRAPPERS: dict[str, str] = {
    f"fsdp-{name.replace('_', '-')}": f"{DISTRIBUTED} {FSDP} {name}"
    for name in ("no_shard", "optim", "optim_grads", "optim_grads_params")
}
WRAPPERS["torch-fsdp2"] = (
    "--use-torch-fsdp2 --ckpt-format torch_dcp --untie-embeddings-and-output-weights"
)

FACTORS: dict[str, Mapping[str, Any]] = {
    "topology": TOPOLOGIES,
    "mode": MODES,
    "model": MODEL,
    "data": DATA,
    "masks": MASKS,
    "batches": BATCHES,
    **WAYS,
}


class Rule(NamedTuple):
    """Which values of two factors the host takes together."""

    one: str
    other: str
    allows: Callable[[str, str], bool]

    def holds(self, case: Mapping[str, str]) -> bool:
        return self.allows(case[self.one], case[self.other])


EXPERTS = ("ep2", "ep2-cp2", "ep2-pp2", "ep2-tp2-sp", "etp2")
_AVERAGE = ("average", "distributed-gather-unaligned")
_INSTANCES = "distributed-instances"
_PLAIN_TP = ("tp2-dp2", "tp2-pp2-mapping")
_WHOLE_GROUPS = {
    **dict.fromkeys(("vpp2", "vpp2-dp2", "vpp2-cp2"), ("1x2", "2x2", "1x6")),
    "vpp2-group": ("1x3", "1x6"),
}
_DIVISIBLE = [name for name, t in TOPOLOGIES.items() if t.ranks // t.divided > 1 or "cp" in name]

# What the host refuses, each with the host's reason.
RULES: tuple[Rule, ...] = (
    # Without experts there are none to divide. Tensor parallelism with experts wants sequence
    # parallelism. Tied embeddings of a multi-token prediction stage differ from the first stage's.
    Rule("topology", "model", lambda t, m: t not in EXPERTS or m.startswith("moe")),
    Rule("topology", "model", lambda t, m: t not in _PLAIN_TP or not m.startswith("moe")),
    Rule("topology", "model", lambda t, m: "pp2" not in t or m != "mtp"),
    # A context-parallel group for each sample adds token counts; the host divides such a group's
    # samples over its ranks itself.
    Rule("topology", "loss", lambda t, x: t != "hybrid-cp" or "per-token" in x),
    Rule("topology", "loader", lambda t, x: t != "hybrid-cp" or "cyclic" not in x),
    # So no sum is left to divide by the number of tokens where the collective averages; over
    # instances of the optimizer stock Megatron's gradients are wrong, too.
    Rule("gradients", "loss", lambda g, x: g not in _AVERAGE or "per-token" not in x),
    Rule("gradients", "loss", lambda g, x: g != _INSTANCES or "per-token" not in x),
    # Two of these together.
    Rule("topology", "gradients", lambda t, g: t != "hybrid-cp" or g not in _AVERAGE),
    Rule("topology", "gradients", lambda t, g: t != "hybrid-cp" or g != _INSTANCES),
    Rule("model", "recompute", lambda m, r: r != "distributed" or not m.startswith("moe")),
    # Two instances of the distributed optimizer share the data-parallel ranks.
    Rule("topology", "gradients", lambda t, g: g != _INSTANCES or t in _DIVISIBLE),
    # A whole number of microbatches for each group of them.
    Rule("topology", "batches", lambda t, b: t[:3] != "vpp" or b in _WHOLE_GROUPS[t]),
    # Recomputed activations are divided over tensor-parallel ranks, unless sequences are.
    Rule("topology", "recompute", lambda t, r: r != "distributed" or t in _PLAIN_TP),
    # Stages in the middle get no attention mask, so documents see one another there.
    Rule("topology", "data", lambda t, d: t[:3] != "vpp" or d != "documents-reset-all"),
    # Skipped iterations read one iterator, and no part of a pack for context parallelism.
    Rule("topology", "steps", lambda t, s: s[:4] != "skip" or not (t[:3] == "vpp" or "cp" in t)),
    # A run that skips its first iteration does not stop after it; one of one step has saved none.
    Rule("steps", "restart", lambda s, r: s not in ("skip-first", "one") or r == "none"),
)
