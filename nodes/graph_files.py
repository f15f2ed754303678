"""Save Graph and Load Graph: the compiled graphs of a workflow as a file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ..compiler.backends import NAMES as BACKEND_NAMES
from ..compiler.common.words import join, say
from ..compiler.hosts.comfy import graph_folder
from ..compiler.identity.graph_spec import CompiledGraph
from ..compiler.storage.graph_file import SUFFIX, GraphFileError
from ..web_server import events
from . import inputs
from .node_text import HEADINGS, NodeText

if TYPE_CHECKING:
    from ..compiler.hosts.comfy.request import Request

NOTHING_CONNECTED = say("Connect a model, a VAE, a ControlNet or a CLIP.")
NO_GRAPHS_YET = say("No block is compiled yet. Connect an image or latent that was made with it to 'after'.")


class SaveGraph:
    """Writes the graphs of a model, a VAE, a ControlNet and a CLIP to one file. Compiles what is not compiled yet."""

    ID = "CG_SaveGraph"
    TITLE = "Save Graph"
    CATEGORY = "compiled graphs"
    FUNCTION = "save"
    RETURN_TYPES = ()
    OUTPUT_NODE = True
    DESCRIPTION = (
        "Writes the compiled graphs of a model, a VAE, a ControlNet and a CLIP to a file under models/compiled_graphs. "
        "It has no weights, and serves every checkpoint and LoRA of the architecture on this machine."
    )
    SEARCH_ALIASES = ["save compiled", "export graph", "model graph saver", "onediff"]

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802  ComfyUI's name
        return {
            "required": {
                "filename_prefix": ("STRING", {"default": "graphs", "tooltip": "The file is PREFIX_00001_" + SUFFIX}),
            },
            "optional": {
                "model": ("MODEL", {"tooltip": "A compiled model. If it is not compiled yet, it is compiled now."}),
                "vae": ("VAE", {"tooltip": "A VAE from VAE Speedup. One that is not compiled yet is compiled now."}),
                "control_net": (
                    "CONTROL_NET",
                    {"tooltip": "A ControlNet from ControlNet Speedup. One that is not compiled yet is compiled now."},
                ),
                "after": (inputs.ANY, {"tooltip": "Connect a LATENT or IMAGE to save after it has been made."}),
                "clip": (
                    "CLIP",
                    {"tooltip": "A CLIP from CLIP Speedup. One that is not compiled yet is compiled now."},
                ),
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
        clip: Any = None,
        unique_id: str = "",
    ) -> dict[str, Any]:
        """Write the file and return the text the node shows: what was written, or why nothing was."""
        from ..compiler.hosts.comfy.compile import compile_clip, compile_control_net, compile_model, compile_vae

        compilers = (
            (model, compile_model),
            (vae, compile_vae),
            (control_net, compile_control_net),
            (clip, compile_clip),
        )
        found = [_graphs_of(thing, compile_thing) for thing, compile_thing in compilers if thing is not None]
        graphs = [graph for graphs, _ in found for graph in graphs]
        told = [line for _, lines in found for line in lines]
        if graphs:
            text = join([_written(graphs, filename_prefix), *told])
        else:
            text = join([say("Nothing was saved."), *(told or [NOTHING_CONNECTED])])
        events.show(unique_id, text)
        return {"ui": {"text": [text]}}


class LoadGraph:
    """Puts the graphs of a file into a model, a VAE, a ControlNet and a CLIP. Nothing is traced or compiled."""

    ID = "CG_LoadGraph"
    TITLE = "Load Graph"
    CATEGORY = "compiled graphs"
    FUNCTION = "load"
    RETURN_TYPES = ("MODEL", "VAE", "CONTROL_NET", "CLIP")
    OUTPUT_TOOLTIPS = (
        "The model with compiled blocks, as from Compile Model.",
        "The VAE, as from VAE Speedup.",
        "The ControlNet, as from ControlNet Speedup.",
        "The CLIP, as from CLIP Speedup.",
    )
    DESCRIPTION = (
        "Loads graphs that Save Graph wrote on this machine. What the file lacks is compiled with the backend. If "
        "the file is missing, damaged or not trusted, the node says so and compiles the model."
    )
    SEARCH_ALIASES = ["load compiled", "import graph", "model graph loader", "onediff"]

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802  ComfyUI's name
        return {
            "required": {
                "graph": (
                    graph_folder.choices(),
                    {
                        "tooltip": "A file that Save Graph wrote to models/compiled_graphs. '(newest)' means the file "
                        "with the highest number."
                    },
                ),
            },
            "optional": {
                "model": ("MODEL", {"tooltip": "The model to put the graphs into."}),
                "vae": ("VAE", {"tooltip": "The VAE to put the graphs into."}),
                "backend": inputs.backend(),
                "control_net": ("CONTROL_NET", {"tooltip": "The ControlNet to put the graphs into."}),
                "cuda_graphs": inputs.CUDA_GRAPHS,
                "clip": ("CLIP", {"tooltip": "The CLIP to put the graphs into."}),
                "digest": (
                    "STRING",
                    {"default": "", "tooltip": "The SHA-256 that the file must have. Empty: any file of this name."},
                ),
                "where": (
                    "STRING",
                    {"default": "", "tooltip": "Where people get the file. Shown where it is missing; never opened."},
                ),
            },
            "hidden": inputs.HIDDEN,
        }

    @classmethod
    def VALIDATE_INPUTS(cls, graph: str, backend: str = BACKEND_NAMES[0]) -> bool | str:  # noqa: N802  ComfyUI's name
        """Accept any name of a file: a workflow shared without it still runs, compiled."""
        return inputs.check_backend(backend)

    @classmethod
    def IS_CHANGED(cls, graph: str, **others: Any) -> str:  # noqa: N802  ComfyUI's name
        """Load again when the file was written again."""
        path = graph_folder.find(graph)
        return f"{path.name} {path.stat().st_mtime_ns} {path.stat().st_size}" if path else "missing"

    def load(
        self,
        graph: str,
        model: Any = None,
        vae: Any = None,
        backend: str = BACKEND_NAMES[0],
        control_net: Any = None,
        cuda_graphs: bool = True,
        clip: Any = None,
        digest: str = "",
        where: str = "",
        unique_id: str = "",
        prompt: dict | None = None,
        extra_pnginfo: dict | None = None,
    ) -> dict[str, Any]:
        """Return what is connected with the file's graphs, and the text the node shows."""
        from ..compiler.hosts.comfy.compile import (
            block_classes,
            compile_clip,
            compile_control_net,
            compile_model,
            compile_vae,
        )
        from ..compiler.hosts.comfy.process import warm_up

        # Where no server says when a prompt is queued, the warm-up begins here at the latest.
        warm_up(backend, loads=True)
        things = {"model": model, "vae": vae, "control_net": control_net, "clip": clip}
        compilers = {
            "model": compile_model,
            "vae": partial(compile_vae, encode=None),
            "control_net": compile_control_net,
            "clip": compile_clip,
        }
        found = graph_folder.read(graph, block_classes(*things.values()), digest, where)
        shown = NodeText(unique_id, HEADINGS)
        shown.put("file", found.problem)

        def request(part: str) -> Request:
            tell = partial(shown.show, part)
            return replace(
                events.request(backend, True, unique_id, prompt, extra_pnginfo, tell),
                graphs=found.graphs,
                listed=found.listed,
                left=found.left,
                source=graph_folder.label(graph) if found.graphs else "",
                capture=cuda_graphs,
            )

        connected = [name for name, thing in things.items() if thing is not None]
        for name in connected:
            things[name], text = compilers[name](things[name], request(name))
            shown.put(name, text)
        text = shown.show("none", "" if connected else NOTHING_CONNECTED)
        return {"ui": {"text": [text]}, "result": tuple(things.values())}


def _graphs_of(thing: Any, compile_thing: Callable[[Any], tuple[Any, str]]) -> tuple[list[CompiledGraph], list[str]]:
    """Return the graphs that an object uses, and what to tell the person. Compiles it now if nothing has yet."""
    from ..compiler.hosts.comfy.compile import finish, graphs_in_use, patcher_of

    finish(patcher_of(thing))
    graphs = graphs_in_use(patcher_of(thing))
    if graphs is not None:
        return graphs, [] if graphs else [NO_GRAPHS_YET]
    compiled, text = compile_thing(thing)
    graphs = graphs_in_use(patcher_of(compiled)) or []
    return graphs, [say("Compiled now: {text}", text=text) if graphs else text]


def _written(graphs: list[CompiledGraph], filename_prefix: str) -> str:
    try:
        return graph_folder.write(graphs, filename_prefix)
    except GraphFileError as reason:
        return reason.args[0]
