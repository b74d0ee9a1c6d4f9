"""Prompts, weights and turns of Megatron's own ``--sft`` data, through Megatron's ``pretrain``.

By the gradient, with the sweep's script and its reference, on the real `SFTDataset` over a file of
chats. The reference knows masks and weights from the table `LINES` alone.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy
import pytest
import torch

from megatron_loss_agg.errors import OptionError
from megatron_loss_agg.launch import install
from megatron_loss_agg.launch.install import hook_from_args
from megatron_loss_agg.launch.sft import SFTOptions
from megatron_loss_agg.launch.sft_checks import count_lines
from megatron_loss_agg.turns import Turns
from tests.distributed import RankFailed
from tests.host.harness import error_of, run_host_ranks
from tests.host.refusals import assert_says
from tests.launch.test_data import SFT_FLAGS, line_of, stand_in_for_libraries
from tests.sweep import cases
from tests.sweep.data import SEQ_LENGTH

FLAG = "--loss-aggregation-sft"


class Chat(NamedTuple):
    """A conversation: after one character of the system's, each turn of the user and the assistant.

    A turn is the numbers of characters of its question and of its answer, and whether it counts.
    """

    turns: list[tuple[int, int, bool]]
    prompt: str
    weight: float


LINES = [
    [
        Chat([(1, 2, True), (1, 3, True)], "a", 0.5),
        # The question of the second turn is a tool's, which the template writes as nothing.
        Chat([(2, 3, True), (0, 2, False), (2, 5, True)], "b", 3),
    ],
    # Alone it leaves the second of two context-parallel ranks with padding alone.
    [Chat([(1, 4, True)], "a", 1.25)],
    # Padded to multiples of 4 these are 20 and 12 tokens, so that the third is cut off.
    [
        Chat([(2, 9, True), (2, 4, False)], "b", 2),
        Chat([(9, 2, True)], "c", 0),
        Chat([(3, 3, True)], "d", 7),
    ],
    # One without an answer; and one with the end of its second answer, and its third turn, cut off.
    [
        Chat([(6, 0, False)], "e", 1),
        Chat([(1, 10, True), (1, 12, True), (3, 5, True)], "c", 1.5),
    ],
]
NUMBERS = [5, 7, 5, -1]  # prompts of the lines, if they have one each


class Way(NamedTuple):
    """A launch, and what its flags mean."""

    topology: str
    flags: str  # with @ for FLAG
    mode: dict[str, Any]  # of `step_weights`
    field: str = "prompts"
    turns: str = "all"
    by_message: bool = False


CP2 = "--context-parallel-size 2 --micro-batch-size"
WAYS = {
    "cp2": Way(f"{CP2} 2", "prompt_mean @-prompt-field prompts", {"mode": "prompt_mean"}),
    "cp2, alone": Way(f"{CP2} 1", "prompt_mean @-prompt-field prompts", {"mode": "prompt_mean"}),
    "pp2": Way(
        "--pipeline-model-parallel-size 2 --micro-batch-size 1",
        "prompt_mean @-prompt-field number",
        {"mode": "prompt_mean"},
        field="number",
    ),
    "cp2, last, weights count": Way(
        f"{CP2} 2",
        "sample_mean @-turns last @-weight-field weights --loss-aggregation-sample-weights count",
        {"mode": "sample_mean", "sample_weights": "count"},
        turns="last",
    ),
    "cp2, each, those of a field": Way(
        f"{CP2} 1",
        "token_mean @-turns each @-turn-field train",
        {"mode": "token_mean"},
        turns="each",
        by_message=True,
    ),
    "dp2, each, prompts, weights": Way(
        "--micro-batch-size 1",
        "prompt_mean @-prompt-field prompts @-turns each @-weight-field weights "
        "--loss-aggregation-sample-weights skip",
        {"mode": "prompt_mean", "sample_weights": "skip"},
        turns="each",
    ),
    "dp2, those of a field, weights count": Way(
        "--micro-batch-size 2",
        "sample_mean @-turn-field train @-weight-field weights "
        "--loss-aggregation-sample-weights count",
        {"mode": "sample_mean", "sample_weights": "count"},
        by_message=True,
    ),
}
PADDED = 4  # tokens of a conversation are padded to a multiple of it
PLAIN = Way("", "", {"mode": "sample_mean"})


def loss_mask(line: list[Chat], way: Way) -> list[float]:
    """The mask of a pack, by the definition: the token after a position is of a turn that counts."""
    mask = [0.0] * SEQ_LENGTH
    start = 0
    for chat in line:
        place = start + 1  # behind the system's character
        turns = []
        for question, answer, counts in chat.turns:
            place += question + answer
            if answer:
                turns.append(([*range(place - answer - 1, place - 1)], counts))
        for k, (positions, counts) in enumerate(turns):
            if (way.turns == "last" and k + 1 < len(turns)) or (way.by_message and not counts):
                continue
            # The target of the last position is padding where the pack is cut.
            inside = [p for p in positions if p < SEQ_LENGTH - 1]
            for p in inside:
                mask[p] = 1 / len(inside) if way.turns == "each" else 1.0
        start = -(-place // PADDED) * PADDED
    return mask


def write_chats(folder: Path) -> Path:
    text = "qwertyuiopasdfghjklzxcvbnmQWERTYUIOP"

    def messages(chat: Chat) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = [{"role": "system", "content": "s", "train": None}]
        for question, answer, counts in chat.turns:
            found.append({"role": "user" if question else "tool", "content": text[:question]})
            if answer:
                content = text[-answer - 1 : -1]
                found.append({"role": "assistant", "content": content, "train": counts})
        return found

    path = folder / "chats.jsonl"
    lines = [
        {
            "messages": [message for chat in line for message in messages(chat)],
            "prompts": [chat.prompt for chat in line],
            "weights": [chat.weight for chat in line],
            "number": number,
        }
        for line, number in zip(LINES, NUMBERS, strict=True)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
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


def chats_script(path: Path, way: Way | None) -> Any:
    """The sweep's script, whose data can be chats; masks are those of ``way``, if given."""
    import torch
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    from tests.sweep import data, script

    class Chats(data.Rows):
        def row(self, item: int) -> dict[str, Any]:
            row = sft_data(path, build_tokenizer(self.args))[item]
            if way is not None:
                row["loss_mask"] = torch.tensor(loss_mask(LINES[item], way))
            return {**row, "index": torch.tensor(item)}

    def ids_of(item: int, place: int) -> tuple[Any, ...]:
        chat = LINES[item][place]
        assert way is not None
        weight = chat.weight if "sample_weights" in way.mode else 1.0
        return (NUMBERS[item] if way.field == "number" else chat.prompt), 0, 0, weight

    stand_in_for_libraries()
    data.KINDS["chats"] = Chats
    data.ids_of = ids_of
    return script


