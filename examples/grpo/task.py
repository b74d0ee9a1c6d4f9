"""The task: sums of small numbers, answered in free form and checked exactly.

A prompt is ``7+5``. An answer is any string that ends with the end token; its value follows its
last ``=``, and the text before that does not count. So ``=12`` is right, and so is ``4+1=12``,
which is just longer.
"""

from __future__ import annotations

import random

from torch import Tensor

DIGITS = "0123456789"
TEXT = DIGITS + "+="
END, PAD = len(TEXT), len(TEXT) + 1
VOCAB_SIZE = 16  # the last two tokens have no meaning: an even size splits over ranks

MAX_ANSWER = 9  # tokens, including the end
PROMPT = 3  # tokens


def encode(text: str) -> list[int]:
    """Tokens of ``text``."""
    return [TEXT.index(character) for character in text]


def decode(tokens: list[int]) -> str:
    """Text of ``tokens``, with ``?`` for those that are not text."""
    return "".join(TEXT[token] if token < len(TEXT) else "?" for token in tokens)


def prompts(number: int, largest: int, seed: int) -> list[str]:
    """``number`` different sums of two digits up to ``largest``, drawn with ``seed``."""
    choices = [f"{left}+{right}" for left in range(largest + 1) for right in range(largest + 1)]
    return random.Random(seed).sample(choices, number)


def reward(prompt: str, answer: list[int]) -> float:
    """1 if ``answer`` ends and has the sum in plain decimal after its last ``=``, otherwise 0.

    Args:
        prompt: text of the prompt.
        answer: the sampled tokens, including the end token.
    """
    if not answer or answer[-1] != END:
        return 0.0
    _, equals, value = decode(answer[:-1]).rpartition("=")
    left, right = prompt.split("+")
    return float(bool(equals) and value == str(int(left) + int(right)))


def group_advantages(rewards: Tensor, answers: int) -> Tensor:
    """``(reward - mean) / std`` over the answers to a prompt; 0 if all rewards are the same.

    From DeepSeekMath (arXiv 2402.03300), section 4.1.

    Args:
        rewards: [prompts * answers] of the whole step, prompt by prompt.
    """
    groups = rewards.view(-1, answers)
    centered = groups - groups.mean(1, keepdim=True)
    return (centered / (groups.std(1, keepdim=True) + 1e-6)).view(-1)


def examples(number: int, largest: int, seed: int) -> list[tuple[list[int], list[int]]]:
    """Prompts with right answers for the warm-up, after random text of random length."""
    rng = random.Random(seed)
    pairs = []
    for _ in range(number):
        left, right = rng.randint(0, largest), rng.randint(0, largest)
        detour = "".join(rng.choice(TEXT[:-1]) for _ in range(rng.randrange(6)))
        pairs.append((encode(f"{left}+{right}"), [*encode(f"{detour}={left + right}"), END]))
    return pairs
