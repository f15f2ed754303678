"""Save Graph and Load Graph: the compiled graphs of a workflow as a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import folder_paths

from ..compiler.files import write_whole
from ..compiler.graph_file import (
    SUFFIX,
    GraphFileError,
    StoredGraph,
    UntrustedFile,
    read_graphs,
    read_manifest,
    write_graphs,
)
from ..compiler.trust import Trust
from . import messages

FOLDER = "compiled_graphs"
NONE = "none"


def register_folder() -> None:
    """Give graph files a folder among ComfyUI's models, beside any that extra_model_paths.yaml names."""
    folder_paths.add_model_folder_path(FOLDER, os.path.join(folder_paths.models_dir, FOLDER))


class SaveGraph:
    """Writes the graphs that a model uses to one file; compiles them first if nothing has."""

    CATEGORY = "compiled graphs"
    FUNCTION = "save"
    RETURN_TYPES = ()
    OUTPUT_NODE = True
    DESCRIPTION = (
        "Saves the compiled graphs of a model to one signed file under models/compiled_graphs. It holds no weights, "
        "and serves every checkpoint and LoRA of the architecture on this machine."
    )
    SEARCH_ALIASES = ["save compiled", "export graph", "model graph saver", "onediff"]

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802  ComfyUI's name
        return {
            "required": {
                "model": (
                    "MODEL",
                    {"tooltip": "A compiled model. One that is not yet is compiled now."},
                ),
                "filename_prefix": ("STRING", {"default": "graphs", "tooltip": "The file is PREFIX_00001_" + SUFFIX}),
            },
            "optional": {
                "after": (messages.ANY, {"tooltip": "Connect a LATENT or IMAGE to save after it has been made."}),
            },
            "hidden": {"unique_id": "UNIQUE_ID"},
        }

    def save(self, model: Any, filename_prefix: str, after: Any = None, unique_id: str = "") -> dict[str, Any]:
        """Write the file and return the text the node shows. Raises ValueError with a sentence if it cannot."""
        from ..compiler.hosts import comfy as host

        graphs, told = host.graphs_in_use(model), ""
        if not graphs:
            compiled, told = host.compile_model(model, node_id=str(unique_id))
            graphs = host.graphs_in_use(compiled)
        if not graphs:
            raise ValueError(f"Save Graph has nothing to save: {told}")
        folder = folder_paths.get_folder_paths(FOLDER)[0]
        os.makedirs(folder, exist_ok=True)
        place, name, counter, _, _ = folder_paths.get_save_image_path(filename_prefix, folder)
        path = Path(place, f"{name}_{counter:05}_{SUFFIX}")
        data = write_graphs([StoredGraph.of(graph) for graph in graphs], Trust())
        write_whole(path, data)
        text = f"{len(graphs)} graphs saved to {path.name}, {len(data) / 1e6:.1f} MB"
        if told:
            text += f"\ncompiled now: {told}"
        messages.show(unique_id, text)
        return {"ui": {"text": [text]}}


class LoadGraph:
    """Puts the graphs of a file into a model: nothing is traced and nothing is compiled."""

    CATEGORY = "compiled graphs"
    FUNCTION = "load"
    RETURN_TYPES = ("MODEL",)
    OUTPUT_TOOLTIPS = ("The model with compiled blocks, as from Compile Model.",)
    DESCRIPTION = (
        "Loads graphs that Save Graph wrote on this machine. What the file lacks is compiled as Compile Model would; a "
        "file that is missing, damaged or from elsewhere is named, and the model is compiled."
    )
    SEARCH_ALIASES = ["load compiled", "import graph", "model graph loader", "onediff"]

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802  ComfyUI's name
        files = [name for name in folder_paths.get_filename_list(FOLDER) if name.endswith(SUFFIX)]
        return {
            "required": {
                "model": ("MODEL", {"tooltip": "The model to put the graphs into."}),
                "graph": (files or [NONE], {"tooltip": "A file under models/compiled_graphs."}),
            },
            "hidden": {"unique_id": "UNIQUE_ID", "prompt": "PROMPT", "extra_pnginfo": "EXTRA_PNGINFO"},
        }

    @classmethod
    def VALIDATE_INPUTS(cls, graph: str) -> bool:  # noqa: N802  ComfyUI's name
        """Accept any name: a workflow shared without its file still runs, compiled."""
        return True

    @classmethod
    def IS_CHANGED(cls, graph: str, **others: Any) -> str:  # noqa: N802  ComfyUI's name
        """Load again when the file was written again."""
        path = _find(graph)
        return f"{path.stat().st_mtime_ns} {path.stat().st_size}" if path else "missing"

    def load(
        self,
        model: Any,
        graph: str,
        unique_id: str = "",
        prompt: dict | None = None,
        extra_pnginfo: dict | None = None,
    ) -> dict[str, Any]:
        """Return the model with the file's graphs, and the text the node shows."""
        from ..compiler.hosts.comfy import compile_model

        graphs, problem = _read(graph)
        loaded, text = compile_model(
            model,
            graphs[0].backend if graphs else "auto",
            workflow=messages.workflow_id(prompt, extra_pnginfo),
            node_id=str(unique_id),
            on_change=lambda changed: messages.show(unique_id, changed),
            graphs=graphs,
            source=Path(graph).name.removesuffix(SUFFIX) if graphs else "",
        )
        text = "\n".join([problem, text] if problem else [text])
        messages.show(unique_id, text)
        return {"ui": {"text": [text]}, "result": (loaded,)}


def _find(name: str) -> Path | None:
    """Return the path of a listed file. A name cannot lead out of the folders that ComfyUI lists."""
    if name not in folder_paths.get_filename_list(FOLDER) or not name.endswith(SUFFIX):
        return None
    path = folder_paths.get_full_path(FOLDER, name)
    return Path(path) if path else None


def _read(name: str) -> tuple[list[StoredGraph], str]:
    """Return the graphs of a file, or nothing and one sentence with the reason."""
    path = _find(name)
    if path is None:
        return [], f"{name} is not in models/{FOLDER}; compiled instead (Save Graph makes the file)."
    try:
        data = path.read_bytes()
        return read_graphs(data, Trust()), ""
    except UntrustedFile:
        count = len(read_manifest(data))
        return [], f"{name} was not made on this machine, so its {count} graphs are compiled here instead."
    except (OSError, GraphFileError) as error:
        return [], f"{name} cannot be used, and the model is compiled instead: {error}."