def launched(path: Path, argv: list[str]) -> Any:
    return chats_script(path, None).rank_main(argv)


def referenced(path: Path, way: Way, *args: Any) -> Any:
    return chats_script(path, way).reference_main(*args)


def model_of(path: Path) -> list[str]:
    flags = f"{SFT_FLAGS} --data-path {path} --sweep-data chats --num-layers 2 "
    flags += "--position-embedding-type rope --no-create-attention-mask-in-dataloader"
    return [*cases.BASE, *flags.split()]


def launch_of(path: Path, way: Way) -> list[str]:
    flags = f"{way.topology} --global-batch-size 4 --train-iters 1 --optimizer sgd --clip-grad 0 "
    flags += f"--lr {RATE} --min-lr 0 --eval-interval 1 --eval-iters 0 "
    flags += f"--loss-aggregation {way.flags.replace('@', FLAG)}"
    return [*model_of(path), *cases.TRAINING, *flags.split()]


RATE = cases.LR["fp32"]


@pytest.mark.parametrize("name", WAYS)
def test_the_gradient_is_that_of_the_definition(name: str, tmp_path: Path) -> None:
    way = WAYS[name]
    path = write_chats(tmp_path)
    results = run_host_ranks(launched, 2, path, launch_of(path, way))
    step = [*{x.data_rank: x.last_step() for x in results if x.last_step()}.values()]
    assert sorted(item for rank in step for microbatch in rank for item in microbatch) == [
        0,
        1,
        2,
        3,
    ]
    argv = [*model_of(path), "--micro-batch-size", "1", "--train-iters", "1"]

    def error(meaning: Way) -> float:
        args = path, meaning, argv, step, meaning.mode
        ((start, gradient),) = run_host_ranks(referenced, 1, *args)
        return max(cases._error(x.parameters, RATE, start, gradient) for x in results)

    assert error(way) <= cases.BOUNDS["fp32"]
    assert error(PLAIN) > 1e-2


