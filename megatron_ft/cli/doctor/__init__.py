"""``megatron-ft doctor``: examines before training whether every node is fit for the job.

``examine.py`` starts ``probe.py`` on each node, ``as_trainer.py`` as the training command would be
started, and ``pair_world.py`` over all of them through ``pairs.py``.  Their answers are in
``facts.py``; ``checks.py`` and ``node_checks.py`` turn facts into findings, and know no process.
"""
