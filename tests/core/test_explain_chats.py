"""``explain --chats``: masks of chats by the template of a tokenizer that transformers loads."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import run_ranks
from tests.launch.processes import Answer, answer
from tests.peers.standins import HUGGING_FACE, needs_peers

pytestmark = needs_peers
# Words are tokens: "<user> a b <end> <assistant> c d e <end>".
TURNS = "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}"
PROMPT = "{% if add_generation_prompt %}<assistant> {% endif %}"
# Drops answers that other turns follow, as templates do with thoughts.
DROPS_ANSWERS = "{% for m in messages %}{% if m.role == 'user' or loop.last %}" + (
    "<{{ m.role }}> {{ m.content }} <end> {% endif %}{% endfor %}" + PROMPT
)
ONE = [("user", "a b"), ("assistant", "c d e")]
# The last token before each answer predicts its first: 4 loss tokens, at positions 4 to 7 of 8.
TWO = [*ONE, ("user", "f"), ("assistant", "g"), ("user", "h")]  # and 2 more


def tokenizers(folder: Path) -> None:
    """Folders with a tokenizer: with the template, with one that drops answers, and without any."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = ["<user>", "<assistant>", "<end>", "[UNK]", *"abcdefgh"]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    for name, template in {
        "chats": TURNS + PROMPT,
        "drops_answers": DROPS_ANSWERS,
        "plain": None,
    }.items():
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template)
        fast.save_pretrained(folder / name)


def answers(folder: Path, lines: list[str]) -> list[Answer]:
    sys.path.insert(0, str(HUGGING_FACE))
    tokenizers(folder)
    return [answer(line.replace("FOLDER", str(folder))) for line in lines]


@pytest.fixture(scope="module")
def answers_by_name(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    folder = tmp_path_factory.mktemp("chats")

    def write(name: str, *lines: Any) -> None:
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))

    def chat(turns: list[tuple[str, str]], **others: Any) -> dict[str, Any]:
        return {"messages": [{"role": role, "content": text} for role, text in turns], **others}

    one, two = chat(ONE, prompt="p", weight=7, w=2), chat(TWO, prompt="q", weight=7, w=0.5)
    one["messages"][1]["train"] = two["messages"][1]["train"] = True
    two["messages"][3]["train"] = 0
    write("chats.jsonl", one, two)
    write("unsaid.jsonl", chat(ONE))
    write("answer_first.jsonl", chat(ONE), chat(ONE[1:]))
    write("no_role.jsonl", {"messages": [{"content": "a"}]})
    write("texts.jsonl", {"text": "a"})
    (found,) = run_ranks(answers, 1, folder, [*COMMANDS.values()], initialized=False)
    return dict(zip(COMMANDS, found, strict=True))


DATA = "explain --data --chats FOLDER/chats.jsonl --tokenizer FOLDER/chats --"
CHATS = "explain --chats FOLDER/chats.jsonl --tokenizer FOLDER/chats"
SIZES = "--micro-batch-size 1 --global-batch-size 2"
COMMANDS = {
    "step": "explain --chats FOLDER/chats.jsonl --tokenizer FOLDER/chats --json",
    "split": f"{DATA} {SIZES} --seq-length 32 --context-parallel-size 2",
    "cut": f"{DATA} {SIZES} --seq-length 6",
    "cut, each": f"{DATA.replace(' --', ' --sft-turns each --', 1)} {SIZES} --seq-length 13",
    "last": f"{CHATS} --sft-turns last --json",
    "by field": f"{CHATS} --sft-turn-field train --json",
    "each, weights": f"{CHATS} --sft-turns each --sft-weight-field w --sample-weights count --json",
    "text": CHATS,
    "unsaid": f"{CHATS.replace('chats.', 'unsaid.')} --sft-turn-field train",
    "no weight": f"{CHATS.replace('chats.', 'unsaid.')} --sft-weight-field w --sample-weights skip",
    "answer first": CHATS.replace("chats.", "answer_first."),
    "drops_answers": "explain --chats FOLDER/chats.jsonl --tokenizer FOLDER/drops_answers",
    "plain": "explain --chats FOLDER/chats.jsonl --tokenizer FOLDER/plain",
    "nowhere": "explain --chats FOLDER/chats.jsonl --tokenizer FOLDER/nowhere",
    "texts": "explain --chats FOLDER/texts.jsonl --tokenizer FOLDER/chats",
    "no_role": "explain --chats FOLDER/no_role.jsonl --tokenizer FOLDER/chats",
}
REFUSED = {
    "unsaid": (
        "DataError: the field 'train' of the assistant's messages must be true, false, 1 or 0, got None "
        "for message 2 in FOLDER/unsaid.jsonl:1. Correct it, or name another"
    ),
    "no weight": (
        "DataError: under --sample-weights each sample must have a weight, a finite number >= 0, got "
        "null in FOLDER/unsaid.jsonl:1. Write it"
    ),
    "answer first": (
        "DataError: a chat must have a message before the assistant's first one, to show where the "
        "loss begins, got none in FOLDER/answer_first.jsonl:2. Put a system message first, or "
        "write the masks yourself and give them by --jsonl or --data FILE."
    ),
    "drops_answers": (
        "DataError: the chat template must render a turn the same whatever follows it, got other "
        "tokens for turn 2 in FOLDER/chats.jsonl:2. Write the masks yourself"
    ),
    "plain": (
        "OptionError: --tokenizer must have a chat template for these messages, got ValueError: "
    ),
    "nowhere": (
        "OptionError: --tokenizer must name a tokenizer that transformers can load, got "
        "FOLDER/nowhere ("
    ),
    "texts": (
        "OptionError: each chat must be an object with a list 'messages', got "
        '{"text": "a"} in FOLDER/texts.jsonl:1. Correct'
    ),
    "no_role": (
        "OptionError: --tokenizer must have a chat template for these messages, got KeyError: "
        "'role' in FOLDER/no_role.jsonl:1. Correct"
    ),
}


