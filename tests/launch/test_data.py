"""``explain --data`` on files that Megatron's own builder wrote."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy
import pytest
import torch

from megatron_loss_agg.launch.data import read
from megatron_loss_agg.launch.flags import VARIABLE
from tests.host.harness import run_host_ranks
from tests.host.refusals import assert_says
from tests.launch.processes import answer, answers

VOCAB, LENGTH, EOD = 128, 32, 127
DATA_FLAGS = (
    f"pretrain_gpt.py --seq-length {LENGTH} --vocab-size {VOCAB} --tokenizer-type NullTokenizer "
    "--eod-mask-loss --train-iters 8 --micro-batch-size 1 --global-batch-size 4 --no-such-flag"
)


def write_documents(path: Path, number: int = 60) -> None:
    """Documents of 1 to 20 tokens and the end of a document, whose loss is masked."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    draw = torch.Generator().manual_seed(number)
    builder = IndexedDatasetBuilder(f"{path}.bin", dtype=numpy.uint16)
    for _ in range(number):
        length = int(torch.randint(1, 21, (), generator=draw))
        text = torch.randint(0, EOD, (length,), generator=draw)
        builder.add_document(torch.cat([text, torch.tensor([EOD])]), [length + 1])
    builder.finalize(f"{path}.idx")


def gpt_rows(folder: Path) -> list[tuple[list[list[float]], list[list[float]]]]:
    """Masks of the first rows: as `read` gives them, and by hand from Megatron's data set."""
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.tokenizers import MegatronTokenizer

    tokenizer = MegatronTokenizer.from_pretrained(
        metadata_path={"library": "null-text"}, vocab_size=VOCAB
    )
    a, b = paths = [str(folder / name) for name in "ab"]
    for path, number in zip(paths, (1500, 80), strict=True):
        write_documents(Path(path), number)
    cases: dict[str, dict[str, Any]] = {
        f"--data-path {a}": {"blend": ([a], None), "split": "969, 30, 1"},
        f"--data-path 0.3 {a} 0.7 {b} --split 1,1,1": {
            "blend": (paths, [0.3, 0.7]),
            "split": "1,1,1",
        },
        f"--train-data-path {b} --valid-data-path {a}": {
            "blend_per_split": [([b], None), None, None]
        },
    }
    found = []
    for flags, options in cases.items():
        config = GPTDatasetConfig(
            random_seed=1234,
            sequence_length=LENGTH,
            path_to_cache=str(folder / "cache"),
            tokenizer=tokenizer,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
            **options,
        )
        # As the run would: 8 steps of 4 rows, whatever is read of them.
        built = BlendedMegatronDatasetBuilder(GPTDataset, [32, 1, 1], lambda: True, config).build()
        texts = [built[0][row]["tokens"] for row in range(10)]
        by_hand = [(text != EOD).float().tolist() for text in texts]
        rows = list(read(f"{DATA_FLAGS} {flags}".split(), 10))
        assert all(row.cu_seqlens is None and row.loss_mask.shape == (1, LENGTH) for row in rows)
        found.append(([row.loss_mask[0].tolist() for row in rows], by_hand))
    return found


def test_rows_are_those_of_megatrons_gpt_dataset_in_its_order(tmp_path: Path) -> None:
    (found,) = run_host_ranks(gpt_rows, 1, tmp_path, initialized=False)
    for rows, by_hand in found:
        assert rows == by_hand
        assert len({sum(row) for row in rows}) > 2
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["a.bin", "a.idx", "b.bin", "b.idx", "cache"]


def stock_loss(masks: list[list[float]]) -> list[list[float]]:
    """The weight of each token of two microbatches in Megatron's own step of one process."""
    from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss

    config = SimpleNamespace(calculate_per_token_loss=False, timers=None)
    found = []
    for values in masks:
        mask, losses = torch.tensor(values), torch.zeros(len(values), requires_grad=True)

        def loss_func(output: torch.Tensor, mask: torch.Tensor = mask) -> Any:
            return (output * mask).sum(), mask.sum().to(torch.int), {}

        loss, _ = forward_step_calc_loss(
            None, losses * 1, loss_func, config, None, False, len(masks), [], 1, True
        )
        loss.backward()
        found.append(losses.grad.tolist())
    return found


