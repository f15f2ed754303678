"""The nodes a person drags. One module per family; what they do is in `compiler.hosts.comfy`."""

from . import graph_files, onediff, routes
from .compile_model import CompileModel
from .control_net_speedup import ControlNetSpeedup
from .graph_files import LoadGraph, SaveGraph
from .vae_speedup import VAESpeedup

_NODES = {
    "CG_CompileModel": (CompileModel, "Compile Model"),
    "CG_VAESpeedup": (VAESpeedup, "VAE Speedup"),
    "CG_ControlNetSpeedup": (ControlNetSpeedup, "ControlNet Speedup"),
    "CG_SaveGraph": (SaveGraph, "Save Graph"),
    "CG_LoadGraph": (LoadGraph, "Load Graph"),
}

graph_files.register_folder()
_IS_FIRST_COPY = routes.register()
_ALL = {**_NODES, **onediff.unclaimed()} if _IS_FIRST_COPY else {}

NODE_CLASS_MAPPINGS = {name: cls for name, (cls, _) in _ALL.items()}
NODE_DISPLAY_NAME_MAPPINGS = {name: title for name, (_, title) in _ALL.items()}
