"""Save Graph and Load Graph: the compiled graphs of a workflow as a file."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import folder_paths

from ..compiler.backends import BACKENDS, NAMES
from ..compiler.files import open_regular, write_whole
from ..compiler.graph import CompiledGraph
from ..compiler.graph_file import (
    SUFFIX,
    Entry,
    GraphFileError,
    StoredGraph,
    read_graphs,
    read_or_list,
    write_graphs,
)
from ..compiler.trust import Trust, UnusableKey
from . import messages, settings, sockets

FOLDER = "compiled_graphs"
NONE = "none"
_WRITING = threading.Lock()
NOTHING_CONNECTED = "connect a model, a VAE or a ControlNet"


def register_folder() -> None:
    """Give graph files a folder among ComfyUI's models, beside any that extra_model_paths.yaml names."""
    folder_paths.add_model_folder_path(FOLDER, os.path.join(folder_paths.models_dir, FOLDER))


def listed_files() -> list[str]:
    """Return the graph files among ComfyUI's models, by the names that the widget has."""
    try:
        names = folder_paths.get_filename_list(FOLDER)
    except OSError:  # the folder was deleted while ComfyUI runs
        return []
    return [name for name in names if name.endswith(SUFFIX)]


class SaveGraph:
    """Writes the graphs that a model, a VAE and a ControlNet use to one file; compiles them first if nothing has."""

    CATEGORY = "compiled graphs"
    FUNCTION = "save"
    RETURN_TYPES = ()
    OUTPUT_NODE = True
    DESCRIPTION = (
        "Writes the compiled graphs of a model, a VAE and a ControlNet to a file under models/compiled_graphs. It has "
        "no weights, and serves every checkpoint and LoRA of the architecture on this machine."
    )
    SEARCH_ALIASES = ["save compiled", "export graph", "model graph saver", "onediff"]

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802  ComfyUI's name
        return {
            "required": {
                "filename_prefix": ("STRING", {"default": "graphs", "tooltip": "The file is PREFIX_00001_" + SUFFIX}),
            },
            "optional": {
                "model": ("MODEL", {"tooltip": "A compiled model. One that is not yet is compiled now."}),
                "vae": ("VAE", {"tooltip": "A VAE from VAE Speedup. One that is not compiled yet is compiled now."}),
                "control_net": (
                    "CONTROL_NET",
                    {"tooltip": "A ControlNet from ControlNet Speedup. One that is not compiled yet is compiled now."},
                ),
                "after": (sockets.ANY, {"tooltip": "Connect a LATENT or IMAGE to save after it has been made."}),
            },
            "hidden": {"unique_id": "UNIQUE_ID"},
        }

    def save(
        self,
        filename_prefix: str,
        model: Any = None,
        vae: Any = None,
        control_net: Any = None,
        after: Any = None,
        unique_id: str = "",
    ) -> dict[str, Any]:
        """Write the file and return the text the node shows: what was written, or why nothing was."""
        from ..compiler.hosts.comfy.compile import compile_control_net, compile_model, compile_vae

        settings.apply()
        compilers = ((model, compile_model), (vae, compile_vae), (control_net, compile_control_net))
        found = [_graphs_of(thing, compile_thing) for thing, compile_thing in compilers if thing is not None]
        graphs, told = (
            [graph for graphs, _ in found for graph in graphs],
            [line for _, lines in found for line in lines],
        )
        if graphs:
            text = "\n".join([_written(graphs, filename_prefix), *told])
        else:
            text = "\n".join(["nothing saved", *(told or [NOTHING_CONNECTED])])
        messages.show(unique_id, text)
        return {"ui": {"text": [text]}}


