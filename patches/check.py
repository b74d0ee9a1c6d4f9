"""Print which patches fit a Megatron-LM checkout, or a framework, and how to apply or revert them.

    python patches/check.py path/to/Megatron-LM
    python patches/check.py path/to/verl-checkout     # or the site-packages folder that holds verl

A framework's patch is NAME/VERSION.patch, and the framework is recognised by the files that its
patch changes. Exit code 0 if every recognised framework has a patch that is applied or fits; 1
otherwise.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PATCHES = sorted([*HERE.glob("*.patch"), *HERE.glob("*/*.patch")])
MEGATRON = [patch for patch in PATCHES if patch.stem.startswith("core_v")]
FRAMEWORKS = [patch for patch in PATCHES if patch not in MEGATRON]


def applies(patch: Path, folder: Path, *options: str) -> bool:
    """True if ``git apply`` would succeed."""
    # Where the folder is inside another repository, git would look for the files at its root.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.resolve().parent)}
    trial = ["git", "-C", str(folder), "apply", "--check", *options, str(patch)]
    return subprocess.run(trial, capture_output=True, env=environment).returncode == 0


def changed_files(patch: Path) -> list[str]:
    """The files of a package that ``patch`` changes, without those that it adds."""
    return re.findall(r"^--- a/(?!\.|docs/|tests/)(\S+)", patch.read_text(), re.MULTILINE)


def framework_name(patch: Path) -> str:
    """The framework of ``patch``."""
    return patch.parent.name


def apply_command(patch: Path, folder: Path, *options: str) -> str:
    """A command that applies ``patch``, or reverts it with ``-R``."""
    if (folder / ".git").exists():
        return shlex.join(["git", "-C", str(folder), "apply", *options, str(patch)])
    # Where a folder is inside another repository, git apply would pass over its files.
    return (
        f"{shlex.join(['patch', '-p1', *options, '-d', str(folder)])} < {shlex.quote(str(patch))}"
    )


def report(name: str, patches: list[Path], folder: Path, hint: str) -> bool:
    """Print the state of the patches of ``name``; return True if one is applied, or fits."""
    paths = {patch: str(patch.relative_to(HERE)) for patch in patches}
    for patch in patches:
        if applies(patch, folder, "--reverse"):
            print(f"{name}: {paths[patch]} is applied; revert it with")
            print(f"    {apply_command(patch, folder, '-R')}")
            return True
    for patch in patches:
        if applies(patch, folder):
            print(f"{name}: {paths[patch]} fits and is not applied; apply it with")
            print(f"    {apply_command(patch, folder)}")
            return True
    verb = "does" if len(patches) == 1 else "do"
    print(f"{name}: {', '.join(paths.values())} {verb} not fit {hint}")
    return False


def megatron_version(checkout: Path) -> str | None:
    """The version in Megatron-Core's source."""
    info = checkout / "megatron" / "core" / "package_info.py"
    if not info.is_file():
        return None
    numbers = dict(re.findall(r"^(MAJOR|MINOR|PATCH) = (\d+)$", info.read_text(), re.MULTILINE))
    return ".".join(numbers.get(part, "?") for part in ("MAJOR", "MINOR", "PATCH"))


def check_megatron(checkout: Path, version: str) -> bool:
    """Report on the patch of the same minor release."""
    minor = version.rpartition(".")[0]
    patches = [patch for patch in MEGATRON if patch.stem.startswith(f"core_v{minor}.")]
    if not patches:
        releases = ", ".join(patch.stem for patch in MEGATRON)
        print(f"Megatron-Core {version}: no patch for this release; there are {releases}")
        return False
    hint = (
        "this pretrain_gpt.py; add its lines\n    by hand, or use the launcher: "
        "torchrun ... -m megatron_loss_agg pretrain_gpt.py"
    )
    return report(f"Megatron-Core {version}", patches, checkout, hint)


def check_frameworks(folder: Path) -> list[bool]:
    """Report on every framework whose files are in ``folder``."""
    patches_by_name: dict[str, list[Path]] = {}
    for patch in FRAMEWORKS:
        if any((folder / file).is_file() for file in changed_files(patch)):
            patches_by_name.setdefault(framework_name(patch), []).append(patch)
    hint = f"the version in {folder}; add the lines by hand"
    return [report(name, patches, folder, hint) for name, patches in patches_by_name.items()]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python patches/check.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="a checkout, or the folder that holds a package")
    folder = parser.parse_args(argv).folder
    version = megatron_version(folder)
    if version is not None and (folder / "pretrain_gpt.py").is_file():
        return 0 if check_megatron(folder, version) else 1
    results = check_frameworks(folder)
    if not results:
        names = ", ".join(sorted(set(map(framework_name, FRAMEWORKS))))
        print(f"{folder} is not a Megatron-LM checkout: no megatron/core or no pretrain_gpt.py;")
        print(f"    nor does it hold the files that patches change of {names}")
    return 0 if results and all(results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
