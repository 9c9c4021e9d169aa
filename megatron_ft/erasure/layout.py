"""Where each chunk of a stripe lies: the rotated layout.

A stripe has N = k + m members.  Every member cuts its data into k chunks and keeps
m chunks of parity; the stripe has N rows.  Row r keeps parity j on member r + j and
data column i on member r + m + i, all modulo N.  So chunk i of *every* member is
column i of the one generator matrix, and every member holds data in k rows and
parity in m rows: memory, work and traffic are even.  The layout is our own.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """The layout of one stripe with k data and m parity symbols in each row.

    A symbol is a place in a row: 0 to k-1 are data columns, k to k+m-1 parities.
    """

    data_members: int
    parity_members: int

    @property
    def members(self) -> int:
        """N, which is also the number of rows."""
        return self.data_members + self.parity_members

    def symbol(self, row: int, member: int) -> int:
        """What ``member`` keeps of ``row``."""
        distance = (member - row) % self.members
        if distance < self.parity_members:
            return self.data_members + distance
        return distance - self.parity_members

    def holder(self, row: int, symbol: int) -> int:
        """The member that keeps ``symbol`` of ``row``."""
        if symbol < self.data_members:
            return (row + self.parity_members + symbol) % self.members
        return (row + symbol - self.data_members) % self.members

    def data_row(self, member: int, chunk: int) -> int:
        """The row in which the member's data chunk is coded, always as column ``chunk``."""
        return (member - self.parity_members - chunk) % self.members

    def parity_row(self, member: int, chunk: int) -> int:
        """The row whose parity ``chunk`` the member keeps, as its parity chunk ``chunk``."""
        return (member - chunk) % self.members

    def is_parity(self, symbol: int) -> bool:
        """Whether the symbol is a parity."""
        return symbol >= self.data_members

    def chunk(self, symbol: int) -> int:
        """The chunk of the holder's data, or of its parity, in which the symbol lies."""
        return symbol - self.data_members if self.is_parity(symbol) else symbol