class LoadGraph:
    """Puts the graphs of a file into a model, a VAE and a ControlNet: nothing is traced and nothing is compiled."""

    CATEGORY = "compiled graphs"
    FUNCTION = "load"
    RETURN_TYPES = ("MODEL", "VAE", "CONTROL_NET")
    OUTPUT_TOOLTIPS = (
        "The model with compiled blocks, as from Compile Model.",
        "The VAE, as from VAE Speedup.",
        "The ControlNet, as from ControlNet Speedup.",
    )
    DESCRIPTION = (
        "Loads graphs that Save Graph wrote on this machine. What the file lacks is compiled with the backend; a file "
        "that is missing, damaged or from elsewhere is named, and the model is compiled."
    )
    SEARCH_ALIASES = ["load compiled", "import graph", "model graph loader", "onediff"]

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802  ComfyUI's name
        files = listed_files()
        return {
            "required": {
                "graph": (files or [NONE], {"tooltip": "A file under models/compiled_graphs."}),
            },
            "optional": {
                "model": ("MODEL", {"tooltip": "The model to put the graphs into."}),
                "vae": ("VAE", {"tooltip": "The VAE to put the graphs into."}),
                "backend": sockets.backend(),
                "control_net": ("CONTROL_NET", {"tooltip": "The ControlNet to put the graphs into."}),
                "cuda_graphs": sockets.CUDA_GRAPHS,
            },
            "hidden": sockets.HIDDEN,
        }

    @classmethod
    def VALIDATE_INPUTS(cls, graph: str, backend: str = NAMES[0]) -> bool | str:  # noqa: N802  ComfyUI's name
        """Accept any name of a file: a workflow shared without it still runs, compiled."""
        return sockets.check_backend(backend)

    @classmethod
    def IS_CHANGED(cls, graph: str, **others: Any) -> str:  # noqa: N802  ComfyUI's name
        """Load again when the file was written again."""
        path = _find(graph)
        return f"{path.stat().st_mtime_ns} {path.stat().st_size}" if path else "missing"

    def load(
        self,
        graph: str,
        model: Any = None,
        vae: Any = None,
        backend: str = NAMES[0],
        control_net: Any = None,
        cuda_graphs: bool = True,
        unique_id: str = "",
        prompt: dict | None = None,
        extra_pnginfo: dict | None = None,
    ) -> dict[str, Any]:
        """Return what is connected with the file's graphs, and the text the node shows."""
        from ..compiler.hosts.comfy.compile import compile_control_net, compile_model, compile_vae

        settings.apply()
        graphs, listed, problem = _read(graph)
        texts = {"file": problem}

        def tell(name: str, text: str) -> str:
            texts[name] = text
            return "\n".join(filter(None, texts.values()))

        def request(name: str) -> Any:
            return replace(
                messages.request(backend, True, unique_id, prompt, extra_pnginfo),
                on_change=lambda changed: messages.show(unique_id, tell(name, changed)),
                on_progress=lambda text: messages.progress(unique_id, text),
                graphs=graphs,
                listed=listed,
                source=Path(graph).name.removesuffix(SUFFIX) if graphs else "",
                record=cuda_graphs,
            )

        if model is not None:
            model, text = compile_model(model, request("model"))
            tell("model", text)
        if vae is not None:
            vae, text = compile_vae(vae, request("vae"), encode=None)
            tell("vae", f"VAE: {text}")
        if control_net is not None:
            control_net, text = compile_control_net(control_net, request("control_net"))
            tell("control_net", f"ControlNet: {text}")
        text = tell("none", "" if model or vae or control_net else NOTHING_CONNECTED)
        messages.show(unique_id, text)
        return {"ui": {"text": [text]}, "result": (model, vae, control_net)}


def _graphs_of(thing: Any, compile_thing: Any) -> tuple[list[CompiledGraph], list[str]]:
    """Return the graphs that a model, a VAE or a ControlNet uses, compiled now if need be, and what to tell of that."""
    from ..compiler.hosts.comfy.compile import finish, graphs_in_use, patcher_of

    finish(patcher_of(thing))
    if graphs := graphs_in_use(patcher_of(thing)):
        return graphs, []
    compiled, text = compile_thing(thing)
    return graphs_in_use(patcher_of(compiled)) or [], [f"compiled now: {text}"]


def _written(graphs: list[CompiledGraph], filename_prefix: str) -> str:
    try:
        return write(graphs, filename_prefix)
    except GraphFileError as reason:
        return str(reason)


def write(graphs: list[CompiledGraph], filename_prefix: str) -> str:
    """Write a graph file and return what was written. Raises GraphFileError if that cannot be done.

    Any thread may write: the number in the name is taken by one at a time.
    """
    with _WRITING:
        return _write(graphs, filename_prefix)


def _write(graphs: list[CompiledGraph], filename_prefix: str) -> str:
    folder = folder_paths.get_folder_paths(FOLDER)[0]
    name = filename_prefix
    try:
        os.makedirs(folder, exist_ok=True)
        place, stem, counter, _, _ = folder_paths.get_save_image_path(filename_prefix, folder)
        path, newest = (Path(place, f"{stem}_{number:05}_{SUFFIX}") for number in (counter, counter - 1))
        if _holds(newest, graphs):
            return f"{len(graphs)} graphs are in {newest.name} already"
        name = path.name
        data = write_graphs([StoredGraph.of(graph) for graph in graphs], Trust())
        write_whole(path, data)
    except UnusableKey as error:
        raise GraphFileError(f"{name} could not be written: {error}.") from None
    except OSError as error:
        raise GraphFileError(
            f"{name} could not be written ({error.strerror or error}): make room, or save to another folder."
        ) from None
    return f"{len(graphs)} graphs saved to {name}, {len(data) / 1e6:.1f} MB"


def _holds(path: Path, graphs: list[CompiledGraph]) -> bool:
    """Whether a file is sound and has just these graphs: a workflow that saves need not write a file each time."""
    try:
        with open_regular(path) as file:
            stored = {graph.key: graph for graph in read_graphs(file, Trust())}
    except (OSError, GraphFileError):
        return False
    return stored.keys() == {graph.key for graph in graphs} and not any(
        BACKENDS[graph.backend].grows and stored[graph.key] != StoredGraph.of(graph) for graph in graphs
    )


def _find(name: str) -> Path | None:
    """Return the path of a listed file. A name cannot lead out of the folders that ComfyUI lists."""
    if name not in listed_files():
        return None
    path = folder_paths.get_full_path(FOLDER, name)
    return Path(path) if path else None


def _read(name: str) -> tuple[list[StoredGraph], list[Entry], str]:
    """Return the graphs of a file, or what they were and one sentence with the reason."""
    path = _find(name)
    if path is None:
        return [], [], f"{name} is not in models/{FOLDER}; compiled instead (Save Graph makes the file)."
    try:
        with open_regular(path) as file:
            graphs, listed = read_or_list(file, Trust())
    except (OSError, GraphFileError) as error:
        return [], [], f"{name} cannot be used; compiled instead: {error}."
    told = f"{name} was not made on this machine, so its {len(listed)} graphs are compiled here instead."
    return graphs, listed, told if listed else ""