def test_a_line_without_the_field_ends_the_run(tmp_path: Path) -> None:
    path = write_chats(tmp_path)
    way = WAYS["cp2"]._replace(flags="prompt_mean @-prompt-field question")
    with pytest.raises(
        RankFailed, match=rf"DataError: .*'question' of {FLAG}-prompt-field, got none in line 1 of "
    ):
        run_host_ranks(launched, 2, path, launch_of(path, way))


PROMPTS, WEIGHTS, BY_MESSAGE = (
    SFTOptions(prompt_field="prompts"),
    SFTOptions(weight_field="weights"),
    SFTOptions(turns=Turns(field="train")),
)
NO_WEIGHT = (
    "'weights' in line 1 of CHATS (@-weight-field) must hold weights of conversations, finite "
    "numbers >= 0, got"
)
SAYS_NEITHER = "the field 'train' of the assistant's messages must be true, false, 1 or 0"
# Lines, and what the flags say of them.
BAD: list[tuple[SFTOptions, str, str]] = [
    (
        PROMPTS,
        "{}",
        "every line must have the field 'prompts' of @-prompt-field, got none in line 1 of ",
    ),
    (
        PROMPTS,
        '{"prompts": ["a"]}',
        "each of the 2 conversations, got 1 in line 1 of CHATS. Correct",
    ),
    (
        PROMPTS,
        '{"prompts": [1, null]}',
        "'prompts' in line 1 of CHATS (@-prompt-field) must be an int64",
    ),
    (
        PROMPTS,
        '{"prompts": 1.5}',
        "'prompts' in line 1 of CHATS (@-prompt-field) must be an int64 tensor",
    ),
    (
        PROMPTS,
        '{"prompts": "a", "silent": true}',
        "every conversation must have tokens, got one without in line 1 of CHATS. Remove ... drop @-p",
    ),
    (
        WEIGHTS,
        "{}",
        "every line must have the field 'weights' of @-weight-field, got none in line 1 of ",
    ),
    (
        WEIGHTS,
        '{"weights": [1]}',
        "each of the 2 conversations, got 1 in line 1 of CHATS. Correct it",
    ),
    (
        WEIGHTS,
        '{"weights": -0.5}',
        f"{NO_WEIGHT} -0.5. Correct ... put signs",
    ),
    (
        WEIGHTS,
        '{"weights": [1, null]}',
        f"{NO_WEIGHT} None. Correct it, or name another field",
    ),
    (WEIGHTS, '{"weights": "2"}', f"{NO_WEIGHT} '2'. Correct"),
    (WEIGHTS, '{"weights": true}', f"{NO_WEIGHT} True. Correct"),
    (WEIGHTS, '{"weights": NaN}', f"{NO_WEIGHT} nan. Correct"),
    (
        BY_MESSAGE,
        "{}",
        f"{SAYS_NEITHER}, got None for message 3 in line 1 of CHATS. Correct it, ... @-turn-field",
    ),
    (
        SFTOptions(turns=Turns(field="content")),
        "{}",
        f"{SAYS_NEITHER.replace('train', 'content')}, got 'a' for message 3 in line 1 of CHATS. Correct",
    ),
]


