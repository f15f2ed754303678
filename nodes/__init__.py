"""The nodes that people connect, one module per family. What they do is in `compiler.hosts`.

Importing this registers the folder of graph files, the routes, and handlers for prompts and the server's start. It does
no more.
"""

import os
from typing import Any

from ..compiler.hosts.comfy import graph_folder
from ..web_server import doctor_route, metrics_route, queued_prompt, routes, server_start
from . import onediff, v3_schema
from .bake_end import BakeEnd
from .clip_speedup import CLIPSpeedup
from .compile_model import CompileModel
from .compile_report import CompileReport
from .control_net_speedup import ControlNetSpeedup
from .deep_cache import DeepCache
from .graph_files import LoadGraph, SaveGraph
from .vae_speedup import VAESpeedup

_WITH_BACKEND = (CompileModel, VAESpeedup, ControlNetSpeedup, CLIPSpeedup, LoadGraph)
_NODES = (CompileModel, VAESpeedup, ControlNetSpeedup, CLIPSpeedup, DeepCache, SaveGraph, LoadGraph, CompileReport)

graph_folder.register_folder()
_IS_FIRST_COPY = routes.register()
_FOR_BAKING = (BakeEnd,) if os.environ.get("COMPILED_GRAPHS_BAKING") else ()
_ALL = (*_NODES, *onediff.unclaimed(), *_FOR_BAKING) if _IS_FIRST_COPY else ()

NODE_CLASS_MAPPINGS = {node.ID: node for node in _ALL}
NODE_DISPLAY_NAME_MAPPINGS = {node.ID: node.TITLE for node in _ALL}


async def comfy_entrypoint() -> Any:
    """Return the nodes as ComfyUI's loader wants them in the V3 schema."""
    return v3_schema.extension(_ALL)


doctor_route.register()
metrics_route.register()
if _IS_FIRST_COPY:
    queued_prompt.register(NODE_CLASS_MAPPINGS.keys(), {node.ID for node in _WITH_BACKEND}, {LoadGraph.ID})
    server_start.register()
