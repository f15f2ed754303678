"""diffusers as a host: what it, PEFT, accelerate and transformers set on modules, and which code belongs to them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ....common.host import Host

STATE = "_compiled_graphs"
"""The attribute of a network that holds its compiled state."""


class DiffusersHost(Host):
    """diffusers with PEFT, accelerate and transformers."""

    folder = Path(__file__).resolve().parents[1]
    volatile_attributes = frozenset(
        {STATE, "_hf_hook", "_old_forward", "_diffusers_hook", "_is_hf_initialized", "gradient_checkpointing"}
    )
    settings = frozenset(
        {
            "processor",  # of attention
            "scale",  # of an IP-Adapter
            "_chunk_size",
            "_chunk_dim",
            # PEFT's layers
            "scaling",
            "merged_adapters",
            "_active_adapter",
            "_disable_adapters",
        }
    )
    infrastructure = (
        "diffusers.configuration_utils",
        "diffusers.image_processor",
        "diffusers.loaders",
        "diffusers.models._modeling_parallel",
        "diffusers.models.modeling_utils",
        "diffusers.pipelines",
        "diffusers.quantizers",
        "diffusers.utils",
        "transformers.modeling_utils",
        "transformers.utils",
    )

    def setting(self, name: str, value: Any) -> Any:
        """Return a config without the fields that say where it was read from: they do not change any result."""
        if name == "_internal_dict":
            return {key: item for key, item in value.items() if not key.startswith("_")}
        return value

    def hook_acts(self, hook: Callable) -> bool:
        """Whether a hook acts now. transformers' hooks collect attention maps, only in calls that ask for them."""
        capturing = sys.modules.get("transformers.utils.output_capturing")
        if capturing is None or getattr(hook, "__module__", "") != capturing.__name__:
            return True
        try:
            collected = capturing._active_collector.get()
            return collected is not None and inspect.getclosurevars(hook).nonlocals["key"] in collected
        except (AttributeError, KeyError, TypeError):
            return True


HOST = DiffusersHost()