def told_of(folder: Path) -> list[str | None]:
    """The errors of reading packs of two conversations."""
    from megatron.core.tokenizers import MegatronTokenizer

    stand_in_for_libraries()
    tokenizer = MegatronTokenizer.from_pretrained(
        "none", metadata_path={"library": "sft"}, prompt_format="nemotron-h-aligned"
    )
    errors = []
    for reader, text, _ in BAD:
        fields = json.loads(text)
        words = "" if fields.pop("silent", False) else "word"
        ends = [("user", "u"), ("assistant", "a")]
        chats = [[("system", words), ("user", words), *ends[1:]] if words else [("system", "")]]
        path = folder / "chats.jsonl"
        path.write_text(line_of([*chats, [("system", "s"), *ends]], **fields))
        dataset = sft_data(path, tokenizer)
        errors.append(error_of(reader.read_item, dataset[0], dataset, 0))
    return errors


def test_a_line_whose_fields_do_not_fit_is_named(tmp_path: Path) -> None:
    (errors,) = run_host_ranks(told_of, 1, tmp_path, initialized=False)
    for error, (_, _, text) in zip(errors, BAD, strict=True):
        text = text.replace("CHATS", str(tmp_path / "chats.jsonl")).replace("@", FLAG)
        assert_says(error, f"DataError: {text}")


LAST, EACH = SFTOptions(turns=Turns("last")), SFTOptions(turns=Turns("each"))


def told_of_formats(folder: Path) -> list[str | None]:
    from megatron.core.tokenizers import MegatronTokenizer

    stand_in_for_libraries()
    path = folder / "chats.jsonl"
    path.write_text(line_of([[("system", "s"), ("user", "u"), ("assistant", "a")]]))
    datasets = []
    for prompt_format in ("nemotron-h-aligned", "identity"):
        tokenizer = MegatronTokenizer.from_pretrained(
            "none", metadata_path={"library": "sft"}, prompt_format=prompt_format
        )
        datasets.append(sft_data(path, tokenizer))
    items = [dataset[0] for dataset in datasets]
    errors = [error_of(LAST.read_item, *pair, 0) for pair in zip(items, datasets, strict=True)]
    # A template that writes a turn differently where others stand before it.
    item = items[0] | {"tokens": items[0]["tokens"] + 1}
    return [*errors, error_of(LAST.read_item, item, datasets[0], 0)]


def test_turns_need_a_format_that_trains_on_answers_alone(tmp_path: Path) -> None:
    ((fits, *others),) = run_host_ranks(told_of_formats, 1, tmp_path, initialized=False)
    assert fits is None
    for error in others:
        text = f"OptionError: {FLAG}-turns needs a prompt format that ... line 1 of ... nemotron-nano-v2"
        assert_says(error, text)


END = 1
"""Stands behind each conversation in Megatron-LM 0.16, whose wheel lacks its data set."""


class EndedConversations:
    """A tokenizer of Megatron's, from which `SFTDataset` makes the packs of Megatron-LM 0.16."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def tokenize_conversation(self, conversation: Any, return_target: bool, **flags: Any) -> Any:
        result = self._tokenizer.tokenize_conversation(conversation, return_target, **flags)
        return tuple(numpy.append(x, END) for x in result) if return_target else result


def ended_masks(folder: Path) -> list[Any]:
    """Megatron's mask of a pack of conversations with an end, and those of turns."""
    from megatron.core.tokenizers import MegatronTokenizer

    stand_in_for_libraries()
    tokenizer = MegatronTokenizer.from_pretrained(
        "none", metadata_path={"library": "sft"}, prompt_format="nemotron-h-aligned"
    )
    path = folder / "chats.jsonl"
    two_turns = [("user", "ab"), ("assistant", "cd"), ("user", "e"), ("assistant", "fgh")]
    unanswered = [("user", "abc")]
    path.write_text(line_of([[("system", "s"), *turns] for turns in (two_turns, unanswered)]))
    dataset = sft_data(path, EndedConversations(tokenizer))
    items = [dataset[0], *(x.read_item(dataset[0], dataset, 0) for x in (LAST, EACH))]
    return [item["loss_mask"].tolist() for item in items]


