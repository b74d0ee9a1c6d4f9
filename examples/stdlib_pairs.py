"""Real text without a download: the standard library of the running interpreter.

A sample is one documented function: its signature and docstring are the prompt, its body is the
response, and only the response carries loss. Functions of one module form one prompt group. Tokens
are bytes. An item of `PackedPairs` is a pack of samples (one microbatch) or a row with one sample.
"""

from __future__ import annotations

import ast
import hashlib
import itertools
import random
import sysconfig
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

SEPARATOR = 256
"""Token between the prompt and the response."""
END = 257
"""Token that ends the response; also used as padding, where it has no effect."""
VOCAB_SIZE = 258

VALIDATION_SHARE = 10
"""One module in this number is held out for validation."""

CLASSES = {"short": (1, 64), "medium": (64, 256), "long": (256, 1 << 30)}
"""By name, the range of an answer's number of loss tokens, without its end."""

_NOT_LIBRARY = frozenset(
    {"test", "tests", "idlelib", "idle_test", "lib2to3", "turtledemo", "site-packages"}
)


@dataclass(frozen=True)
class Pair:
    """One function: prompt and response in bytes, and the module that it comes from."""

    module: str
    prompt: bytes
    response: bytes

    @property
    def tokens(self) -> list[int]:
        """Prompt, `SEPARATOR`, response, `END`."""
        return [*self.prompt, SEPARATOR, *self.response, END]

    @property
    def length(self) -> int:
        """Number of positions that have a next token: one less than the number of `tokens`."""
        return len(self.prompt) + len(self.response) + 1


def class_of(tokens: int) -> str:
    """The class of an answer of this number of tokens."""
    return next(name for name, (least, stop) in CLASSES.items() if least <= tokens < stop)


def prompt_id(module: str) -> int:
    """Stable int64 id of a module's prompt group, the same on every rank and in every run."""
    digest = hashlib.blake2b(module.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def library_root() -> Path:
    """Folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def modules(split: str, root: Path | None = None) -> list[str]:
    """Paths of the library's modules that belong to `split` ("train" or "valid"), sorted.

    The split depends only on a module's name, so no group is ever in both.
    """
    root = root or library_root()
    names = (path.relative_to(root) for path in root.rglob("*.py"))
    library = sorted(name.as_posix() for name in names if _NOT_LIBRARY.isdisjoint(name.parts))
    held_out = split == "valid"
    return [name for name in library if (prompt_id(name) % VALIDATION_SHARE == 0) == held_out]


@cache
def functions(module: str, root: Path | None = None) -> tuple[Pair, ...]:
    """Documented functions of one module with a body beyond the docstring, in source order."""
    try:
        source = ((root or library_root()) / module).read_text("utf-8")
        tree = ast.parse(source)
    except (SyntaxError, UnicodeDecodeError, OSError):
        return ()  # a few files of some distributions are deliberately not valid source
    lines = source.splitlines(keepends=True)
    return tuple(
        Pair(module, _text(lines, node.lineno - 1, cut), _text(lines, cut, node.end_lineno))
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        if (cut := _end_of_docstring(node))
    )


def _end_of_docstring(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int | None:
    """Number of the docstring's last line; None without one, or with code on that same line."""
    if ast.get_docstring(node, clean=False) is None or len(node.body) == 1:
        return None
    last = node.body[0].end_lineno
    return last if last is not None and node.body[1].lineno > last else None


def _text(lines: Sequence[str], start: int, stop: int | None) -> bytes:
    return textwrap.dedent("".join(lines[start:stop])).encode()


def samples(split: str, seed: int, max_length: int, per_module: int) -> Iterator[Pair]:
    """Endless stream of pairs, one group after another; the same for the same arguments.

    Every epoch visits the modules in a new order and draws up to `per_module` functions of each.
    A pair longer than `max_length` positions is left out, never cut. Modules are read when their
    turn comes, so a short run parses only a small part of the library.
    """
    rng = random.Random(f"{split} {seed}")
    names = modules(split)
    while True:
        has_fitting = False
        for module in rng.sample(names, len(names)):
            fitting = [pair for pair in functions(module) if pair.length <= max_length]
            has_fitting = has_fitting or bool(fitting)
            yield from rng.sample(fitting, min(per_module, len(fitting)))
        if not has_fitting:
            raise ValueError(
                f"no documented function of at most {max_length} bytes in {library_root()}; "
                "raise --seq-length, or run an interpreter that ships its library as source"
            )


class PackedPairs(Dataset[dict[str, Tensor]]):
    """Packs of whole samples, at most `seq_length` positions each; item i is one microbatch.

    Every sample takes its length rounded up to a multiple of `pad_to` (of 2 * cp_size, so that each
    context-parallel rank gets two equal chunks of it), and none is longer than `longest`. Packs are
    filled in stream order, so consecutive packs share prompt groups; Megatron's sampler gives them
    to different data-parallel ranks and microbatches. With a ``pad_to`` of ``seq_length``, an item
    is a row with one sample: all have the same length, so a microbatch can have several.
    """

    def __init__(
        self,
        split: str,
        *,
        packs: int,
        seq_length: int,
        pad_to: int,
        seed: int = 1234,
        per_module: int = 8,
        longest: int | None = None,
    ) -> None:
        self.pad_to = pad_to
        self._is_rows = pad_to == seq_length
        fitting = seq_length // pad_to * pad_to
        stream = samples(split, seed, min(fitting, longest or fitting), per_module)
        self._packs = list(itertools.islice(self._fill(stream, seq_length), packs))

    def _fill(self, stream: Iterator[Pair], capacity: int) -> Iterator[list[Pair]]:
        pack: list[Pair] = []
        free = capacity
        for pair in stream:
            if self._padded(pair) > free:
                yield pack
                pack, free = [], capacity
            pack.append(pair)
            free -= self._padded(pair)

    def _padded(self, pair: Pair) -> int:
        return -(-pair.length // self.pad_to) * self.pad_to

    def __len__(self) -> int:
        return len(self._packs)

    def pairs(self, index: int) -> list[Pair]:
        """The samples of pack `index`."""
        return self._packs[index]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """A pack of S samples in T positions, including padding.

        tokens, labels, position_ids int64 [T]; loss_mask fp32 [T], 1 where the *label* belongs to
        the response; prompt_ids int64 [S]. Packs also have cu_seqlens (real) and cu_seqlens_padded
        int32 [S + 1]; max_seqlen int32 [].
        """
        pack = self._packs[index]
        lengths = [pair.length for pair in pack]
        padded = [self._padded(pair) for pair in pack]
        total = sum(padded)
        tokens, labels = torch.full((2, total), END)
        loss_mask = torch.zeros(total, dtype=torch.float32)
        position_ids = torch.zeros(total, dtype=torch.int64)
        starts = list(itertools.accumulate(padded, initial=0))
        for pair, start, length in zip(pack, starts, lengths, strict=False):
            text = torch.tensor(pair.tokens)
            tokens[start : start + length] = text[:-1]
            labels[start : start + length] = text[1:]
            loss_mask[start + len(pair.prompt) : start + length] = 1
            position_ids[start : start + length] = torch.arange(length)
        item = {
            "tokens": tokens,
            "labels": labels,
            "loss_mask": loss_mask,
            "position_ids": position_ids,
            "prompt_ids": torch.tensor([prompt_id(pair.module) for pair in pack]),
        }
        if self._is_rows:
            return item
        return item | {
            "cu_seqlens": _offsets(lengths),
            "cu_seqlens_padded": _offsets(padded),
            "max_seqlen": torch.tensor(max(padded), dtype=torch.int32),
        }


def _offsets(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
