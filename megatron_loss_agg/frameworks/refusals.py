"""Things that adapters cannot make exact: tables of batches, of settings, and of everything else.

A row becomes a message: "NAME must be NEEDED, got VALUE. REMEDY", or "NEEDED, got VALUE. REMEDY".
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, NamedTuple

from megatron_loss_agg.errors import AggregationError, DataError, HostError, OptionError
from megatron_loss_agg.launch.flags import VARIABLE

OFF = (None, False, "")
"""The values that mean a setting is off."""
UNSET = f"Unset {VARIABLE}."


class Setting(NamedTuple):
    """A setting of a framework, and the values with which the adapter is exact."""

    name: str
    """A flag, or an attribute of the configuration, with dots between nested ones."""
    needed: str
    """The end of the sentence "NAME must be ..."."""
    allowed: Container[Any] = OFF
    remedy: str = f"Change it, or unset {VARIABLE}."
    """The second sentence of the error."""


class Refusal(NamedTuple):
    """Anything else. ``{words}`` in braces are filled in when it is raised."""

    needed: str
    """The first sentence without its end, ", got ..."."""
    remedy: str = UNSET
    error: type[AggregationError] = HostError


class Batches(NamedTuple):
    """Ways in which a framework's samples can be grouped and weighted."""

    units: frozenset[str]
    """Units besides the sample and the step."""
    has_weights: bool = False
    has_hook: bool = False
    """The framework's loop has a `LossHook`, which takes all flags."""


_BY_PROMPT = frozenset({"prompt"})
_BY_ROLLOUT = frozenset({"prompt", "rollout"})
_BY_SAMPLE = frozenset[str]()

BATCHES = {
    "verl": Batches(_BY_ROLLOUT),
    "slime": Batches(_BY_ROLLOUT | {"microbatch"}),
    "miles": Batches(_BY_ROLLOUT),  # its adapter runs before there are microbatches
    "miles with its patch": Batches(_BY_ROLLOUT | {"microbatch"}),
    "NeMo-RL": Batches(_BY_PROMPT, has_weights=True),
    "NeMo-RL's SFT": Batches(_BY_SAMPLE, has_weights=True),
    "AReaL": Batches(_BY_PROMPT),
    "AReaL's SFT": Batches(_BY_SAMPLE),
    "RLinf": Batches(_BY_PROMPT),
    "ROLL's RLVR pipeline": Batches(_BY_PROMPT),
    "ROLL's agentic pipeline": Batches(_BY_ROLLOUT),
    "SkyRL": Batches(_BY_ROLLOUT),
    "ms-swift": Batches(frozenset({"microbatch"}), has_hook=True),
}
"""By name of a framework, or of a part of one."""

_DIVIDED = "off, since losses are then not divided by rollout_mask_sums"
_BY_MANAGER = (
    "off, so that the rollout manager splits samples into steps of --global-batch-size rollouts"
)
_BY_MICROBATCH = "false, since that loss is a mean over micro-batches"
_SKYRL_PATCH = (
    "Set it to false; or apply patches/skyrl/0.4.0.patch, and set "
    "trainer.algorithm.reduce_kl_and_entropy=true."
)

