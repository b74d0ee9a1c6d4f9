"""ms-swift's command line on a CPU: all its own code, except where it needs a GPU or a network.

For the ranks alone, as importing it changes the process. Stood in for are Transformer Engine's
layers, by Megatron's own, and ModelScope's hub.
"""

from __future__ import annotations

import functools
import gc
import importlib
import io
import json
import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import logsigmoid

import tests.host.preload  # noqa: F401
from tests.peers.standins import HUGGING_FACE, use_peers

# Not stood in for: Megatron goes on without it.
sys.modules["modelopt"] = None  # type: ignore[assignment]
os.environ["LOG_LEVEL"] = "WARNING"  # it logs the whole configuration
use_peers("aiohttp dacite modelscope msgspec opentelemetry transformer_engine")
sys.path.insert(1, str(HUGGING_FACE))
importlib.import_module("modelscope.hub.utils.utils").get_cache_dir = lambda *args: "/nonexistent"
# mcore-bridge patches these classes, which are None without Transformer Engine.
_layers = importlib.import_module("megatron.core.extensions.transformer_engine")
for _name in dir(_layers):
    if _name.startswith("TE") and getattr(_layers, _name) is None:
        setattr(_layers, _name, type(_name, (), {}))

# As the script does, before all else: `typing` gives equal unions in the order of the first one,
# and the parser of arguments can read a union in one order alone.
for _name in ("pipelines.train.rlhf", "trainers.trainer", "trainers.dpo_trainer"):
    importlib.import_module(f"swift.megatron.{_name}")
# What runs import, too.
for _name in ("swift.loss_scale", "megatron.core.models.mimo", "megatron_loss_agg.launch.install"):
    importlib.import_module(_name)
# After the training it draws its logs.
importlib.import_module("swift.megatron.pipelines.train.sft").plot_images = lambda *args: None

from mcore_bridge.model.register import ModelLoader, get_model_meta  # noqa: E402
from megatron.core import mpu  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec  # noqa: E402
from megatron.core.tensor_parallel.layers import ColumnParallelLinear  # noqa: E402
from megatron.core.transformer.identity_op import IdentityOp  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from swift.cli import _megatron  # noqa: E402
from tokenizers import Regex, Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaRMSNorm  # noqa: E402

from megatron_loss_agg.errors import AggregationError  # noqa: E402
from megatron_loss_agg.launch.flags import VARIABLE  # noqa: E402
from tests.frameworks.harness import (  # noqa: E402
    Terms,
    attempt,
    ignore_padding_masks,
    is_passed_on,
    token_values,
)
from tests.host.reference import Reference, of_samples  # noqa: E402

gc.freeze()  # ms-swift collects garbage in every run, which would look at all that is imported
ADAPTER = "megatron_loss_agg.frameworks.ms_swift"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
PAD, EOS = 26, 27
ignore_padding_masks()


class NormLinear(ColumnParallelLinear):
    """A linear layer with the norm before it, as Transformer Engine's."""

    def __init__(self, input_size: int, *args: Any, config: Any, **kwargs: Any) -> None:
        super().__init__(input_size, *args, config=config, **kwargs)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size))

    def forward(self, x: Tensor) -> Any:
        epsilon = self.config.layernorm_epsilon
        return super().forward(
            torch.nn.functional.rms_norm(x, x.shape[-1:], self.layer_norm_weight, epsilon)
        )


class LocalLayers(ModelLoader):
    """Builds mcore-bridge's model of layers without Transformer Engine."""

    def get_transformer_layer_spec(self, vp_stage: int | None = None) -> Any:
        spec = get_gpt_decoder_block_spec(
            self.config, False, normalization=self.config.normalization, vp_stage=vp_stage
        )
        self._deepcopy_layer_spec(spec)
        for layer in spec.layer_specs:
            parts = layer.submodules
            parts.input_layernorm = parts.pre_mlp_layernorm = IdentityOp
            parts.self_attention.submodules.linear_qkv = NormLinear
            parts.mlp.keywords["submodules"].linear_fc1 = NormLinear
        return spec


get_model_meta("gpt").loader = LocalLayers
Text = tuple[str, str]
"""A prompt, and an answer."""


def save_models(folder: Path) -> None:
    """Two checkpoints of Hugging Face's Llama, and a tokenizer of letters."""
    vocabulary = {token: i for i, token in enumerate([*LETTERS, "<pad>", "<eos>"])}
    letters = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    special = {"pad_token": "<pad>", "eos_token": "<eos>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, **special)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=256,
        pad_token_id=PAD,
        eos_token_id=EOS,
        torch_dtype="float32",
    )
    for seed, name in enumerate(("model", "frozen")):
        model, generator = LlamaForCausalLM(config), torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data = noise * 0.2 + (parameter.dim() == 1)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def train(
    command: str,
    arguments: list[str],
    environment: dict[str, str],
    worker: bool,
    flagged_rank: int | None = None,
) -> str | None:
    """One rank of ``megatron command``, as its launcher starts it; its error.

    Args:
        worker: as in a worker of a data loader.
        flagged_rank: the only rank with the environment; None if all have it.
    """
    torch.utils.data._utils.worker._worker_info = object() if worker else None
    if flagged_rank in (None, int(os.environ["RANK"])):
        os.environ.update(environment)
    script = Path(*_megatron.__path__, f"{command}.py")
    sys.argv = [str(script), *arguments]
    run_script = functools.partial(runpy.run_path, run_name="__main__")
    said = attempt(run_script, str(script), errors=AggregationError)
    return said if isinstance(said, str) else None


