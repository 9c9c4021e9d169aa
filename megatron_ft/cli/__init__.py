"""The ``megatron-ft`` command; each subcommand is one module of this package."""
