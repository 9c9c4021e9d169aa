"""Redundancy schemes as users write them: ``xor:4``, ``rs:6+2``, ``replica:2``, ``none``."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from megatron_ft.core.errors import ConfigError, ProtectionError

MAX_MEMBERS = 64
"""Most members of one stripe: the arena's member table has this many places."""

_FORMS = "xor:N, rs:K+M, replica:R or none"
_PATTERN = re.compile(r"(?:(xor|replica):(\d+)|(rs):(\d+)\+(\d+)|(none))")


@dataclass(frozen=True)
class Scheme:
    """Redundancy of a stripe: kind of parity, and numbers of data and parity members.

    ``kind`` is "xor", "rs", "replica" or "none"; any ``parity_members`` members of a
    stripe may be lost.  A shard of L bytes costs L x parity_members / data_members more.
    ConfigError if the numbers contradict the kind.
    """

    kind: str
    data_members: int
    parity_members: int

    def __post_init__(self) -> None:
        problem = _problem(self)
        if problem:
            raise ConfigError(f"redundancy scheme {self}: {problem}")

    def __str__(self) -> str:
        """The form that ``parse`` reads."""
        if self.kind == "rs":
            return f"rs:{self.data_members}+{self.parity_members}"
        return "none" if self.kind == "none" else f"{self.kind}:{self.members}"

    @property
    def members(self) -> int:
        """N, the number of members of a full stripe."""
        return self.data_members + self.parity_members

    @classmethod
    def parse(cls, text: str) -> Scheme:
        """The scheme that a user wrote; ConfigError, which lists the forms, on anything else.

        ``xor:N`` counts all N members, ``replica:R`` all R copies, ``rs:K+M`` is K data and
        M parity members.
        """
        match = _PATTERN.fullmatch(text.strip())
        if match is None:
            raise ConfigError(f"unknown redundancy scheme {text!r}; write {_FORMS}")
        counted, members, rs, data, parity, none = match.groups()
        if none:
            return NO_PARITY
        if rs:
            return cls("rs", int(data), int(parity))
        if counted == "xor":
            return cls("xor", int(members) - 1, 1)
        return cls("replica", 1, int(members) - 1)

    def shortened(self, members: int) -> Scheme:
        """The scheme of a stripe that has only ``members`` members: same parity, less data.

        ProtectionError if no data member would be left.
        """
        if members <= self.parity_members:
            raise ProtectionError(
                f"{members} members are too few for {self}, which needs at least "
                f"{self.parity_members + 1}"
            )
        assert members <= self.members, "a stripe is never longer than its scheme"
        return replace(self, data_members=members - self.parity_members)


def largest_scheme(wanted: Scheme, domains: int) -> Scheme:
    """The scheme of the wanted kind that protects most with this many failure domains."""
    members = min(domains, MAX_MEMBERS)
    if members < 2 or wanted.kind == "none":
        return NO_PARITY
    if wanted.kind == "replica":
        return Scheme("replica", 1, members - 1)
    parity = min(wanted.parity_members, members - 1)
    return Scheme(wanted.kind, members - parity, parity)


def _problem(scheme: Scheme) -> str:
    kind, data, parity = scheme.kind, scheme.data_members, scheme.parity_members
    if kind == "none":
        return "" if (data, parity) == (1, 0) else "without redundancy there is one member"
    if kind not in ("xor", "rs", "replica"):
        return f"unknown kind; write {_FORMS}"
    if data < 1 or parity < 1:
        return "it needs at least one data and one parity member (2 members in all)"
    if kind == "xor" and parity != 1:
        return "xor has exactly one parity member; use rs:K+M for more"
    if kind == "replica" and data != 1:
        return "replica keeps whole copies, so it has one data member"
    if data + parity > MAX_MEMBERS:
        return f"{data + parity} members are more than {MAX_MEMBERS}"
    return ""


NO_PARITY = Scheme("none", 1, 0)
