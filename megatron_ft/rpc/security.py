"""Authentication of the control plane: CURVE keys that follow from the per-job secret.

CURVE (CurveZMQ, in libzmq) encrypts and authenticates both ends.  Both key pairs are
derived from one secret of 32 random bytes, so that only it has to be distributed: who
has it is a member of the job, who has not cannot even complete the handshake.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils import z85

from megatron_ft.core.errors import ConfigError

SECRET_BYTES = 32


@dataclass(frozen=True, repr=False)
class JobKeys:
    """The key pairs of SMPs (servers) and of coordinators (clients), in Z85 text.

    An SMP has both, since it passes the coordinator's requests on to others.
    """

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes

    @classmethod
    def derive(cls, secret: bytes) -> JobKeys:
        """Key pairs for a secret of SECRET_BYTES bytes; ConfigError for any other length."""
        if len(secret) != SECRET_BYTES:
            raise ConfigError(f"the job secret has {len(secret)} bytes instead of {SECRET_BYTES}")
        server, client = (_pair(secret, role) for role in (b"smp", b"coordinator"))
        return cls(*server, *client)

    def protect_server(self, socket: zmq.Socket[Any]) -> None:
        """Make ``socket`` a CURVE server; the caller must also check client keys."""
        socket.curve_server = True
        socket.curve_publickey = self.server_public
        socket.curve_secretkey = self.server_secret

    def protect_client(self, socket: zmq.Socket[Any]) -> None:
        """Make ``socket`` a CURVE client that accepts only an SMP of this job."""
        socket.curve_serverkey = self.server_public
        socket.curve_publickey = self.client_public
        socket.curve_secretkey = self.client_secret

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a client that shows this public key is one of ours (pyzmq's interface)."""
        return key == self.client_public


def _pair(secret: bytes, role: bytes) -> tuple[bytes, bytes]:
    private = z85.encode(hashlib.blake2b(secret, digest_size=32, person=role).digest())
    return zmq.curve_public(private), private
