"""What `scaled_advantages` does to a loss that looks at the size of the advantages."""

from __future__ import annotations

from tests.peers.test_presets import run


def test_scaled_advantages_leave_nothing_in_the_window_of_clip_cov() -> None:
    found = run("run_clip_cov")
    assert found["tokens"] == 1180
    assert found["plain"] > 100
    assert found["scaled"] == 0