def test_stock_weights_are_those_of_megatrons_own_schedule() -> None:
    from megatron_loss_agg.explain.stock import BatchFlags, Cells, StockRun
    from megatron_loss_agg.microbatch import Microbatch

    masks = [[1.0, 1.0, 0.0, 0.5], [0.0, 0.0, 0.0, 1.0]]  # tokens 2.5, counted as 2; and 1
    (weights,) = run_host_ranks(stock_loss, 1, masks, initialized=False)
    flags = BatchFlags(micro_batch_size=1, global_batch_size=2)
    cells = Cells.read([Microbatch(torch.tensor([mask])) for mask in masks], flags)
    run = StockRun.weigh(flags, cells)
    multiples = run.weight_C.tolist()  # a row is a cell
    for gradient, mask, multiple in zip(weights, masks, multiples, strict=True):
        assert gradient == pytest.approx([m * multiple / 3.5 for m in mask])  # times token_mean's


# Conversations of (system, user, assistant, ...): as many tokens as characters.
CONVERSATIONS = [
    [("system", "s"), ("user", "abc"), ("assistant", "defg")],
    [("system", ""), ("user", "ab"), ("assistant", "x"), ("user", "y"), ("assistant", "zz")],
]


class Characters:
    """In place of a tokenizer that has to be downloaded: a token for each character."""

    def __len__(self) -> int:
        return VOCAB

    def convert_tokens_to_ids(self, token: str) -> int:
        return 0

    eos_token_id = 0

    def apply_chat_template(self, turns: list[dict[str, str]], **options: Any) -> Any:
        tokens = [ord(x) for turn in turns for x in turn["content"]]
        return numpy.array([tokens]) if options.get("return_tensors") == "np" else tokens


SFT_FLAGS = (
    "--sft --tokenizer-type SFTTokenizer --tokenizer-model none "
    "--sft-tokenizer-prompt-format nemotron-h-aligned"
)


def stand_in_for_libraries() -> None:
    """Those that Megatron uses to download tokenizers, and to read JSON."""
    from megatron.core.tokenizers.text.libraries import sft_tokenizer

    def load_dataset(kind: str, data_files: str, split: str) -> list[Any]:
        return [json.loads(line) for line in Path(data_files).read_text().splitlines()]

    sys.modules["datasets"] = SimpleNamespace(load_dataset=load_dataset)
    auto = SimpleNamespace(from_pretrained=lambda **_: Characters())
    sft_tokenizer.HAVE_TRANSFORMERS = True
    sft_tokenizer.transformers = SimpleNamespace(AutoTokenizer=auto)


def line_of(conversations: list[list[tuple[str, str]]], **fields: Any) -> str:
    """A line of JSON, with more fields."""
    turns = [{"role": role, "content": text} for chat in conversations for role, text in chat]
    return json.dumps({"messages": turns, **fields}) + "\n"


def sft_rows(folder: Path) -> tuple[list[tuple[list[float], list[int]]], str, list[list[float]]]:
    """Masks and offsets of packs, what is printed of them, and first masks of last turns alone."""
    stand_in_for_libraries()
    path = folder / "chats.jsonl"
    packs = (CONVERSATIONS, CONVERSATIONS[:1], CONVERSATIONS[1:], CONVERSATIONS)
    path.write_text("".join(map(line_of, packs)))
    flags = (
        f"--seq-length 24 --data-path {path} --split 1,0,0 {SFT_FLAGS} "
        "--micro-batch-size 1 --global-batch-size 4"
    )
    rows = list(read(flags.split(), 4))
    code, printed, complained = answer(f"explain --data --samples 4 -- {flags}")
    assert code == 0, complained
    of_turns = "--loss-aggregation sample_mean --loss-aggregation-sft-turns last"
    last = [*read(f"{flags} {of_turns}".split(), 1)]
    with patch.dict(os.environ, {VARIABLE: of_turns}):
        last += read(flags.split(), 1)
    masks = [
        (row.loss_mask[0].tolist(), [] if row.cu_seqlens is None else row.cu_seqlens.tolist())
        for row in rows
    ]
    return masks, printed, [row.loss_mask[0].tolist() for row in last]