def settings() -> str:
    return importlib.import_module(ADAPTER).SETTINGS


def passed_on() -> tuple[bool, str]:
    """Whether ms-swift's function gets the trainer itself without the variable; and the output."""
    os.environ[VARIABLE] = ""
    plugin = importlib.import_module(f"{ADAPTER}.plugin")
    trainer = object()
    with redirect_stdout(io.StringIO()) as printed:
        same = is_passed_on(plugin, "stock_prepare_model", plugin.prepare_model, trainer)
    return same, printed.getvalue()


def logged(name: str, *pairs: tuple[float, float]) -> float:
    """What ms-swift logs as ``name`` on this rank, whose losses report ``pairs[rank]``."""
    plugin = importlib.import_module(f"{ADAPTER}.plugin")
    mpu.initialize_model_parallel()
    logs = {name: torch.tensor(pairs[dist.get_rank()])}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plugin, "stock_log", lambda *args: None)
        plugin.log(object(), logs, 1)
    numerator, denominator = logs[name].tolist()
    return float(numerator / denominator)


def examine(missing: str) -> tuple[tuple[str, str], str]:
    """The findings on this ms-swift, and on one whose arguments lack the name."""
    from megatron_loss_agg.frameworks.installation import examine_framework

    tried = examine_framework("ms_swift")
    del sys.modules[ADAPTER]
    delattr(importlib.import_module("swift.megatron.arguments").MegatronArguments, missing)
    return tried, attempt(examine_framework, "ms_swift", errors=AggregationError)


def import_adapter() -> str:
    """The error of the import where ms-swift lacks a function that the adapter replaces."""
    os.environ[VARIABLE] = "--loss-aggregation sample_mean"
    trainers = importlib.import_module("swift.megatron.trainers")
    stock = dict(vars(trainers.BaseMegatronTrainer))
    importlib.import_module(ADAPTER)
    assert stock == dict(vars(trainers.BaseMegatronTrainer))
    del sys.modules[ADAPTER], trainers.BaseMegatronTrainer.prepare_model
    return attempt(importlib.import_module, ADAPTER, errors=AggregationError)


def trained(model: Path, output: Path, lr: float, texts: list[Text]) -> tuple[Any, ...]:
    """`Trained`; a step of SGD subtracts the gradient times ``lr``."""
    saved = output / "checkpoint-1"
    before, after = (load_file(x / "model.safetensors") for x in (model, saved))
    gradient = {name: (before[name] - x) / lr for name, x in after.items()}
    lines = (output / "logging.jsonl").read_text().splitlines()
    logs = {name: x for line in lines for name, x in json.loads(line).items()}
    with torch.no_grad():
        losses = [-answer_log_probs(llama(saved), text) for text in texts]
    return gradient, logs, losses


def rms_norm(norm: LlamaRMSNorm, x: Tensor) -> Tensor:
    """In the precision of ``x``; theirs is in fp32."""
    return torch.nn.functional.rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)


LlamaRMSNorm.forward = rms_norm


def llama(folder: Path) -> Any:
    """In fp64."""
    return LlamaForCausalLM.from_pretrained(folder).double()


def answer_log_probs(model: Any, text: Text) -> Tensor:
    """Log-probabilities of the answer's tokens, and of its EOS."""
    tokens = torch.tensor([*map(LETTERS.index, "".join(text)), EOS])

    def logits(ids: Tensor, positions: Tensor, _: None) -> Tensor:
        return model(ids, position_ids=positions).logits

    return token_values(logits, tokens, len(text[0]))[0]


def all_references(
    folder: Path, texts: list[Text], pairs: list[tuple[Text, Text]]
) -> dict[str, Reference]:
    """``loss``; ``dft``, scaled by the token's probability; and ``pairs``, with ms-swift's beta.

    A pair is of a chosen and a rejected answer.
    """
    model, old = llama(folder / "model"), llama(folder / "frozen")
    log_probs = (answer_log_probs(model, text) for text in texts)
    found = of_samples(model, ({"loss": -x, "dft": -x * x.detach().exp()} for x in log_probs))

    def pair_losses() -> Iterator[Terms]:
        for pair in pairs:
            chosen, rejected = (answer_log_probs(model, text).sum() for text in pair)
            with torch.no_grad():
                old_chosen, old_rejected = (answer_log_probs(old, text).sum() for text in pair)
            margin = (chosen - old_chosen) - (rejected - old_rejected)
            yield {"pairs": -logsigmoid(0.1 * margin).view(1)}

    return {**found, **of_samples(model, pair_losses())}
