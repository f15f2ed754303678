"""The public names for several machines: `from compiled_graphs.fleet import map_prompts, map_workflows`."""

from __future__ import annotations

from .compiler.hosts.fleet.batches import Prompt, map_prompts, map_workflows, run_prompt
from .compiler.hosts.fleet.ray_workers import DifferentVersions
from .compiler.hosts.fleet.servers import Image, Launch, WorkflowResult
from .compiler.hosts.fleet.spread import Lost, Outcome, Progress

__all__ = [
    "DifferentVersions",
    "Image",
    "Launch",
    "Lost",
    "Outcome",
    "Progress",
    "Prompt",
    "WorkflowResult",
    "map_prompts",
    "map_workflows",
    "run_prompt",
]
