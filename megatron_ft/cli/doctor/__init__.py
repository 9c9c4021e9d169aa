"""``megatron-ft doctor``: is this place fit for the job, asked of every node before training.

``examine.py`` starts ``probe.py`` on each node, ``as_trainer.py`` as the training command
would be started, and ``pair_world.py`` over all of them; what they say is in ``facts.py``.
``checks/`` turns facts into findings, and knows no process.
"""
