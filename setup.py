"""Build entry point; everything that describes the package is in pyproject.toml."""

from setuptools import setup

setup()
