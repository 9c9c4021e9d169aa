"""What the supervisor uses, held against what a trainer was told."""

from __future__ import annotations

import os
from collections.abc import Mapping

from megatron_ft.config import SETTINGS, Source, differences, environment_source
from megatron_ft.core.environment import JOB


def contradictions(
    given: Source, blindness: str, environment: Mapping[str, str] | None = None
) -> list[str]:
    """Settings of the job that differ from what the supervisor uses, one line each.

    The supervisor told its choice in environment variables; ``blindness`` completes
    "`megatron-ft run`, which ..." and explains why it did not see what is ``given`` here.
    Outside ``megatron-ft run`` there is nothing to contradict.
    """
    variables = os.environ if environment is None else environment
    if JOB not in variables:
        return []
    shared = {name: value for name, value in given.given.items() if SETTINGS[name].job}
    told = environment_source(variables).values
    # An empty variable is how the supervisor says that it uses none.
    choice = {name: told[name] for name in shared if told[name] is not None}
    return [
        f"{line}; give it as {SETTINGS[name].flag} or {SETTINGS[name].run_flag} in the command "
        f"line of `megatron-ft run`, which {blindness}"
        for name, line in differences(
            Source(shared, given.label),
            Source(choice, lambda name: f"the supervisor's {SETTINGS[name].run_flag}"),
        ).items()
    ]
