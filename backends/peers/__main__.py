"""`python -m backends.peers`: prints the table of peers in Markdown, and which are installed here."""

from __future__ import annotations

import signal

from backends.peers import PEERS
from backends.peers.peer import Peer

COLUMNS = ("peer", "op", "targets", "does", "called as", "refuses", "needs")


def table() -> str:
    """One row a peer, from the peers' own data."""
    lines = [_row(COLUMNS), _row(["---"] * len(COLUMNS))]
    return "\n".join([*lines, *(_row(_cells(peer)) for peer in PEERS)])


def _cells(peer: Peer) -> list[str]:
    refused = "; ".join(peer.limits.refuses())
    return [
        peer.name,
        peer.op,
        ", ".join(peer.on),
        peer.limits.serves(),
        peer.recipe,
        refused or "nothing",
        ", ".join(peer.packages),
    ]


def _row(cells: list[str] | tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    # When a reader such as `head` closes the pipe, the default action of SIGPIPE ends this process without a traceback.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    print(table())
    for one in PEERS:
        print(
            one.missing() or f"{one.name}: {', '.join(f'{name} {version}' for name, version in one.software().items())}"
        )
