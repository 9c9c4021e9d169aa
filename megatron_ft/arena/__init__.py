"""Arenas: one shard's region of shared memory, its binary format, digests and limits."""
