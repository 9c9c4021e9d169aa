"""Other projects' ways of saving and ours under one training load.

    python -m benchmarks --peers

Nothing here is a dependency of megatron-ft: peers live in a virtual environment of their own
(`environment.py`), and each is imported only in the process that measures it.
"""
