"""Prompt ids of Megatron's own ``--sft`` data, through Megatron's ``pretrain``, by the gradient.

The sweep's script and its reference, on the real `SFTDataset` over a file of chats.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from megatron_loss_agg.errors import OptionError
from megatron_loss_agg.launch import install
from megatron_loss_agg.launch.install import hook_from_args
from megatron_loss_agg.launch.sft import read_conversations, with_prompt_ids
from tests.distributed import RankFailed
from tests.host.harness import error_of, run_host_ranks
from tests.host.refusals import assert_says
from tests.launch.test_data import SFT_FLAGS, line_of, stand_in_for_libraries
from tests.sweep import cases
from tests.sweep.data import SEQ_LENGTH

FLAG = "--loss-aggregation-sft-prompt-field"
# Lines of conversations, each by the numbers of characters of its question and of its answer, and
# its prompt. A conversation begins with one character of the system's.
LINES: list[list[tuple[int, int, str]]] = [
    [(3, 4, "a"), (5, 9, "b")],
    [(1, 4, "a")],  # alone it leaves the second of two context-parallel ranks with padding alone
    # Padded to multiples of 4 these are 20 and 12 tokens, so that the third is cut off.
    [(4, 13, "b"), (9, 2, "c"), (3, 3, "d")],
    [(6, 0, "e"), (1, 30, "c")],  # one without an answer, and one with the end cut off
]
NUMBERS = [5, 7, 5, -1]  # of the lines, if they have one prompt each
WAYS = {
    "cp2": ("--context-parallel-size 2 --micro-batch-size 2", "prompts"),
    "cp2, alone": ("--context-parallel-size 2 --micro-batch-size 1", "prompts"),
    "pp2": ("--pipeline-model-parallel-size 2 --micro-batch-size 1", "number"),
}


def write_chats(folder: Path) -> Path:
    def turns(question: int, answer: int) -> list[tuple[str, str]]:
        text = "qwertyuiopasdfghjklzxcvbnmQWERTYUIOP"
        messages = [
            ("system", "s"),
            ("user", text[:question]),
            ("assistant", text[-answer - 1 : -1]),
        ]
        return messages if answer else messages[:-1]

    path = folder / "chats.jsonl"
    lines = [
        line_of([turns(*x[:2]) for x in line], prompts=[x[2] for x in line], number=number)
        for line, number in zip(LINES, NUMBERS, strict=True)
    ]
    path.write_text("".join(lines))
    return path


def sft_data(path: Path, tokenizer: Any) -> Any:
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
    from megatron.core.datasets.utils import Split
    from megatron.training.datasets.sft_dataset import SFTDataset

    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=SEQ_LENGTH,
        split="1,0,0",
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        context_parallel_size=2,  # the reference splits the same packs
    )
    chats = SFTDataset.build_low_level_dataset(str(path), config)
    indices = numpy.arange(len(chats), dtype=numpy.int32)
    return SFTDataset(chats, str(path), indices, len(chats), Split.train, config)


def chats_script(path: Path, field: str) -> Any:
    """The sweep's script, whose data can be chats."""
    import torch
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    from tests.sweep import data, script

    class Chats(data.Rows):
        def row(self, item: int) -> dict[str, Any]:
            row = sft_data(path, build_tokenizer(self.args))[item]
            return {**row, "index": torch.tensor(item)}

    def ids_of(item: int, place: int) -> tuple[Any, int]:
        return (NUMBERS[item] if field == "number" else LINES[item][place][2]), 0

    stand_in_for_libraries()
    data.KINDS["chats"] = Chats
    data.ids_of = ids_of
    return script


def launched(path: Path, field: str, argv: list[str]) -> Any:
    return chats_script(path, field).rank_main(argv)


def referenced(path: Path, field: str, *args: Any) -> Any:
    return chats_script(path, field).reference_main(*args)


def model_of(path: Path) -> list[str]:
    flags = f"{SFT_FLAGS} --data-path {path} --sweep-data chats --num-layers 2 "
    flags += "--position-embedding-type rope --no-create-attention-mask-in-dataloader"
    return [*cases.BASE, *flags.split()]


def launch_of(path: Path, way: str, field: str) -> list[str]:
    flags = f"{way} --global-batch-size 4 --train-iters 1 --optimizer sgd --clip-grad 0 "
    flags += f"--lr {RATE} --min-lr 0 --eval-interval 1 --eval-iters 0 "
    flags += f"--loss-aggregation prompt_mean {FLAG} {field}"
    return [*model_of(path), *cases.TRAINING, *flags.split()]


RATE = cases.LR["fp32"]


