"""Metadata of the distribution; tool settings are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
# The address that the sources are published at, for the links on the package index.
REPOSITORY = ""


def version() -> str:
    """The version string, read without importing the package, which would need torch."""
    text = (ROOT / "megatron_loss_agg" / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if match is None:
        raise RuntimeError('megatron_loss_agg/__init__.py holds no line __version__ = "..."')
    return match.group(1)


def description() -> str:
    """README.md, with links that lead somewhere from the package index."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    if not REPOSITORY:
        return text
    text = re.sub(r"(!\[[^\]]*\]\()(?!https?:)", rf"\g<1>{REPOSITORY}/raw/v{version()}/", text)
    return re.sub(r"\]\((?!https?:|#)", f"]({REPOSITORY}/blob/v{version()}/", text)


setup(
    name="megatron-loss-agg",
    version=version(),
    description="Exact loss aggregation over the whole optimizer step for Megatron-Core",
    long_description=description(),
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["Megatron", "loss aggregation", "gradient accumulation", "reinforcement learning"],
    project_urls={
        "Documentation": f"{REPOSITORY}/blob/v{version()}/docs/start.md",
        "Changelog": f"{REPOSITORY}/blob/v{version()}/CHANGELOG.md",
        "Issues": f"{REPOSITORY}/issues",
        "Source": REPOSITORY,
    }
    if REPOSITORY
    else {},
    packages=find_packages(include=["megatron_loss_agg", "megatron_loss_agg.*"]),
    package_data={"megatron_loss_agg": ["py.typed"]},
    python_requires=">=3.10",
    install_requires=["numpy", "torch>=2.6.0a0"],  # 2.6.0a0: as NVIDIA's images call their build
    # NVIDIA's apex has to be built from source: the `apex` of the package index is another project.
    extras_require={
        "mcore": ["megatron-core>=0.14"],
        "te": ["transformer-engine[pytorch]"],
        "plot": ["matplotlib>=3.8"],
        "rl": ["matplotlib>=3.8", "tensorboard>=2.18", "tqdm>=4.66"],
        "test": [
            "covertable>=3.2",
            "einops>=0.8",
            "hypothesis>=6.100",
            "mypy>=1.15",
            "nox>=2025.2",
            "playwright>=1.50",
            "psutil>=6",
            "pytest>=8.3",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "ruff>=0.9",
            "zstandard>=0.23",
        ],
        "docs": [
            "mkdocs-material>=9.6",
            "mkdocstrings[python]>=1.0",
            "pymdown-extensions>=10.16",
            "ruff>=0.9",  # formats signatures
            "ziamath>=0.13",  # draws formulas
        ],
    },
    entry_points={"console_scripts": ["megatron-loss-agg = megatron_loss_agg.__main__:main"]},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
