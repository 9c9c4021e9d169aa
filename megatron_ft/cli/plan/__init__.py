"""``megatron-ft plan``: forecasts, before training, what a way of protecting a job will do.

``model.py`` has the closed forms, ``simulate.py`` simulates failures one by one and shares none of
the formulas, ``sources.py`` reads how often jobs have failed, ``command.py`` puts it into words.
"""
