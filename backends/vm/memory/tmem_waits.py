"""Whether CTAs of one SM can all wait for each other's tensor memory (PTX ISA 9.7.16.7.1).

Assumed: the CTAs are identical and allocate in one order, an allocation is contiguous and aligned to its size, and it
gets columns whenever such a place is free. The ISA says neither how columns are placed nor that a CTA gets all before
another one gets any.

Then CTAs can come to a state where each of them waits if and only if amounts that a CTA keeps at its allocations,
one amount for each CTA, add up to all columns. No search for a way into that state is necessary:

- A state where each waits takes all columns. Counts are powers of two and do not grow from one allocation of a CTA to
  the next. So whatever is held in that state is a multiple of the least count that is asked for, and aligned to it. If
  any column were free, a place for that count would be.
- Amounts that add up lead to such a state. Let all the CTAs make their first allocation, then their second, and so on,
  each until it is where it keeps its amount. What is held at any time is a multiple of the count that is asked for, and
  aligned to it, so the count fits unless no column is free. If it does not fit, each CTA waits already.

Where the columns of an allocation are, then, makes no difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


def fewest(one: int, kept: Iterable[int], columns: int) -> tuple[int, ...]:
    """The fewest amounts, `one` and then any of `kept`, that add up to `columns`. Empty if none do."""
    sums: dict[int, tuple[int, ...]] = {one: (one,)}
    amounts = sorted(set(kept))
    for total in range(one + 1, columns + 1):
        ways = [(*sums[total - amount], amount) for amount in amounts if total - amount in sums]
        if ways:
            sums[total] = min(ways, key=len)
    return sums.get(columns, ())


def listed(amounts: Iterable[int]) -> str:
    """ "2 CTAs that keep 192 and 1 that keeps 128"."""
    parts = [f"{count} that {'keeps' if count == 1 else 'keep'} {amount}" for amount, count in Counter(amounts).items()]
    first, _, rest = " and ".join(parts).partition(" ")
    return f"{first} {'CTA' if first == '1' else 'CTAs'} {rest}"


@dataclass(frozen=True, slots=True)
class Room:
    """An SM has room for `ctas` CTAs of a kernel, and its launch has `launched`.

    `registers`: they count, because the kernel states their number.
    """

    ctas: int = 1
    launched: int = 1
    registers: bool = False

    def together(self, group: int) -> int:
        """How many of the CTAs one SM may hold. The CTAs of a pair, which cta_group::2 makes, are on two SMs."""
        return min(self.ctas, self.launched // max(group, 1))

    def reason(self, group: int) -> str:
        """Why an SM may hold so many."""
        if self.together(group) < self.ctas:
            return f"the launch has {self.together(group)} for an SM"
        if self.registers:
            return f"an SM has room for {self.ctas}"
        return f"an SM has room for {self.ctas} if registers suffice, of which no .maxnreg states the number"
