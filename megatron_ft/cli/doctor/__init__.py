"""``megatron-ft doctor``: is this place fit for the job, asked of every node before training.

``examine.py`` starts ``probe.py`` on each node, ``as_trainer.py`` as the training command would be
started, and ``pair_world.py`` over all of them through ``pairs.py``.  Their answers are in
``facts.py``; ``checks.py`` and ``node_checks.py`` turn facts into findings, and know no process.
"""
