"""What each ZeRO stage does, in numbers that the implementation and its prediction share."""

from __future__ import annotations

ZERO_THAT_REDUCES_EACH = 2
"""Stage from which on gradients are reduced for every micro-batch, not only for the last one."""
ZERO_THAT_GATHERS = 3
"""Stage that shards parameters: blocks gather them while they run."""
MAX_UNDER_WAY = 2
"""Parameter groups whose gradients are being reduced at once from ZERO_THAT_REDUCES_EACH on; FSDP2 has one
under way while the next group computes.
"""
