"""The example's data: loss on responses only, whole samples, groups, and a stable order."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path

import pytest
import torch

from examples.stdlib_pairs import (
    END,
    SEPARATOR,
    VOCAB_SIZE,
    PackedPairs,
    functions,
    modules,
    prompt_id,
    samples,
)

SEQ_LENGTH, PAD_TO, PACKS = 512, 4, 12


@pytest.fixture(scope="module")
def dataset() -> PackedPairs:
    return PackedPairs("train", packs=PACKS, seq_length=SEQ_LENGTH, pad_to=PAD_TO)


def test_mask_covers_exactly_the_response_and_its_end(dataset: PackedPairs) -> None:
    for index in range(len(dataset)):
        item = dataset[index]
        starts = item["cu_seqlens_padded"].tolist()
        for pair, start, stop in zip(dataset.pairs(index), starts, starts[1:], strict=False):
            names = ("tokens", "labels", "position_ids", "loss_mask")
            tokens, labels, positions, mask = (item[name][start:stop] for name in names)
            assert labels[mask.bool()].tolist() == [*pair.response, END]
            # The first position with loss holds the separator: its logits predict the first byte.
            assert tokens[mask.bool()][0] == SEPARATOR
            assert torch.equal(tokens[1 : pair.length], labels[: pair.length - 1])
            assert labels[pair.length - 1] == END
            assert torch.equal(positions[: pair.length], torch.arange(pair.length))


def test_offsets_agree_with_lengths_and_padding(dataset: PackedPairs) -> None:
    for index in range(len(dataset)):
        item = dataset[index]
        real, padded = item["cu_seqlens"].diff(), item["cu_seqlens_padded"].diff()
        assert real.tolist() == [pair.length for pair in dataset.pairs(index)]
        assert (padded % PAD_TO == 0).all() and (padded - real >= 0).all()
        assert (padded - real < PAD_TO).all()
        assert item["tokens"].numel() == int(item["cu_seqlens_padded"][-1]) <= SEQ_LENGTH
        assert int(item["max_seqlen"]) == int(padded.max())
        assert item["prompt_ids"].shape == real.shape
        assert item["tokens"].max() < VOCAB_SIZE


def test_samples_are_whole_and_lengths_vary(dataset: PackedPairs) -> None:
    packed = [pair for index in range(len(dataset)) for pair in dataset.pairs(index)]
    assert all(pair in functions(pair.module) for pair in packed)
    assert max(pair.length for pair in packed) > 3 * min(pair.length for pair in packed)


def test_functions_of_one_module_share_an_id_across_packs(dataset: PackedPairs) -> None:
    assert prompt_id("a.py") != prompt_id("b.py")
    ids = [set(dataset[index]["prompt_ids"].tolist()) for index in range(len(dataset))]
    for index, found in enumerate(ids):
        assert found == {prompt_id(pair.module) for pair in dataset.pairs(index)}
    assert any(left & right for left, right in itertools.pairwise(ids))


def test_order_depends_on_the_seed_alone_and_more_packs_come_later(dataset: PackedPairs) -> None:
    def first_pairs(packs: int = PACKS, **seed: int) -> list[object]:
        made = PackedPairs("train", packs=packs, seq_length=SEQ_LENGTH, pad_to=PAD_TO, **seed)
        return [made.pairs(i) for i in range(PACKS)]

    expected = [dataset.pairs(i) for i in range(PACKS)]
    assert first_pairs() == first_pairs(2 * PACKS) == expected
    assert first_pairs(seed=1) != expected


def test_splits_share_no_module() -> None:
    train, valid = set(modules("train")), set(modules("valid"))
    assert train and valid and not train & valid
    assert len(valid) < len(train) / 4


def test_prompt_is_signature_and_docstring_and_the_whole_parses(tmp_path: Path) -> None:
    source = (
        "class A:\n    def f(self, x):\n"
        '        """Double x."""\n        # plain\n        return 2 * x\n'
        "def undocumented():\n    return 1\n"
        'def only_docstring():\n    """Nothing else."""\n'
        'def one_line(): "Documented."; return 1\n'
    )
    (tmp_path / "m.py").write_text(source)
    (pair,) = functions("m.py", tmp_path)
    assert pair.prompt == b'def f(self, x):\n    """Double x."""\n'
    assert pair.response == b"# plain\nreturn 2 * x\n"
    assert ast.parse(pair.prompt + b"    return 2 * x")


def test_too_short_a_pack_is_refused_with_a_remedy() -> None:
    with pytest.raises(ValueError, match="raise --seq-length"):
        next(samples("valid", seed=0, max_length=4, per_module=8))
