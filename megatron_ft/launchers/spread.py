"""How an MPI world gets to other machines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

# What ranks that were killed left of an earlier world would only take memory.
IN_FOLDER = (
    'rm -rf "$0" && (umask 077 && mkdir -p "$0") && export TMPDIR="$0" HOME="${HOME:-$0}" && '
    'exec /bin/sh -c "$1"'
)
"""For ``sh -c``, with a folder and words: runs the words so that MPI keeps its files there.

Open MPI does not start without a HOME.
"""


@dataclass(frozen=True)
class Spread:
    """How a world is started over several machines, or namespaces that stand for them.

    ``hosts`` are the names or addresses by which MPI knows the nodes, in the order of the
    ranks; empty: this machine, which they reach at ``here`` (empty: by its host name).
    ``settings`` are variables for the MPI launcher, which win over the user's.  ``entered`` makes
    its command one that runs where the supervisor is.  ``near`` says of a node whether a signal
    from there reaches it.
    """

    hosts: Sequence[str] = ()
    here: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    entered: Callable[[Sequence[str]], list[str]] = list
    near: Callable[[str], bool] = lambda node: True