def test_answers_and_their_ends_carry_loss(answers_by_name: dict[str, Answer]) -> None:
    code, out, err = answers_by_name["step"]
    assert (code, err) == (0, "")
    numbers = json.loads(out)
    assert [sample["tokens"] for sample in numbers["samples"]] == [4, 6]
    assert [sample["prompt"] for sample in numbers["samples"]] == ["p", "q"]
    assert numbers["modes"]["prompt_mean"]["share"] == [0.5, 0.5]


def test_chats_are_padded_and_split_as_rows(answers_by_name: dict[str, Answer]) -> None:
    # Zigzag: positions 0 to 7 of 32 and the last ones are the first rank's. It has the 4 tokens of
    # the first chat (4 to 7), and of the second (4 to 7, 12 and 13) 4 of 6. Parts of 4, 0, 4 and 2.
    printed = answers_by_name["split"].said
    assert "\nIts weights add up to 0.75 in a step" in printed
    assert "\n25.0 % of the parts (" in printed
    # M = 10: 10 / (4 * 4) in parts of 4 tokens, and 10 / (4 * 2).
    assert printed.startswith("Stock Megatron gives a token 0.62 to 1.25 times its weight")
    # Rows of 6 positions have 2 of each chat.
    assert "samples: 2; loss tokens: 4\n" in answers_by_name["cut"].said


def test_turns_and_weights_are_those_of_the_flags(answers_by_name: dict[str, Answer]) -> None:
    def numbers(name: str) -> tuple[list[float], dict[str, Any]]:
        code, out, err = answers_by_name[name]
        assert (code, err) == (0, "")
        said = json.loads(out)
        return [sample["tokens"] for sample in said["samples"]], said["modes"]

    assert numbers("last")[0] == [4, 2]
    assert numbers("by field")[0] == [4, 4]
    tokens, modes = numbers("each, weights")
    assert tokens == [1, 2]  # turns
    # A weighted mean of 2 and 0.5; and of a turn of weight 2 and two of weight 0.5, over their sum.
    assert modes["sample_mean"]["share"] == pytest.approx([2 / 2.5, 0.5 / 2.5])
    assert modes["token_mean"]["share"] == pytest.approx([2 / 3, 1 / 3])
    # The second answer of the second chat is at positions 12 and 13 of 13: of its turn one is left.
    assert "samples: 2; loss tokens: 3\n" in answers_by_name["cut, each"].said


def test_chats_say_that_sft_has_a_format_of_its_own(answers_by_name: dict[str, Answer]) -> None:
    for name in ("text", "split"):
        assert "see explain --data -- pretrain_gpt.py --sft" in answers_by_name[name].said


@pytest.mark.parametrize("name", REFUSED)
def test_bad_chats_and_tokenizers_are_named(answers_by_name: dict[str, Answer], name: str) -> None:
    code, out, err = answers_by_name[name]
    assert (code, out) == (2, "")
    pattern = REFUSED[name].split("FOLDER")
    assert err.startswith("megatron_loss_agg: " + pattern[0])
    assert all(part in err for part in pattern)


def test_without_transformers_the_other_way_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_loss_agg.__main__ import main

    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["explain", "--chats", "x", "--tokenizer", "y"]) == 2
    error = capsys.readouterr().err
    assert "OptionError: --chats needs transformers, got ModuleNotFoundError: " in error
    assert "with explain --data -- --sft --data-path FILE." in error