@pytest.mark.parametrize("name", WAYS)
def test_prompts_are_those_of_the_field(name: str, tmp_path: Path) -> None:
    way, field = WAYS[name]
    path = write_chats(tmp_path)
    results = run_host_ranks(launched, 2, path, field, launch_of(path, way, field))
    step = [results[-1].last_step()]  # of one data-parallel rank
    assert sorted(item for microbatch in step[0] for item in microbatch) == [0, 1, 2, 3]
    argv = [*model_of(path), "--micro-batch-size", "1", "--train-iters", "1"]

    def error(mode: str) -> float:
        args = argv, step, {"mode": mode}
        ((start, gradient),) = run_host_ranks(referenced, 1, path, field, *args)
        return max(cases._error(x.parameters, RATE, start, gradient) for x in results)

    assert error("prompt_mean") <= cases.BOUNDS["fp32"]
    assert error("sample_mean") > 1e-2


def test_a_line_without_the_field_ends_the_run(tmp_path: Path) -> None:
    path = write_chats(tmp_path)
    way, _ = WAYS["cp2"]
    with pytest.raises(
        RankFailed, match=r"DataError: .*'question' of prompt ids, got none in line 1 of "
    ):
        run_host_ranks(launched, 2, path, "number", launch_of(path, way, "question"))


BAD = {
    "{}": "every line must have the field 'prompts' ... got none in line 1 of CHATS. Add ... FLAG",
    '{"prompts": ["a"]}': "for each of the 2 conversations, got 1 in line 1 of CHATS. Correct ... FLAG",
    '{"prompts": [1, null]}': "'prompts' in line 1 of CHATS (FLAG) must be an int64 ... or strings",
    '{"prompts": 1.5}': "'prompts' in line 1 of CHATS (FLAG) must be an int64 tensor",
    '{"prompts": "a", "silent": true}': "every conversation must have tokens, got one without in line 1",
}


def told_of(folder: Path) -> list[str | None]:
    """The errors of reading packs of two conversations."""
    from megatron.core.tokenizers import MegatronTokenizer

    stand_in_for_libraries()
    tokenizer = MegatronTokenizer.from_pretrained(
        "none", metadata_path={"library": "sft"}, prompt_format="nemotron-h-aligned"
    )
    errors = []
    for text in BAD:
        fields = json.loads(text)
        words = "" if fields.pop("silent", False) else "word"
        chats = [[("system", words), ("user", words)], [("system", "s"), ("user", "u")]]
        path = folder / "chats.jsonl"
        path.write_text(line_of(chats, **fields))
        dataset = sft_data(path, tokenizer)
        errors.append(error_of(with_prompt_ids, dataset[0], dataset, 0, "prompts"))
    return errors


def test_a_line_whose_ids_do_not_fit_is_named(tmp_path: Path) -> None:
    (errors,) = run_host_ranks(told_of, 1, tmp_path, initialized=False)
    for error, text in zip(errors, BAD.values(), strict=True):
        text = text.replace("CHATS", str(tmp_path / "chats.jsonl")).replace("FLAG", FLAG)
        assert_says(error, f"DataError: {text}")


def test_packs_that_a_scheduler_made_are_refused() -> None:
    """It drops the ids of tokens."""
    pack = {"loss_mask": torch.ones(1, 8), "cu_seqlens": torch.tensor([0, 4, 8])}
    for batch in (pack, pack | {"prompt_ids": torch.tensor([1, 2])}):
        keys = "keep their 'token_prompt_id', got ['cu_seqlens'"
        text = f"{FLAG} needs ... {keys} ... without --sequence-packing-scheduler, or drop"
        assert_says(error_of(read_conversations, batch), f"DataError: {text}")


def test_rows_of_earlier_megatrons_are_refused() -> None:
    text = f"HostError: {FLAG} needs packs, which Megatron-LM 0.16 and later ... Update it, or"
    assert_says(error_of(with_prompt_ids, {"tokens": torch.zeros(8)}, None, 0, "id"), text)


def test_validation_lines_need_no_field_where_megatron_evaluates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = {"loss_aggregation_sft_prompt_field": "id", "loss_aggregation_evaluation": "megatron"}
    item = {"tokens": torch.zeros(8)}

    def read(split: str) -> Any:
        dataset = SimpleNamespace(index_split=SimpleNamespace(name=split))
        return install.Plugin.read_pack(None, lambda *_: item, dataset, 0)  # type: ignore[arg-type]

    monkeypatch.setattr(install, "megatron_args", lambda: argparse.Namespace(**flags))
    assert read("valid") is item
    assert "HostError" in str(error_of(read, "train"))  # it looks for the field
    del flags["loss_aggregation_evaluation"]
    assert "HostError" in str(error_of(read, "valid"))


def test_the_flag_needs_megatrons_own_data() -> None:
    flags = {"loss_aggregation": "prompt_mean", "loss_aggregation_sft_prompt_field": "id"}
    with pytest.raises(OptionError, match=f"^{FLAG} needs Megatron's --sft, got none. Add"):
        hook_from_args(argparse.Namespace(**flags, sft=False))
    both = argparse.Namespace(**flags, sft=True, loss_aggregation_batch="json:dumps")
    with pytest.raises(
        OptionError, match=f"^{FLAG} and --loss-aggregation-batch .*got both. Remove"
    ):
        hook_from_args(both)
