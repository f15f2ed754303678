"""Whether other processes make the same calls, as in sequence-parallel models.

Such calls wait for one another. What runs a block once more must run it in all processes, or in none.
"""

from __future__ import annotations

import torch


def has_peers() -> bool:
    """Whether this process is in a group of torch.distributed with others."""
    group = torch.distributed
    return group.is_available() and group.is_initialized() and group.get_world_size() > 1
