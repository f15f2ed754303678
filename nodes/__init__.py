"""The nodes a person drags. One module per family; what they do is in `compiler.hosts.comfy`."""

from . import doctor_route, graph_files, onediff, routes
from .compile_model import CompileModel
from .compile_report import CompileReport
from .control_net_speedup import ControlNetSpeedup
from .deep_cache import DeepCache
from .graph_files import LoadGraph, SaveGraph
from .vae_speedup import VAESpeedup

_NODES = {
    "CG_CompileModel": (CompileModel, "Compile Model"),
    "CG_VAESpeedup": (VAESpeedup, "VAE Speedup"),
    "CG_ControlNetSpeedup": (ControlNetSpeedup, "ControlNet Speedup"),
    "CG_DeepCache": (DeepCache, "DeepCache"),
    "CG_SaveGraph": (SaveGraph, "Save Graph"),
    "CG_LoadGraph": (LoadGraph, "Load Graph"),
    "CG_CompileReport": (CompileReport, "Compile Report"),
}

graph_files.register_folder()
_IS_FIRST_COPY = routes.register()
doctor_route.register()
_ALL = {**_NODES, **onediff.unclaimed()} if _IS_FIRST_COPY else {}

NODE_CLASS_MAPPINGS = {name: cls for name, (cls, _) in _ALL.items()}
NODE_DISPLAY_NAME_MAPPINGS = {name: title for name, (_, title) in _ALL.items()}
