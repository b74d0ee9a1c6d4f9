"""``explain --data`` on files that Megatron's own builder wrote, read by its own data sets."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from megatron_loss_agg.__main__ import main
from megatron_loss_agg.mcore.launch.data import read
from tests.host.harness import run_host_ranks

pytestmark = pytest.mark.host

VOCAB, LENGTH, EOD = 128, 32, 127
FLAGS = f"""
    pretrain_gpt.py --seq-length {LENGTH} --vocab-size {VOCAB} --tokenizer-type NullTokenizer
    --eod-mask-loss --train-iters 8 --micro-batch-size 1 --global-batch-size 4 --no-such-flag
""".split()


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


def gpt_rows(folder: Path) -> dict[str, tuple[list[list[float]], list[list[float]]]]:
    """Masks of the first rows: as `read` gives them, and by hand from Megatron's data set."""
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.tokenizers import MegatronTokenizer

    tokenizer = MegatronTokenizer.from_pretrained(
        metadata_path={"library": "null-text"}, vocab_size=VOCAB
    )
    paths = [str(folder / name) for name in "ab"]
    for path, number in zip(paths, (1500, 80), strict=True):
        write_documents(Path(path), number)
    cases: dict[str, tuple[list[str], dict[str, Any]]] = {
        "one": (["--data-path", paths[0]], {"blend": ([paths[0]], None), "split": "969, 30, 1"}),
        "blend": (
            ["--data-path", "0.3", paths[0], "0.7", paths[1], "--split", "1,1,1"],
            {"blend": (paths, [0.3, 0.7]), "split": "1,1,1"},
        ),
        "by split": (
            ["--train-data-path", paths[1], "--valid-data-path", paths[0]],
            {"blend_per_split": [([paths[1]], None), None, None]},
        ),
    }
    found = {}
    for name, (flags, options) in cases.items():
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
        rows = list(read([*FLAGS, *flags], 10))
        assert all(row.cu_seqlens is None and row.loss_mask.shape == (1, LENGTH) for row in rows)
        found[name] = [row.loss_mask[0].tolist() for row in rows], by_hand
    return found


def test_rows_are_those_of_megatrons_gpt_dataset_in_its_order(tmp_path: Path) -> None:
    (found,) = run_host_ranks(gpt_rows, 1, tmp_path, initialized=False)
    for rows, by_hand in found.values():
        assert rows == by_hand
        assert len({sum(row) for row in rows}) > 2
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["a.bin", "a.idx", "b.bin", "b.idx", "cache"]


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

    def apply_chat_template(self, turns: list[dict[str, str]], **_: Any) -> list[int]:
        return [ord(x) for turn in turns for x in turn["content"]]


def sft_rows(folder: Path) -> tuple[list[tuple[list[float], list[int]]], str]:
    """Masks and offsets of packs, and what is printed of them."""
    import sys

    from megatron.core.tokenizers.text.libraries import sft_tokenizer

    def load_dataset(kind: str, data_files: str, split: str) -> list[Any]:
        return [json.loads(line) for line in Path(data_files).read_text().splitlines()]

    # What the host uses to download, and to read JSON.
    sys.modules["datasets"] = SimpleNamespace(load_dataset=load_dataset)  # type: ignore[assignment]
    auto = SimpleNamespace(from_pretrained=lambda **_: Characters())
    sft_tokenizer.HAVE_TRANSFORMERS = True
    sft_tokenizer.transformers = SimpleNamespace(AutoTokenizer=auto)
    path = folder / "chats.jsonl"
    packs = [CONVERSATIONS, CONVERSATIONS[:1], CONVERSATIONS[1:], CONVERSATIONS]
    path.write_text(
        "".join(
            json.dumps({"messages": [{"role": r, "content": c} for chat in pack for r, c in chat]})
            + "\n"
            for pack in packs
        )
    )
    flags = ["--seq-length", "24", "--sft", "--data-path", str(path), "--split", "1,0,0"]
    flags += ["--tokenizer-type", "SFTTokenizer", "--tokenizer-model", "none"]
    flags += ["--sft-tokenizer-prompt-format", "nemotron-h-aligned"]
    flags += ["--micro-batch-size", "1", "--global-batch-size", "4"]
    rows = list(read(flags, 4))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["explain", "--data", "--samples", "4", "--", *flags]) == 0
    return [
        (row.loss_mask[0].tolist(), [] if row.cu_seqlens is None else row.cu_seqlens.tolist())
        for row in rows
    ], printed.getvalue()


