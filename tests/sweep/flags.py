"""Every flag of the host: swept, or left out for a reason.

The sweep's own flags are read from `factors` and `cases`; `unlisted` says which flags of an
installed host are in neither list, so that a new release of the host cannot add one unseen.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from tests.sweep import cases
from tests.sweep.factors import DATA, MASKS, MODEL, MODES, TOPOLOGIES, WAYS

# Reason -> patterns of flags, without the leading dashes. The first that fits counts.
LEFT_OUT: dict[str, str] = {
    "needs a GPU or Transformer Engine": r"fp8.*|fp4.*|first-last-layers-bf16|num-layers-at-.*|"
    r"pipeline-model-parallel-comm-backend|.*mxfp8.*|te-.*|.*transformer-engine.*|"
    r".*cuda-graph.*|tp-comm-.*|(no|disable)-tp-comm-.*|(no|disable)-fp8.*|use-flash-attn|"
    r"attention-backend|flash-attention-version|.*kitchen.*|use-te-.*|transformer-impl|"
    r".*grouped-gemm.*|moe-flex-.*|moe-.*deepep.*|moe-.*hybridep.*|moe-ncclep-.*|"
    r".*precision-aware.*|(main|exp)-.*-dtype|.*offload.*|(no-)?(cpu|pin)-.*|"
    r".*nccl.*|use-sharp|sharp-.*|high-priority-.*|symmetric-.*|disable-symmetric-.*|"
    r"multi-latent-attention|mla-.*|q-lora-rank|kv-lora-rank|qk-head-dim|qk-pos-emb-head-dim|"
    r"v-head-dim|cache-mla-latents|multi-.*|dsa-.*|(no|disable)-dsa-.*|linear-.*|"
    r"experimental-attention-variant|moe-(permute|router)-fusion|fused-residual-rmsnorm|"
    r"use-fused-weighted-squared-relu|moe-paged-stash.*|moe-expert-rank-capacity-factor|"
    r"cp-comm-type|hierarchical-context-parallel-sizes|gpu-sniff-test-interval|"
    r"cross-entropy-fusion-impl|delay-wgrad-compute|defer-embedding-wgrad-compute|"
    r"wgrad-deferral-limit|overlap-moe-expert-parallel-comm|overlap-dispatch-.*|ep-overlap-.*|"
    r"use-ring-exchange-p2p|use-megatron-fsdp-.*|flash-decode|mamba-.*|disable-mamba-.*|"
    r"moe-shared-expert-overlap|moe-single-grouped-.*|moe-.*glu-interleave-size|"
    r"batch-invariant-mode|moe-apply-probs-on-input",
    "chosen by the CPU stand-ins": r"distributed-backend|no-gradient-accumulation-fusion|"
    r"no-persist-layer-norm|no-(masked-softmax|rope|bias-.*)-fusion|disable-jit-fuser|"
    r"use-cpu-initialization|no-initialization|num-workers|lazy-mpu-init|local-rank",
    "inference": r".*inference.*|.*prefill.*|decode-only-.*|num-speculative-tokens|"
    r"use-same-sampling-seed-.*|max-tokens-to-oom|use-legacy-static-engine|"
    r"output-bert-embeddings|mlp-chunks-.*|nccl-all-reduce-for-prefill",
    "another loss or loop than pretraining of a GPT": r"rl-.*|no-rl-.*|grpo-.*|perform-rl-step|"
    r"langrl-.*|refit-method|bert-.*|ict-.*|.*biencoder.*|retriever-.*|dino-.*|vision-.*|swin-.*|"
    r"mask-(type|factor|prob)|iter-per-epoch|img-.*|num-channels|num-classes|patch-dim|"
    r"classes-fraction|data-per-class-fraction|head-lr-mult|titles-.*|evidence-.*|block-data-path|"
    r"embedding-path|indexer-.*|query-in-block-prob|use-one-sent-docs|short-seq-prob|"
    r"encoder-.*|decoder-(num-layers|seq-length)|logits-.*|.*hybrid-.*pattern|is-hybrid-model|"
    r"mtp-hybrid-.*|heterogeneous-.*|spec|fim-.*|mrope-section|freeze-all-layers|sample-rate|"
    r"no-bert-.*|sft-tokenizer-.*|no-sft.*|mtp-(standalone|detach-heads)",
    "reads data from files": r".*data-path|data-args-path|.*-data-args-path|split|"
    r"data-cache-path|no-mmap-bin-files|mock-data|dataloader-(fast|defer)-.*|"
    r"num-dataset-builder-threads|object-storage-.*|mid-level-.*|per-dataset-.*|"
    r"allow-ambiguous-pad-tokens|.*vocab.*|merge-file|.*tokenizer.*|tiktoken-.*|trust-remote-code|"
    r"chat-template|.*msc.*|phase-transition-iterations|validation-set-names",
    "the model's form alone": r"(hidden|ffn-hidden)-size|num-attention-heads|kv-channels|"
    r"(no-)?yarn-.*|rotary-.*|.*rope.*|relative-.*|use-rotary-.*|no-position-embedding|window-.*|"
    r"norm-epsilon|layernorm-.*|apply-layernorm-1p|openai-gelu|squared-relu|quick-geglu|glu-.*|"
    r"activation-func-.*|init-.*|embedding-init-.*|.*mup.*|softmax-type|qk-(l2|clip).*|"
    r"attention-(output-gate|softmax-in-fp32)|apply-query-key-layer-scaling|fp32-residual-.*|"
    r"mscale.*|onnx-safe|.*initialization.*|init-method-.*|log-max-attention-logit|"
    r"moe-(router-(topk|group|num|pre|force|quantile|bias|enable|padding).*|ffn-hidden-size|"
    r"layer-recompute|latent-size|shared-expert-gate|token-drop-policy|pad-expert.*|"
    r"enable-routing-replay|per-layer-logging|use-upcycling|upcycling-.*)|mtp-use-repeated-layer|"
    r"(no|disable)-clone-scatter-.*|moe-router-topk-scaling-factor|.*residual-connection.*|"
    r"seed|.*rng.*|data-parallel-random-init|deterministic-mode",
    "makes a step random, or depends on how a batch is cut": r"(hidden|attention)-dropout|"
    r"moe-input-jitter-eps|moe-expert-capacity-factor",
    "the optimizer, after the gradient": r"(adam|sgd|muon|no-muon|lion|soap)-.*|optimizer-.*|"
    r"use-torch-optimizer-.*|overlap-cpu-optimizer-.*|dump-param-.*|.*weight-decay.*|apply-wd-.*|"
    r"(no-)?lr-.*|min-lr|warmup|decoupled-.*|(override|use-checkpoint)-opt.*|hysteresis|"
    r"(min-loss-scale|loss-scale-window)|overlap-param-gather-with-optimizer-step|"
    r"no-use-layer-wise-.*|start-.*|end-.*|no-weight-.*",
    "form of a checkpoint": r"save.*|non-persistent-.*|ckpt-.*|no-ckpt-.*|disable-ckpt-.*|"
    r"async-.*|use-(dist|persistent)-ckpt.*|dist-ckpt-.*|distrib-optim-.*|replication.*|"
    r"auto-detect-ckpt-format|override-ckpt-iteration|pretrained-checkpoint|verify-integrity|"
    r"use-(mp-args|checkpoint-args|tokenizer-model).*|exit-on-missing-checkpoint|"
    r"(no|disable)-(stream|use-tokenizer).*|no-save-.*|load-main-params-from-ckpt|no-load-.*",
    "ends or watches a run from outside": r"exit-.*|adlr-.*|inprocess-.*|.*-ft-.*|ft-.*|"
    r"enable-ft-package|fault-injector-.*|.*straggler.*|run-workload-.*|profile.*|.*profiler.*|"
    r"record-.*|memory-snapshot-path|nvtx-ranges|flight-recorder-.*|(no|disable)-flight-.*|"
    r"distributed-timeout-.*|fake-process-group|result-rejected-.*|test-mode|skip-train|"
    r"train-sync-interval|(no-|disable-)?manual-gc.*|empty-unused-memory-level|config-logger-dir|"
    r"help|yaml-cfg|enable-experimental|app-tag-.*|no-barrier-.*",
    "what is printed": r"log-.*|no-log-.*|disable-log-.*|logging-level|tensorboard-.*|wandb-.*|"
    r"timing-.*|.*one-logger.*|moe-routing-trace-.*",
    "Megatron FSDP: refused or measured as a whole, its own options not": r".*fsdp.*|"
    r".*-sharding-strategy|create-all-gather-group|keep-fp8-.*|suggested-communication-.*|"
    r"enable-full-sharding-.*|no-gradient-reduce-div-fusion",
    "adds ranks with data of their own": r".*gtp-.*|.*num-weight-shards",
    "deprecated: another name of a flag that is swept, or refused by the host": r"batch-size|"
    r"model-parallel-size|rampup-batch-size|recompute-activations|checkpoint-activations|"
    r"use-mcore-models|fp16-lm-cross-entropy|decrease-batch-size-if-needed|"
    r"num-layers-per-virtual-pipeline-stage|no-overlap-p2p-communication|"
    r"disable-bf16-reduced-.*|ddp-param-name-.*|decoder-last-pipeline-num-layers|"
    r"disable-align-grad-reduce|persistent-save-interval|account-for-.*",
    "ends or hangs the host itself, without the plugin too": r"error-injection-.*|"
    r"recompute-modules",
    "in 0.16 alone": r"no-scatter-gather-tensors-in-pipeline|use-legacy-models|hybrid-.*-ratio",
}


def swept() -> set[str]:
    """Flags that some launch of the sweep is given."""
    texts = [topology.flags for topology in TOPOLOGIES.values()]
    texts += [f"--loss-aggregation {mode.flags}" for mode in MODES.values()]
    texts += [*MODEL.values(), *DATA.values(), *MASKS.values(), *cases.BASE, *cases.TRAINING]
    texts += [flags for values in WAYS.values() for flags in values.values()]
    found = {word for text in texts for word in text.split() if word.startswith("--")}
    return {flag for flag in found | cases.ALWAYS if not flag.startswith("--sweep-")}


def reason(flag: str) -> str | None:
    """Why the sweep leaves out ``flag``; None if it does not, or does not know it."""
    if flag in swept():
        return None
    bare = flag.lstrip("-")
    return next((why for why, known in LEFT_OUT.items() if re.fullmatch(known, bare)), None)


def unlisted(flags: Iterable[str]) -> list[str]:
    """Those that are neither swept nor left out."""
    known = swept()
    return sorted(f for f in flags if f.startswith("--") and f not in known and reason(f) is None)
