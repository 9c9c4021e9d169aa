"""``megatron-ft doctor``: examines before training whether every node is fit for the job.

``examine.py`` starts on each node ``probe.py``, and ``as_trainer.py`` as the training command would
be started, and ``trial_world.py`` over all nodes.  Their answers are in ``facts.py``; ``checks.py``
turns facts into findings, and knows no process.
"""
