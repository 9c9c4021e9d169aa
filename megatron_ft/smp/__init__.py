"""The snapshot management process: one daemon per node that owns the node's arenas."""