SETTINGS: dict[str, tuple[Setting, ...]] = {
    "slime": (  # and miles
        Setting("--calculate-per-token-loss", _DIVIDED),
        Setting("--custom-pg-loss-reducer-function-path", _DIVIDED),
        Setting("--multi-lora", _DIVIDED),
        Setting(
            "--loss-type",
            "policy_loss, value_loss or sft_loss, whose sums are known",
            ("policy_loss", "value_loss", "sft_loss"),
        ),
    ),
    "miles": (
        Setting("--delay-split-train-data-by-dp", _BY_MANAGER),
        Setting("--use-dynamic-global-batch-size", _BY_MANAGER),
        Setting(
            "--object-store-backend",
            "ray, since others round rollout_mask_sums to integers",
            ("ray",),
        ),
        Setting("--train-backend", "megatron", ("megatron",)),
    ),
    "verl": (
        Setting(
            "loss_agg_mode",
            "token-mean, since another would weight rows a second time",
            ("token-mean", None),  # losses without the setting are sums over tokens
            f"Set loss_agg_mode=token-mean, and choose the mode with {VARIABLE}.",
        ),
    ),
    "nemo_rl": (
        Setting("megatron_cfg.enabled", "true, so that Megatron trains the policy", (True,)),
    ),
    "nemo_rl, loss": (
        Setting(
            "positive_example_nll_weight",
            "0, since its term is a mean over each microbatch",
            (0, None),
            "Change loss_fn.",
        ),
    ),
    "areal": (
        Setting(
            "m2_threshold",
            "unset, since M2PO divides by the tokens that it keeps of a micro-batch",
            (None,),
        ),
    ),
    "areal, allocation": (Setting("backend", "megatron", ("megatron",)),),
    "areal, prompts": (
        Setting(
            "ppo_n_minibatches",
            "1 for means over prompts, since AReaL's minibatches split prompts",
            (1,),
        ),
    ),
    "rlinf": (
        Setting(
            "algorithm.use_valid_token_scale",
            "false, since its factor depends on the tokens of each microbatch",
        ),
        Setting(
            "algorithm.early_stop_imp_ratio",
            "unset, since a microbatch that is left out is still counted",
            (None,),
        ),
        Setting(
            "algorithm.entropy_bonus",
            "0, since RLinf computes the gradient of entropies from values that it has overwritten",
            (0,),
        ),
        Setting("runner.task_type", "reasoning", ("reasoning",)),
    ),
    "roll": (
        Setting(
            "loss_agg_mode",
            "seq-mean-token-sum, whose factors the aggregation replaces",
            ("seq-mean-token-sum",),
        ),
        Setting("difficulty_loss_weight", "off, since it weights samples a second time"),
        Setting("length_loss_weight", "off, since it weights samples a second time"),
    ),
    "roll, worker": (
        Setting("apply_loss_scale", "true, since Megatron averages losses", (True,)),
        Setting("pg_variant", "unset, since only ROLL's ActorPGWorker reads it", (None,)),
    ),
    "roll, strategy": (Setting("strategy_name", "megatron_train", ("megatron_train",)),),
    "skyrl": (
        Setting(
            "trainer.algorithm.loss_reduction",
            "token_mean, since the aggregation replaces its factors",
            ("token_mean",),
        ),
        Setting(
            "trainer.critic.model.path",
            "unset, since the loss of a critic does not use advantages",
        ),
        Setting(
            "trainer.policy.megatron_config.transformer_config_kwargs.calculate_per_token_loss",
            "off, since SkyRL expects Megatron to average losses",
        ),
    ),
    "skyrl, KL and entropy": (
        Setting("trainer.algorithm.use_kl_loss", _BY_MICROBATCH, remedy=_SKYRL_PATCH),
        Setting("trainer.algorithm.use_entropy_loss", _BY_MICROBATCH, remedy=_SKYRL_PATCH),
    ),
}

