"""Packaging of aqtlite."""

import pathlib
import re

import setuptools

here = pathlib.Path(__file__).parent
version = re.search(
    r'^__version__ = "(.+)"$', (here / "aqtlite/__init__.py").read_text(), re.M
).group(1)

demo = ["matplotlib"]
test = [
    *demo,
    "aqtp==0.9.0",
    "hypothesis",
    "ipykernel",
    "mypy",
    "nbclient",
    "nbformat",
    "pytest",
    "pytest-xdist",
    "qwix==0.1.8",
    "ruff",
    "safetensors",
]

setuptools.setup(
    name="aqtlite",
    version=version,
    description="Quantized training and serving for JAX: what is trained is served",
    long_description=(here / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=setuptools.find_packages(include=["aqtlite", "aqtlite.*"]),
    package_data={"aqtlite": ["py.typed"]},
    install_requires=[
        "absl-py",
        "flax>=0.12",  # and what it brings: msgpack, optax, orbax-checkpoint, rich
        "jax>=0.10",
        "jaxlib>=0.10",
        "numpy",
        "opt_einsum",  # that JAX itself depends on
    ],
    extras_require={"demo": demo, "safetensors": ["safetensors"], "test": test},
    entry_points={"console_scripts": ["aqtlite = aqtlite.cli:main"]},
    classifiers=[
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
