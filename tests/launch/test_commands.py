"""``doctor``, and ``explain --data`` on files that Megatron's own builder wrote."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from megatron_loss_agg.__main__ import main
from megatron_loss_agg.mcore.launch.data import read
from megatron_loss_agg.mcore.launch.doctor import check_release  # of any release
from tests.host.harness import run_host_ranks
from tests.launch.processes import run_afresh

WITHOUT_HOST = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "megatron":
            raise ModuleNotFoundError(f"{name} is not to be imported here", name=name)

sys.meta_path.insert(0, Refuse())
from megatron_loss_agg.__main__ import main; sys.exit(main(sys.argv[1:]))
"""

# Several command lines in one process, since importing Megatron takes seconds.
SEVERAL = """
import json
import sys
from megatron_loss_agg.__main__ import main

print(main(["doctor"]))
for flags in json.loads(sys.argv[1]):
    print(main(["doctor", "--json", "--", *flags.split()]))
"""

MODE, LATE = "@ prompt_mean", "@-mask model @ token_mean"
# Flags of a launch script, with @ for --loss-aggregation, and what is found.
FLAGS = {
    f"examples/pretrain_gpt.py --num-layers 2 {MODE}": (
        "OK: prompt_mean; w_t = m_t / (M_prompt * N_prompt); no other flag conflicts with it; "
        "the batches must have prompt_ids"
    ),
    f"nosuch.py {MODE}": "FAIL: nosuch.py is not a file; expected a training script",
    "--num-layers 2": "WARN: without --loss-aggregation the plugin does nothing",
    f"--my-own-flag {MODE}": (
        "WARN: prompt_mean; w_t = m_t / (M_prompt * N_prompt); Megatron has no --my-own-flag"
    ),
    f"--num-layers two {MODE}": "FAIL: InputError: argument --num-layers: invalid int",
    "@ constant": "FAIL: DivisorError: mode 'constant' needs a div",
    # A module that lies beside the script.
    f"tests/launch/test_flags.py @-batch processes:run {MODE}": "OK: prompt_mean; w_t =",
    f"--cuda-graph-impl full_iteration {MODE}": "FAIL: HostError: --cuda-graph-impl full_iter",
    f"@-mod x {MODE}": "FAIL: ModeError: unknown flag --loss-aggregation-mod",
    LATE: "OK: token_mean; w_t = m_t / M_step; no other",
    f"{LATE} --sft": "FAIL: ModeError: Loop(averages_quotients=True) (Meg",
}


def test_this_environment_is_fit_and_flags_are_checked_against_each_other() -> None:
    given = [flags.replace("@", "--loss-aggregation") for flags in FLAGS]
    done = run_afresh("-c", SEVERAL, json.dumps(given))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    checks, (code, *lines) = lines[: -2 * len(FLAGS) - 1], lines[-2 * len(FLAGS) - 1 :]
    assert code == "0", checks
    assert {line.split()[0] for line in checks} <= {"OK", "WARN"}
    found = [line.split()[1] for line in checks]
    assert found[:5] == ["python", "megatron_loss_agg", "torch", "megatron-core", "seams"]
    assert checks[4].endswith("wrap Megatron's schedules, optimizers, megatron.training")
    for report, code, said in zip(lines[::2], lines[1::2], FLAGS.values(), strict=True):
        found = json.loads(report)
        (last,) = (finding for finding in found["findings"] if finding["check"] == "flags")
        assert f"{last['level']}: {last['text']}".startswith(said)
        assert found["ok"] == (not said.startswith("FAIL")) == (int(code) == 0)


def test_without_megatron_it_says_what_to_install() -> None:
    flags = ("--json", "--", "--loss-aggregation", "token_mean")
    done = run_afresh("-c", WITHOUT_HOST, "doctor", *flags)
    assert (done.returncode, done.stderr) == (1, "")
    found = json.loads(done.stdout)
    assert found["ok"] is False
    by_check = {finding["check"]: finding for finding in found["findings"]}
    assert "seams" not in by_check
    levels = {"megatron-core": "FAIL", "flags": "WARN"}
    assert {name: by_check[name]["level"] for name in levels} == levels
    assert "pip install megatron-core, or " in by_check["megatron-core"]["text"]


RELEASES = {"0.12.3": "FAIL", "0.13.1": "WARN", "0.14.0": "OK", "0.19.2": "OK"}
RELEASES |= {"0.20.0rc1": "WARN", "1.0.0": "WARN", "unknown": "FAIL"}


def test_a_release_is_judged_by_its_number() -> None:
    found = {version: check_release(version, Path("/opt/megatron")) for version in RELEASES}
    assert {version: finding.level for version, finding in found.items()} == RELEASES
    assert all(x.text.startswith(f"{version} in /opt/megatron") for version, x in found.items())