REFUSALS = {
    "slime, data": Refusal(
        "{framework} must hand its data to --rollout-data-postprocess-path", "{hint}"
    ),
    "slime, keys": Refusal(
        "samples must come with {keys}",
        "Use slime of {oldest} or later, make --custom-convert-samples-to-train-data-path add them, or "
        "let the rollout manager of miles split the data.",
    ),
    "slime, critic": Refusal(
        "{framework} must call --rollout-data-postprocess-path for its critic",
        "Choose another --advantage-estimator than ppo, or {hint}.",
    ),
    "slime, removed samples": Refusal(
        "--loss-aggregation-rejected needs samples that say whether they were removed",
        "Remove it, or {hint}.",
    ),
    "slime, numbered samples": Refusal(
        "samples must be numbered by the framework's own --data-source-path to know prompts",
        "Choose a mode without prompts, or {hint}.",
    ),
    "slime, rollouts": Refusal(
        "the ranks of a step must have its {rollouts} rollouts",
        "Leave rollout_ids and the split of the data as they are.",
    ),
    "slime, prompts": Refusal(
        "sample_indices must number {per_prompt} rollouts for each prompt (--n-samples-per-prompt) in "
        "a step of {rollouts}",
        "Choose a --global-batch-size of whole prompts, keep Sample.index as the data source numbers "
        "it, or {hint}.",
    ),
    "slime, signs": Refusal(
        "coefficients must be >= 0 in slime and miles",
        "Change the aggregation function (--loss-aggregation-function).",
        OptionError,
    ),
    "slime, masks": Refusal(
        "denominators must be at least 1 with {flag}, which uses the masks in its own way",
        "Remove {flag}, or choose another mode or divisor (--loss-aggregation).",
    ),
    "miles, split": Refusal(
        "samples must be split by the rollout manager, which needs text and at least "
        "--global-batch-size {rollouts} rollouts",
        "Change the batch, or remove the aggregation.",
    ),
    "miles, denominators": Refusal(
        "denominators must be at least 1 in miles, which never divides by less",
        "Choose another mode or divisor (--loss-aggregation), or apply patches/miles/31f1ca9.patch and "
        "set --rollout-data-postprocess-path megatron_loss_agg.frameworks.miles.postprocess instead.",
    ),
    "verl, SFT": Refusal(
        "verl's batch must have a response_mask",
        f"Unset {VARIABLE}, or train with main_ppo.",
    ),
    "verl, sessions": Refusal(
        "{label} needs the column session_id, which only verl's v1 trainer writes",
        "Choose sample instead of rollout, since each row is a rollout of its own.",
        DataError,
    ),
    "verl, policy loss": Refusal(
        "policy_loss.loss_mode must be a token mean",
        "Choose another, such as vanilla.",
    ),
    "verl, own loss": Refusal(
        "verl's loss must be a sum that agg_loss divides by batch_num_tokens",
        "Give config.global_batch_info to agg_loss in your own policy loss.",
    ),
    "verl, calls": Refusal(
        "An optimizer step must be one train_batch",
        f"Unset {VARIABLE}, or use TrainingWorker.",
    ),
    "verl, engine": Refusal(
        "The engine must be Megatron's", f"Set model_engine=megatron, or unset {VARIABLE}."
    ),
    "nemo_rl, data plane": Refusal(
        "the batch must pass through the driver",
        f"Set data_plane.enabled=false, or unset {VARIABLE}.",
    ),
    "nemo_rl, loss": Refusal("the loss must be ClippedPGLossFn or NLLLossFn, whose sums are known"),
    "nemo_rl, images": Refusal(
        "prompts must be text, since they are told apart by their tokens", "Choose sample_mean."
    ),
    "areal, loss": Refusal(
        "the loss must be one of AReaL's for PPO, its critic or SFT, whose means are known"
    ),
    "areal, variable": Refusal(
        f"{VARIABLE} must be set for the workers, too",
        "Set it in scheduling_spec.env_vars of this engine.",
    ),
    "areal, rejected": Refusal(
        "{label} must not set a rule for rejected samples, since AReaL has none",
        "Remove --loss-aggregation-rejected, or choose a mode instead of the preset.",
        OptionError,
    ),
    "rlinf, pipeline": Refusal(
        "the whole batch of a step must be available before training, as with collocated placement"
    ),
    "skyrl, signs": Refusal(
        "coefficients that scale advantages must be >= 0",
        "Change the aggregation function (--loss-aggregation-function).",
        OptionError,
    ),
    "skyrl, filter": Refusal(
        "--loss-aggregation-rejected needs samples that "
        "trainer.algorithm.zero_variance_filter=true rejects",
        "Remove it, or set the filter.",
        OptionError,
    ),
    "skyrl, merged": Refusal(
        "--loss-aggregation-rejected needs the loss masks of samples before they are filtered",
        "Remove it, or generator.merge_stepwise_output.",
        OptionError,
    ),
    "ms_swift, count": Refusal(
        "--loss-aggregation-count must be before in ms-swift, which leaves denominators of 0 out of its "
        "logs",
        "Remove that flag.",
        OptionError,
    ),
    "ms_swift, trainer": Refusal(
        "the plugin needs megatron sft or pt with --task_type causal_lm, whose loss is a sum over "
        "tokens, or rlhf with --rlhf_type dpo and without --rpo_alpha"
    ),
    "a module": Refusal(
        "{framework} must be importable here",
        "Install {module} in this Python, in the version that {framework} needs.",
    ),
    "a newer version": Refusal(
        "{framework} must be {oldest} or later", "Install such a version of {framework}."
    ),
    "ranks": Refusal(
        f"{VARIABLE} must be set on all ranks that train or on none",
        "Set it on every node, or unset it on all.",
        OptionError,
    ),
    "units": Refusal(
        "--loss-aggregation must group tokens by {units} in {batches}",
        "Choose another mode, such as token_mean or sample_mean.",
        OptionError,
    ),
    "weights": Refusal(
        "--loss-aggregation-sample-weights needs weights, which these samples do not have",
        "Remove it.",
        OptionError,
    ),
}


def refused(name: str, got: object, **words: object) -> AggregationError:
    """The error for a row of `REFUSALS`, with the words that the row names."""
    row = REFUSALS[name]
    return row.error(f"{row.needed.format(**words)}, got {got}. {row.remedy.format(**words)}")


def check_settings(config: Any, *settings: Setting) -> None:
    """Raise HostError for the first setting with a forbidden value; a missing setting is None."""
    for setting in settings:
        value = value_at(config, setting.name.removeprefix("--").replace("-", "_"))
        if value not in setting.allowed:
            name, needed, _, remedy = setting
            raise HostError(f"{name} must be {needed}, got {value}. {remedy}")


def value_at(config: Any, path: str) -> Any:
    """The value at ``path``, names joined by dots; None if a name is missing."""
    for key in filter(None, path.split(".")):
        config = config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)
    return config
