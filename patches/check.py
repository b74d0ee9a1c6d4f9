"""Say which patch fits a Megatron-LM checkout, and whether it is applied.

    python patches/check.py path/to/Megatron-LM

Exit code 0 if a patch is applied, or fits and can be; 1 if none does.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PATCHES = sorted(Path(__file__).resolve().parent.glob("core_v*.patch"))


def applies(patch: Path, checkout: Path, *options: str) -> bool:
    """Whether ``git apply`` would succeed."""
    command = ["git", "-C", str(checkout), "apply", "--check", *options, str(patch)]
    return subprocess.run(command, capture_output=True).returncode == 0


def version_of(checkout: Path) -> str | None:
    """Megatron-Core's version as its source says it."""
    info = checkout / "megatron" / "core" / "package_info.py"
    if not info.is_file():
        return None
    found = dict(re.findall(r"^(MAJOR|MINOR|PATCH) = (\d+)$", info.read_text(), re.MULTILINE))
    return ".".join(found.get(part, "?") for part in ("MAJOR", "MINOR", "PATCH"))


def patch_for(version: str) -> Path | None:
    """The patch of the same minor release."""
    minor = version.rpartition(".")[0]
    return next((p for p in PATCHES if p.stem.startswith(f"core_v{minor}.")), None)


def main(argv: list[str]) -> int:
    if len(argv) != 1:
        print("usage: python patches/check.py path/to/Megatron-LM", file=sys.stderr)
        return 1
    checkout = Path(argv[0])
    version = version_of(checkout)
    if version is None or not (checkout / "pretrain_gpt.py").is_file():
        print(f"{checkout} is not a Megatron-LM checkout: no megatron/core or no pretrain_gpt.py")
        return 1
    patch = patch_for(version)
    if patch is None:
        known = ", ".join(p.stem for p in PATCHES)
        print(f"Megatron-Core {version}: no patch for this release; there are {known}")
        return 1
    if applies(patch, checkout, "--reverse"):
        print(f"Megatron-Core {version}: {patch.name} is applied")
        return 0
    if applies(patch, checkout):
        print(f"Megatron-Core {version}: {patch.name} fits and is not applied; apply it with")
        print(f"    git -C {checkout} apply {patch}")
        return 0
    print(f"Megatron-Core {version}: {patch.name} does not fit this pretrain_gpt.py; add its lines")
    print("    by hand, or use the launcher: torchrun ... -m megatron_loss_agg pretrain_gpt.py")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