def test_the_checkout_of_a_script_is_examined(tmp_path: Path) -> None:
    """Though it is not on PYTHONPATH: the script's own folder comes first when it runs."""
    for name, source in {
        "megatron/core/__init__.py": "__version__ = '0.12.3'",
        "megatron/training/__init__.py": "import nowhere_to_be_found",
        "pretrain_gpt.py": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    flags = (str(tmp_path / "pretrain_gpt.py"), "--loss-aggregation", "token_mean")
    done = run_afresh("-m", "megatron_loss_agg", "doctor", "--", *flags)
    assert done.returncode == 1
    lines = {line.split()[1]: line for line in done.stdout.splitlines()}
    assert f"0.12.3 in {tmp_path}: averages losses unlike 0.13" in lines["megatron-core"]
    assert "No module named 'nowhere_to_be_found'" in lines["megatron.training"]


# `explain --data`. All of it that needs Megatron runs in one process.

VOCAB, LENGTH, EOD = 128, 32, 127
DATA_FLAGS = f"""
    pretrain_gpt.py --seq-length {LENGTH} --vocab-size {VOCAB} --tokenizer-type NullTokenizer
    --eod-mask-loss --train-iters 8 --micro-batch-size 1 --global-batch-size 4 --no-such-flag
""".split()


def on_host(function: Callable[..., Any], *args: Any) -> Any:
    (found,) = run_host_ranks(function, 1, *args, initialized=False)
    return found


def explained(*flags: str) -> tuple[int, str]:
    """The exit code, and what is said."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main(["explain", "--data", *flags])
    return code, said.getvalue()


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
        rows = list(read([*DATA_FLAGS, *flags.split()], 10))
        assert all(row.cu_seqlens is None and row.loss_mask.shape == (1, LENGTH) for row in rows)
        found.append(([row.loss_mask[0].tolist() for row in rows], by_hand))
    return found


def test_rows_are_those_of_megatrons_gpt_dataset_in_its_order(tmp_path: Path) -> None:
    for rows, by_hand in on_host(gpt_rows, tmp_path):
        assert rows == by_hand
        assert len({sum(row) for row in rows}) > 2
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["a.bin", "a.idx", "b.bin", "b.idx", "cache"]


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
    weights = on_host(stock_loss, masks)
    rows = Rows.of([Microbatch(torch.tensor([mask])) for mask in masks], 2, [1])
    multiples = rows.stock(Layout(1, 2, 1, False))[:, 0].tolist()
    for own, mask, multiple in zip(weights, masks, multiples, strict=True):
        assert own == pytest.approx([m * multiple / 3.5 for m in mask])  # times token_mean's


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
    with path.open("w") as file:
        for pack in (CONVERSATIONS, CONVERSATIONS[:1], CONVERSATIONS[1:], CONVERSATIONS):
            turns = [{"role": role, "content": text} for chat in pack for role, text in chat]
            file.write(json.dumps({"messages": turns}) + "\n")
    flags = ["--seq-length", "24", "--sft", "--data-path", str(path), "--split", "1,0,0"]
    flags += ["--tokenizer-type", "SFTTokenizer", "--tokenizer-model", "none"]
    flags += ["--sft-tokenizer-prompt-format", "nemotron-h-aligned"]
    flags += ["--micro-batch-size", "1", "--global-batch-size", "4"]
    rows = list(read(flags, 4))
    code, printed = explained("--samples", "4", "--", *flags)
    assert code == 0, printed
    return [
        (row.loss_mask[0].tolist(), [] if row.cu_seqlens is None else row.cu_seqlens.tolist())
        for row in rows
    ], printed


def test_packs_are_those_of_megatrons_sft_dataset(tmp_path: Path) -> None:
    rows, printed = on_host(sft_rows, tmp_path)
    # A position counts if the next token is an assistant's. Padding is the last conversation's.
    first = [0, 0, 0, 1, 1, 1, 1, 0]  # sabcdefg: d to g are predicted at 3 to 6
    second = [0, 1, 0, 1, 1, 0]  # abxyzz: x is predicted at 1, zz at 3 and 4
    both, one, other = (
        (mask + [0] * (24 - len(mask)), offsets)
        for mask, offsets in ((first + second, [0, 8, 24]), (first, [0, 24]), (second, [0, 24]))
    )
    assert rows == [both, one, other, both]
    # M = 7 + 4 + 3 + 7 = 21, H = 4: 21 / (4 * 7) = 0.75 to 21 / (4 * 3) = 1.75.
    assert "Stock Megatron gives a token 0.75 to 1.75 times" in printed
    assert "steps: 1, of 4 rows; samples: 6; loss tokens: 21" in printed


UNREADABLE = "InputError: Megatron cannot read the data "
# Flags, and what is said: PATH is of a sound data set, and SHORT of one whose tokens are cut off.
SAID = {
    "--mock-data": "Stock Megatron gives a token ",
    "--data-path PATH --split 0,1,1": "InputError: --split 0,1,1 has no training data; expected a",
    "--data-path nowhere": f"{UNREADABLE}(AssertionError: One or both of the .idx and .bi",
    "--sft --data-path nowhere": f"{UNREADABLE}(ImportError: SFTDataset currently requires data",
    "": "InputError: expected --seq-length and --data-path or --mock-data after --, without --fim",
    "--data-path PATH --fim-data": "InputError: expected --seq-length and --data-path or --mock",
    "--data-path PATH --dataloader-type cyclic": "InputError: --dataloader-type cyclic reads rows",
    "--data-path PATH --dataloader-inter-document-masking --context-parallel-size 2": (
        "InputError: --dataloader-inter-document-masking with --context-parallel-size 2, under"
    ),
    "--data-path PATH --seq-length x": "InputError: argument --seq-length: invalid int value",
    "--data-path SHORT": f"{UNREADABLE}(ValueError: ",
}


def explanations(folder: Path) -> list[tuple[int, str]]:
    write_documents(folder / "x")
    write_documents(folder / "short")
    (folder / "short.bin").write_bytes(b"x")
    paths = {"PATH": str(folder / "x"), "SHORT": str(folder / "short")}
    lines = [[paths.get(word, word) for word in flags.split()] for flags in SAID]
    return [explained("--", *DATA_FLAGS, *line) for line in lines]


def test_missing_and_broken_data_is_named(tmp_path: Path) -> None:
    found = on_host(explanations, tmp_path)
    for (code, said), expected in zip(found, SAID.values(), strict=True):
        refused = expected.startswith("InputError")
        assert code == 2 * refused
        assert said.removeprefix("megatron_loss_agg: ").startswith(expected)
