"""Pictures are legible on white and on dark pages, and a mode has one colour of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from megatron_loss_agg.aggregation import MODES
from megatron_loss_agg.explain.colors import COLORS, INK

PICTURES = Path(__file__).parents[2] / "docs" / "images"
DARK = "#1e2129"  # of the site by night


def contrast(one: str, other: str) -> float:
    """As WCAG defines it: (0.05 + L) / (0.05 + l), of the relative luminances."""
    luminances = []
    for color in (one, other):
        linear = [
            x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in to_rgb(color)
        ]
        luminances.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return (0.05 + max(luminances)) / (0.05 + min(luminances))


def test_a_mode_has_a_color_of_its_own_that_is_legible_on_both_schemes() -> None:
    assert {*COLORS} == {*MODES} - {"custom"}
    assert len({*COLORS.values()}) == len(COLORS)
    pale = [x for x in (INK, *COLORS.values()) if min(contrast(x, "white"), contrast(x, DARK)) < 3]
    assert pale == []


@pytest.mark.parametrize("picture", sorted(PICTURES.glob("*.png")), ids=lambda path: path.stem)
def test_pictures_have_no_background(picture: Path) -> None:
    pixels = imread(picture)
    assert pixels.shape[2] == 4 and (pixels[..., 3] < 0.2).mean() > 0.8  # a shade is no background
