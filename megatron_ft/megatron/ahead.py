"""Prepares Megatron in a trainer host, once for all ranks that it forks.

Importing this module imports Megatron's loop, puts our hooks in place and makes a parser of
Megatron's flags, which reads the sources of many classes.
"""

from __future__ import annotations

import argparse
from contextlib import suppress
from importlib import import_module

from megatron.training import arguments

from megatron_ft.megatron import hooks

LATER = ("megatron.core.tokenizers.text.libraries", "megatron.core.tokenizers.text.models")
"""Modules that Megatron imports when it makes a tokenizer, in the releases that have them."""

hooks.install()
arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
for name in LATER:
    with suppress(ImportError):
        import_module(name)
