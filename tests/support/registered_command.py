"""A command whose ranks register and then fail."""

from __future__ import annotations

REGISTERED = """
import os, sys
from megatron_ft.trainer import manager
from megatron_ft.core.identity import shard_id
rank, incarnation = int(os.environ["RANK"]), int(os.environ["MEGATRON_FT_INCARNATION"])
client = manager.connect(rank)
client.hello(shard_id(dp=rank), ())
if {condition}:
    client.close()
    sys.exit(f"this is rank {{rank}}")
"""
