"""Build entry point; everything that describes the package is in pyproject.toml.

The shared object is optional, and loaded with ctypes: one file serves all releases of Python.
"""

from setuptools import Extension, setup

COPY_CRC = Extension(
    "megatron_ft.core._copy_crc",
    ["megatron_ft/core/copy_crc.c"],
    extra_compile_args=["-O2"],
    py_limited_api=True,
    optional=True,
)

setup(ext_modules=[COPY_CRC], options={"bdist_wheel": {"py_limited_api": "cp310"}})
