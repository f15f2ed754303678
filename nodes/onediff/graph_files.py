"""Nodes that save and load the graphs of one object."""

from __future__ import annotations

from typing import Any

from ...compiler.hosts.comfy.graph_folder import choices
from ...compiler.storage.graph_file import SUFFIX
from .. import inputs
from ..graph_files import LoadGraph, SaveGraph
from .old_node import SAME, OldNode


class _Saver(OldNode):
    """Does what Save Graph does with one object, after something else has been made."""

    KIND = ""
    OUTPUT_NODE = True
    DESCRIPTION = SAME.format("Save Graph")

    def run(self, filename_prefix: str, unique_id: str = "", **given: Any) -> dict[str, Any]:
        """Write the file and return the text the node shows."""
        return SaveGraph().save(filename_prefix, **{self.KIND: given[self.KIND]}, unique_id=unique_id)


class ModelGraphSaver(_Saver):
    TITLE = "Model Graph Saver (old)"
    KIND = "model"
    INPUTS = {
        "required": {
            "samples": ("LATENT", {"tooltip": "Saves after this has been made."}),
            "model": ("MODEL", {"tooltip": "The compiled model."}),
            "filename_prefix": ("STRING", {"default": "unet", "tooltip": "The file is PREFIX_00001_" + SUFFIX}),
        }
    }


class VaeGraphSaver(_Saver):
    TITLE = "VAE Graph Saver (old)"
    KIND = "vae"
    INPUTS = {
        "required": {
            "images": ("IMAGE", {"tooltip": "Saves after these have been made."}),
            "vae": ("VAE", {"tooltip": "The compiled VAE."}),
            "filename_prefix": ("STRING", {"default": "vae", "tooltip": "The file is PREFIX_00001_" + SUFFIX}),
        }
    }


class _Loader(OldNode):
    """Does what Load Graph does with one object."""

    KIND = ""
    DESCRIPTION = SAME.format("Load Graph")

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802  ComfyUI's name
        thing = (cls.RETURN_TYPES[0], {"tooltip": "What to put the graphs into."})
        graph = (
            choices(),
            {"tooltip": "A file under models/compiled_graphs. OneDiff's own files are of no use."},
        )
        return {"required": {cls.KIND: thing, "graph": graph}, "hidden": inputs.HIDDEN}

    @classmethod
    def VALIDATE_INPUTS(cls, graph: str) -> bool:  # noqa: N802  ComfyUI's name
        """Accept any name: workflows name files of OneDiff, and then the blocks are compiled."""
        return True

    IS_CHANGED = LoadGraph.IS_CHANGED

    def run(self, graph: str, **connected: Any) -> dict[str, Any]:
        """Return what is connected with the file's graphs."""
        answer = LoadGraph().load(graph, **connected)
        place = LoadGraph.RETURN_TYPES.index(self.RETURN_TYPES[0])
        return {**answer, "result": (answer["result"][place],)}


class ModelGraphLoader(_Loader):
    TITLE = "Model Graph Loader (old)"
    KIND = "model"
    RETURN_TYPES = ("MODEL",)


class VaeGraphLoader(_Loader):
    TITLE = "VAE Graph Loader (old)"
    KIND = "vae"
    RETURN_TYPES = ("VAE",)


NODES = (ModelGraphSaver, ModelGraphLoader, VaeGraphSaver, VaeGraphLoader)