def test_packs_are_those_of_megatrons_sft_dataset(tmp_path: Path) -> None:
    ((rows, printed, last),) = run_host_ranks(sft_rows, 1, tmp_path, initialized=False)
    # A position counts if the next token is an assistant's. Padding is the last conversation's.
    first = [0, 0, 0, 1, 1, 1, 1, 0]  # sabcdefg: d to g are predicted at 3 to 6
    second = [0, 1, 0, 1, 1, 0]  # abxyzz: x is predicted at 1, zz at 3 and 4
    both, one, other = (
        (mask + [0] * (24 - len(mask)), offsets)
        for mask, offsets in ((first + second, [0, 8, 24]), (first, [0, 24]), (second, [0, 24]))
    )
    assert rows == [both, one, other, both]
    assert last == [first + [0, 0, 0, 1, 1, 0] + [0] * 10] * 2
    # M = 7 + 4 + 3 + 7 = 21, H = 4: 21 / (4 * 7) = 0.75 to 21 / (4 * 3) = 1.75.
    assert "Stock Megatron gives a token 0.75 to 1.75 times" in printed
    assert "steps: 1, of 4 rows; samples: 6; loss tokens: 21" in printed


UNREADABLE = "OptionError: Megatron cannot read the data "
OF_SCRIPT = (
    "OptionError: explain --data needs --seq-length and either --data-path or --mock-data after --"
)
MESSAGES = {
    "--mock-data": "",
    "--data-path FOLDER/x --split 0,1,1": "OptionError: --split must leave ... got 0,1,1. Change",
    "--data-path nowhere": f"{UNREADABLE}(AssertionError: One or both of the .idx and .bi",
    "--sft --data-path nowhere": f"{UNREADABLE}(ImportError: SFTDataset currently requires data",
    "": OF_SCRIPT,
    "--data-path FOLDER/x --fim-data": OF_SCRIPT,
    "--loss-aggregation-sft-turn last": (
        "OptionError: --loss-aggregation-sft-turn is not a flag of megatron_loss_agg. Write "
        "--loss-aggregation-sft-turns, or another of"
    ),
    "--mock-data --loss-aggregation-sft-turns last": (
        "OptionError: --loss-aggregation-sft-turns needs Megatron's --sft, got none. Add --sft, or give"
    ),
    "--loss-aggregation-sft-turns first": "OptionError: --loss-aggregation-sft-turns must be one of all",
    "--data-path FOLDER/x --dataloader-type cyclic": "OptionError: got cyclic. Change --dataloa",
    "--data-path FOLDER/x --dataloader-inter-document-masking --context-parallel-size 2": (
        "OptionError: --dataloader-inter-document-masking needs --context-parallel-size 1 ... got 2"
    ),
    "--data-path FOLDER/x --seq-length x": "OptionError: argument --seq-length: invalid int value",
    "--data-path FOLDER/short": f"{UNREADABLE}(ValueError: ",  # its tokens are cut off
}


def test_missing_and_broken_data_is_named(tmp_path: Path) -> None:
    for name in ("x", "short"):
        run_host_ranks(write_documents, 1, tmp_path / name)
    (tmp_path / "short.bin").write_bytes(b"x")
    lines = [f"explain --data -- {DATA_FLAGS} {flags}" for flags in MESSAGES]
    results = answers([line.replace("FOLDER", str(tmp_path)) for line in lines])
    for (code, out, err), message in zip(results, MESSAGES.values(), strict=True):
        if message:
            assert (code, out) == (2, "")
            assert_says(err.removeprefix("megatron_loss_agg: "), message)
        else:
            assert (code, err) == (0, "")
            assert out.startswith("Stock Megatron gives a token ")
