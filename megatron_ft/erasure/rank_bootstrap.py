"""Bootstrap of a rank over TCP: its place and the world's secret, on its standard input."""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import msgspec

from megatron_ft.core.errors import UNREADABLE, ControlPlaneError
from megatron_ft.rpc.node_messages import Name
from megatron_ft.rpc.sockets import JobKeys


class RankBootstrap(msgspec.Struct, frozen=True):
    """A rank's place in its world.

    ``secret`` is made for this world alone.  The rank listens at ``address`` and says where in
    the file ``ready``.
    """

    secret: bytes
    world: Name
    rank: int
    size: int
    address: str
    ready: str

    def keys(self) -> JobKeys:
        """The world's keys.  With another world or size in it there are other keys."""
        of_world = msgspec.json.encode([self.world, self.size])
        digest = hashlib.blake2b(of_world, key=self.secret, digest_size=32)
        return JobKeys.derive(digest.digest())

    def __repr__(self) -> str:
        """All but the secret."""
        return f"RankBootstrap({self.world!r}, rank={self.rank}, size={self.size})"

    def __rich_repr__(self) -> Any:
        """The same for rich, which would list the fields."""
        yield "world", self.world
        yield "rank", self.rank


class Listening(msgspec.Struct, frozen=True):
    """Content of the file that says that a rank listens, and where."""

    world: str
    rank: int
    endpoint: str


def read_bootstrap() -> RankBootstrap:
    """The bootstrap on standard input; ControlPlaneError if there is none."""
    try:
        return msgspec.json.decode(sys.stdin.buffer.read(), type=RankBootstrap)
    except UNREADABLE as error:
        raise ControlPlaneError(
            f"no place in a world over TCP on standard input ({error}); such ranks are started "
            "by `megatron-ft run`"
        ) from error