def test_packs_are_those_of_megatrons_sft_dataset(tmp_path: Path) -> None:
    ((rows, printed),) = run_host_ranks(sft_rows, 1, tmp_path, initialized=False)
    # A position counts if the next token is an assistant's. Padding is the last conversation's.
    first = [0, 0, 0, 1, 1, 1, 1, 0]  # sabcdefg: d to g are predicted at 3 to 6
    second = [0, 1, 0, 1, 1, 0]  # abxyzz: x is predicted at 1, zz at 3 and 4
    both, one, other = (
        (mask + [0] * (24 - len(mask)), offsets)
        for mask, offsets in ((first + second, [0, 8, 24]), (first, [0, 24]), (second, [0, 24]))
    )
    assert rows == [both, one, other, both]
    # M = 7 + 4 + 3 + 7 = 21, H = 4: 21 / (4 * 7) = 0.75 to 21 / (4 * 3) = 1.75.
    assert printed.startswith("Stock Megatron weighs a token 0.75 to 1.75 times"), printed
    assert "steps: 1, of 4 rows; samples: 6; loss tokens: 21" in printed


# Flags, and what is said: PATH is of a sound data set.
REFUSED = {
    "--data-path PATH --split 0,1,1": "InputError: --split 0,1,1 has no training data; expected a",
    "--data-path nowhere": (
        "InputError: Megatron cannot read the data (AssertionError: One or both of the .idx and .bi"
    ),
    "--sft --data-path nowhere": (
        "InputError: Megatron cannot read the data (ImportError: SFTDataset currently requires data"
    ),
    "": "InputError: expected --seq-length and --data-path or --mock-data after --, without --fim",
    "--data-path PATH --fim-data": "InputError: expected --seq-length and --data-path or --mock",
    "--data-path PATH --tokenizer-type Llama2Tokenizer": "InputError: Megatron cannot read",
    "--data-path PATH --dataloader-type cyclic": "InputError: --dataloader-type cyclic reads rows",
    "--data-path PATH --dataloader-inter-document-masking --context-parallel-size 2": (
        "InputError: --dataloader-inter-document-masking with --context-parallel-size 2, under"
    ),
    "--data-path PATH --seq-length x": "InputError: argument --seq-length: invalid int value",
    "--data-path BROKEN": "InputError: Megatron cannot read the data (AssertionError: bad header,",
    "--data-path SHORT": "InputError: Megatron cannot read the data (ValueError: ",
}


def refused(folder: Path) -> dict[str, str]:
    write_documents(folder / "x")
    for name, part in (("broken", "idx"), ("short", "bin")):
        write_documents(folder / name)
        (folder / f"{name}.{part}").write_bytes(b"x")
    said = {}
    for flags in REFUSED:
        for word, name in (("PATH", "x"), ("BROKEN", "broken"), ("SHORT", "short")):
            flags = flags.replace(word, str(folder / name))
        with contextlib.redirect_stderr(io.StringIO()) as err:
            assert main(["explain", "--data", "--", *FLAGS, *flags.split()]) == 2
        said[flags] = (
            err.getvalue().removeprefix("megatron_loss_agg: ").replace(str(folder / "x"), "PATH")
        )
    return said


def test_missing_and_broken_data_is_named(tmp_path: Path) -> None:
    (said,) = run_host_ranks(refused, 1, tmp_path, initialized=False)
    for text, expected in zip(said.values(), REFUSED.values(), strict=True):
        assert re.match(re.escape(expected), text), text


def test_mock_data_without_masks_says_that_it_does_not_matter(tmp_path: Path) -> None:
    (printed,) = run_host_ranks(mock, 1, initialized=False)
    assert printed.startswith("Stock Megatron weighs a token 1.00 times what token_mean weighs it")


def mock() -> str:
    flags = [x for x in FLAGS if x != "--eod-mask-loss"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["explain", "--data", "--samples", "9", "--", *flags, "--mock-data"]) == 0
    return printed.getvalue()


def stock_loss(masks: list[list[float]]) -> list[list[float]]:
    """Of each token of two microbatches, its weight in Megatron's own step of one process."""
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
    from megatron_loss_agg.explain.rows import Layout, Rows
    from megatron_loss_agg.microbatch import Microbatch

    masks = [[1.0, 1.0, 0.0, 0.5], [0.0, 0.0, 0.0, 1.0]]  # tokens 2.5, counted as 2; and 1
    (weights,) = run_host_ranks(stock_loss, 1, masks, initialized=False)
    rows = Rows.of([Microbatch(torch.tensor([mask])) for mask in masks], 2, [1])
    multiples = rows.stock(Layout(1, 2, 1, False))[:, 0].tolist()
    for own, mask, multiple in zip(weights, masks, multiples, strict=True):
        assert own == pytest.approx([m * multiple / 3.5 for m in mask])  # times token_mean's
