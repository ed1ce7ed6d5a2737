"""Other people's kernels behind the backend contract, to compare ours with.

Each peer is a backend of its own, for a device only. Foreign packages are imported when a program is prepared: without
them a machine still lists the peers and says, row by row, what is missing.
"""

from __future__ import annotations

from typing import Final

from backends.peers import attention, grouped_gemm
from backends.peers.peer import Peer

TORCH_SDPA_CUDNN: Final = attention.CUDNN
TORCH_SDPA_CUDNN_FOLDED: Final = attention.CUDNN_FOLDED
TORCH_SDPA_FLASH: Final = attention.FLASH
TORCH_SDPA_EFFICIENT: Final = attention.EFFICIENT
TORCH_SDPA_MATH: Final = attention.MATH
FA3: Final = attention.FA3
FLASH_ATTN_4: Final = attention.FLASH_ATTN_4
CUDNN_FRONTEND: Final = attention.CUDNN_FRONTEND
HUMMING: Final = grouped_gemm.HUMMING
TORCH_GROUPED_MM: Final = grouped_gemm.TORCH_GROUPED_MM

PEERS: Final[tuple[Peer, ...]] = (
    TORCH_SDPA_CUDNN,
    TORCH_SDPA_CUDNN_FOLDED,
    TORCH_SDPA_FLASH,
    TORCH_SDPA_EFFICIENT,
    TORCH_SDPA_MATH,
    FA3,
    FLASH_ATTN_4,
    CUDNN_FRONTEND,
    HUMMING,
    TORCH_GROUPED_MM,
)