def test_the_end_of_a_conversation_is_of_its_last_message(tmp_path: Path) -> None:
    (masks,) = run_host_ranks(ended_masks, 1, tmp_path, initialized=False)
    # sabcdefgh and the end: cd is predicted at 2 and 3, fgh and the end at 5 to 8; 2 of padding;
    # sabc and the end, which Megatron trains behind a question, too, at 15.
    quarters, halves = [1 / 4] * 4, [1 / 2] * 2
    starts = [
        [0, 0, 1, 1, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 1],  # Megatron's, without flags
        [0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0],  # last
        [0, 0, *halves, 0, *quarters, 0, 0, 0, 0, 0, 0, 0],  # each
    ]
    assert masks == [start + [0] * (SEQ_LENGTH - 16) for start in starts]


def test_lines_are_counted_up_to_a_bound(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text("{}\n \n{}\n\n{}\n{}")
    assert [count_lines(path, most) for most in (1, 3, 4, 9)] == [1, 3, 4, 4]


@pytest.mark.parametrize(
    "options, key",
    [(PROMPTS, "token_prompt_id"), (WEIGHTS, "token_weight"), (LAST, "is_masked_by_turns")],
)
def test_packs_without_the_values_are_refused(options: SFTOptions, key: str) -> None:
    """Megatron's scheduler drops them, and data that are no lines of JSON have none."""
    pack = {"loss_mask": torch.ones(1, 8), "cu_seqlens": torch.tensor([0, 4, 8])}
    for batch in (pack, pack | {"prompt_ids": torch.tensor([1, 2])}):
        keys = f"over lines of JSON, including '{key}', got ['cu_seqlens'"
        text = f"{options.flag} needs ... {keys} ... without --sequence-packing-scheduler, or drop"
        assert_says(error_of(options.reader(), batch), f"DataError: {text}")


def test_rows_of_earlier_megatrons_are_refused() -> None:
    text = (
        f"HostError: {FLAG}-prompt-field needs packs, which Megatron-LM 0.16 and later ... Update"
    )
    assert_says(error_of(PROMPTS.read_item, {"tokens": torch.zeros(8)}, None, 0), text)


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


@pytest.mark.parametrize(
    "name, value",
    [("prompt-field", "id"), ("weight-field", "w"), ("turns", "each"), ("turn-field", "train")],
)
def test_the_flags_need_megatrons_own_data(name: str, value: str) -> None:
    flags = {
        "loss_aggregation": "prompt_mean",
        "loss_aggregation_sample_weights": "skip",
        f"loss_aggregation_sft_{name.replace('-', '_')}": value,
    }
    flag = f"{FLAG}-{name}"
    with pytest.raises(OptionError, match=f"^{flag} needs Megatron's --sft, got none. Add"):
        hook_from_args(argparse.Namespace(**flags, sft=False))
    hook = hook_from_args(argparse.Namespace(**flags, sft=True))
    # Compared between ranks, and among the first lines of the log.
    assert hook is not None and hook.settings == {"sft": f"{name} {value}"}
    both = argparse.Namespace(**flags, sft=True, loss_aggregation_batch="json:dumps")
    with pytest.raises(
        OptionError, match=f"^{flag} and --loss-aggregation-batch .*got both. Remove"
    ):
        hook_from_args(both)
    del flags["loss_aggregation_sample_weights"]
    if name == "weight-field":
        with pytest.raises(OptionError, match=f"^{flag} needs --loss-aggregation-sample-weights "):
            hook_from_args(argparse.Namespace(**flags, sft=True))
