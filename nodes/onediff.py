"""Nodes under the ids of OneDiff's abandoned extension, so that workflows made with it open and run.

Sockets, widgets and their order are those that its workflows contain (siliconflow/onediff, `onediff_comfy_nodes`).
Each node does what our node does that its description names. It accepts inputs that mean nothing any more, and says
so. All are marked deprecated.
"""

from __future__ import annotations

import sys
from typing import Any

import folder_paths

from ..compiler.common.words import join, say
from ..compiler.hosts.comfy.graph_folder import choices
from ..compiler.storage.graph_file import SUFFIX
from . import inputs, onediff_checks, onediff_prompt, onediff_quantised
from .compile_model import CompileModel
from .compile_node import CompileNode
from .control_net_speedup import ControlNetSpeedup as OurControlNetSpeedup
from .deep_cache import STEPS, settings, with_deep_cache
from .graph_files import LoadGraph, SaveGraph
from .node_text import HEADINGS, NodeText
from .onediff_node import (
    INPLACE,
    SAME,
    STATIC_MODE,
    OldNode,
    apart,
    checkpoints,
    ignored,
    load_checkpoint,
    node_text,
    with_lines,
)
from .vae_speedup import VAESpeedup

NO_BOOSTER = say("Boosters have no effect: Inductor compiles the blocks.")
ANY_BATCH = say("Nothing to do: the same graphs serve every batch size.")

_BOOSTER = ("CUSTOM_BOOSTER", {"tooltip": "Accepted from old workflows; has no effect."})
_VAE_SWITCH = (["disable", "enable"], {"tooltip": "Whether the VAE's decoder is compiled as well."})


class _Speedup(OldNode):
    """Does what a node of ours does with its defaults. What came in is never changed, whatever `inplace` says."""

    NODE: type[CompileNode]

    def run(self, custom_booster: Any = None, **given: Any) -> dict[str, Any]:
        """Return the object with compiled blocks."""
        hidden, own = apart(given)
        socket, _ = self.NODE.SOCKET
        shown = node_text(hidden)
        (made,) = self.NODE().compile(**{socket: own[socket]}, **hidden, shown=shown)["result"]
        if self.NODE is CompileModel:
            made = _with_deep_cache(made, shown, custom_booster)
        return _answer(made, shown=shown, custom_booster=custom_booster)


class ModelSpeedup(_Speedup):
    TITLE = "Model Speedup (old)"
    NODE = CompileModel
    RETURN_TYPES = ("MODEL",)
    DESCRIPTION = SAME.format("Compile Model")
    INPUTS = {
        "required": {"model": ("MODEL", {"tooltip": "The diffusion model to compile."})},
        "optional": {"custom_booster": _BOOSTER, "inplace": INPLACE},
    }


class VaeSpeedup(_Speedup):
    TITLE = "VAE Speedup (old)"
    NODE = VAESpeedup
    RETURN_TYPES = ("VAE",)
    DESCRIPTION = SAME.format("VAE Speedup of Compiled Graphs")
    INPUTS = {
        "required": {"vae": ("VAE", {"tooltip": "The VAE whose decoder is to be compiled."})},
        "optional": {"custom_booster": _BOOSTER, "inplace": INPLACE},
    }


class ControlnetSpeedup(_Speedup):
    TITLE = "ControlNet Speedup (old)"
    NODE = OurControlNetSpeedup
    RETURN_TYPES = ("CONTROL_NET",)
    DESCRIPTION = SAME.format("ControlNet Speedup of Compiled Graphs")
    INPUTS = {
        "required": {"control_net": ("CONTROL_NET", {"tooltip": "The ControlNet to compile."})},
        "optional": {"inplace": INPLACE, "custom_booster": _BOOSTER},
    }


class ControlNetSpeedup(_Speedup):
    """What the node above was called until January 2024."""

    TITLE = "ControlNet Speedup (older)"
    NODE = OurControlNetSpeedup
    RETURN_TYPES = ("CONTROL_NET",)
    DESCRIPTION = SAME.format("ControlNet Speedup of Compiled Graphs")
    INPUTS = {
        "required": {
            "control_net": ("CONTROL_NET", {"tooltip": "The ControlNet to compile."}),
            "static_mode": STATIC_MODE,
        }
    }


class SVDSpeedup(_Speedup):
    TITLE = "SVD Speedup (old)"
    NODE = CompileModel
    RETURN_TYPES = ("MODEL",)
    DESCRIPTION = SAME.format("Compile Model")
    INPUTS = {
        "required": {"model": ("MODEL", {"tooltip": "The video model to compile."})},
        "optional": {  # not required, because workflows from before April 2024 have neither of the first two
            "inplace": INPLACE,
            "cache_name": (
                "STRING",
                {"default": "svd", "tooltip": "Has no effect: graphs are found by what they are."},
            ),
            "custom_booster": _BOOSTER,
        },
    }


class ModuleDeepCacheSpeedup(OldNode):
    TITLE = "Model DeepCache Speedup (old)"
    RETURN_TYPES = ("MODEL",)
    DESCRIPTION = SAME.format("Compile Model and DeepCache")
    INPUTS = {
        "required": {
            "model": ("MODEL", {"tooltip": "The diffusion model to compile."}),
            "static_mode": STATIC_MODE,
            **STEPS,
        }
    }

    def run(self, model: Any, static_mode: str = "enable", **widgets: Any) -> dict[str, Any]:
        """Return the compiled clone with shallow steps."""
        hidden, steps = apart(widgets)
        shown = node_text(hidden)
        (model,) = CompileModel().compile(model=model, **hidden, shown=shown)["result"]
        model, text = with_deep_cache(model, settings(**steps), shown)
        return {"ui": {"text": [text]}, "result": (model,)}


class BatchSizePatcher(OldNode):
    TITLE = "Batch Size Patcher (old)"
    RETURN_TYPES = ("MODEL",)
    DESCRIPTION = "From OneDiff's workflows. Hands the model on: one set of graphs serves every batch size."
    INPUTS = {
        "required": {
            "model": ("MODEL", {"tooltip": "Is handed on."}),
            "latent_image": ("LATENT", {"tooltip": "Is not looked at."}),
        }
    }

    def run(self, model: Any, latent_image: Any, **hidden: Any) -> dict[str, Any]:
        """Return the model as it is."""
        return with_lines({"result": (model,)}, hidden, [ANY_BATCH])


class OneDiffCheckpointLoaderSimple(OldNode):
    TITLE = "Load Checkpoint - OneDiff (old)"
    RETURN_TYPES = ("MODEL", "CLIP", "VAE")
    DESCRIPTION = SAME.format("Load Checkpoint and Compile Model")
    MORE: dict[str, Any] = {}
    """Widgets after `vae_speedup`."""
    OPTIONAL: dict[str, Any] = {"custom_booster": _BOOSTER}

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802  ComfyUI's name
        required = {"ckpt_name": checkpoints(), "vae_speedup": _VAE_SWITCH, **cls.MORE}
        return {"required": required, "optional": cls.OPTIONAL, "hidden": inputs.HIDDEN}

    def run(
        self, ckpt_name: str, vae_speedup: str = "disable", custom_booster: Any = None, **hidden: Any
    ) -> dict[str, Any]:
        """Return the checkpoint's model, compiled, its text encoder, and its VAE, compiled if asked for."""
        model, clip, vae, *_ = load_checkpoint(ckpt_name)
        shown = node_text(hidden, HEADINGS)
        (model,) = CompileModel().compile(model=model, **hidden, shown=shown)["result"]
        if vae_speedup == "enable":
            (vae,) = VAESpeedup().compile(vae=vae, **hidden, shown=shown)["result"]
        model = _with_deep_cache(model, shown, custom_booster)
        return _answer(model, clip, vae, shown=shown, custom_booster=custom_booster)


class OneDiffDeepCacheCheckpointLoaderSimple(OneDiffCheckpointLoaderSimple):
    TITLE = "Load Checkpoint - OneDiff DeepCache (old)"
    DESCRIPTION = "From OneDiff's workflows. Use Load Checkpoint, Compile Model and DeepCache: this does the same."
    MORE = {"static_mode": STATIC_MODE, **STEPS}
    OPTIONAL = {}

    def run(
        self, ckpt_name: str, vae_speedup: str = "disable", static_mode: str = "enable", **widgets: Any
    ) -> dict[str, Any]:
        """Return what the loader without DeepCache returns, with shallow steps."""
        hidden, steps = apart(widgets)
        return super().run(ckpt_name, vae_speedup, [settings(**steps)], **hidden)


class OneDiffControlNetLoader(OldNode):
    TITLE = "Load ControlNet Model - OneDiff (old)"
    RETURN_TYPES = ("CONTROL_NET",)
    DESCRIPTION = "From OneDiff's workflows. Use Load ControlNet Model and ControlNet Speedup: this does the same."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802  ComfyUI's name
        names = (folder_paths.get_filename_list("controlnet"), {"tooltip": "The ControlNet to load."})
        return {
            "required": {"control_net_name": names},
            "optional": {"custom_booster": _BOOSTER},
            "hidden": inputs.HIDDEN,
        }

    def run(self, control_net_name: str, custom_booster: Any = None, **hidden: Any) -> dict[str, Any]:
        """Return the ControlNet with compiled blocks."""
        import comfy.controlnet

        control_net = comfy.controlnet.load_controlnet(folder_paths.get_full_path("controlnet", control_net_name))
        shown = node_text(hidden)
        (control_net,) = OurControlNetSpeedup().compile(control_net=control_net, **hidden, shown=shown)["result"]
        return _answer(control_net, shown=shown, custom_booster=custom_booster)


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


class OneDiffModelBooster(OldNode):
    TITLE = "Apply Model Booster - OneDiff (old)"
    RETURN_TYPES = ("CUSTOM_BOOSTER",)
    DESCRIPTION = "From OneDiff's workflows. Has no effect: the blocks are compiled by Inductor."
    INPUTS = {
        "required": {},
        "optional": {
            "quantization_booster": ignored("QuantizationBooster"),
            "deepcache_booster": ("DeepCacheBooster", {"tooltip": "Settings of DeepCache."}),
            "torchcompile_booster": ignored("TorchCompileBooster"),
        },
    }

    def run(
        self,
        quantization_booster: str = "",
        deepcache_booster: Any = None,
        torchcompile_booster: str = "",
        **hidden: Any,
    ) -> tuple[list[Any]]:
        """Return what the connected nodes are to say, and the settings of DeepCache that they are to use."""
        boosters = [each for each in (quantization_booster, deepcache_booster, torchcompile_booster) if each]
        return (boosters or [NO_BOOSTER],)


class _Booster(OldNode):
    """A booster that has no effect. What it returns is the sentence that says so."""

    DESCRIPTION = "From OneDiff's workflows. Has no effect: the blocks are compiled by Inductor."
    SAYS = NO_BOOSTER

    def run(self, **ignored: Any) -> tuple[str]:
        return (self.SAYS,)


class OneFlowDeepcacheBooster(OldNode):
    TITLE = "OneFlow Deepcache Booster - OneDiff (old)"
    RETURN_TYPES = ("DeepCacheBooster",)
    DESCRIPTION = "From OneDiff's workflows. Use DeepCache instead: the model that this is for gets the same."
    INPUTS = {"required": dict(STEPS)}

    def run(self, **widgets: Any) -> tuple[Any]:
        """Return the settings."""
        return (settings(**apart(widgets)[1]),)


class OneDiffOnlineQuantizationBooster(_Booster):
    TITLE = "Online OneFlow Quantizer - OneDiff (old)"
    RETURN_TYPES = ("QuantizationBooster",)
    DESCRIPTION = "From OneDiff's workflows. Has no effect: nothing is quantised."
    SAYS = say("Weights are not quantised: they stay as the checkpoint has them.")
    INPUTS = {
        "required": {
            name: ignored("INT", default=default, min=0, max=most)
            for name, default, most in (
                ("quantized_conv_percentage", 100, 100),
                ("quantized_linear_percentage", 100, 100),
                ("conv_compute_density_threshold", 100, 2000),
                ("linear_compute_density_threshold", 300, 2000),
            )
        }
    }


class OneDiffTorchCompileBooster(_Booster):
    TITLE = "Torch Compile Booster - OneDiff (old)"
    RETURN_TYPES = ("TorchCompileBooster",)
    INPUTS = {
        "required": {
            "fullgraph": ignored([False, True]),
            "dynamic": ignored(["auto", True, False]),  # OneDiff's None is drawn red; old workflows may have it
            "backend": ignored(["inductor"]),
            "mode": ignored(["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]),
            "disable": ignored([False, True]),
            "docs_link": ignored("STRING", multiline=True, default=""),
        }
    }


class OneDiffNexfortBooster(_Booster):
    TITLE = "Nexfort Booster - OneDiff (old)"
    RETURN_TYPES = ("TorchCompileBooster",)
    INPUTS = {
        "required": {
            "fullgraph": ignored([False, True]),
            "dynamic": ignored([True, False]),
            "mode": ignored("STRING", default=""),
            "docs_link": ignored("STRING", multiline=True, default=""),
        }
    }


NODES = (
    ModelSpeedup,
    VaeSpeedup,
    ControlnetSpeedup,
    ControlNetSpeedup,
    SVDSpeedup,
    ModuleDeepCacheSpeedup,
    BatchSizePatcher,
    OneDiffCheckpointLoaderSimple,
    OneDiffDeepCacheCheckpointLoaderSimple,
    OneDiffControlNetLoader,
    ModelGraphSaver,
    ModelGraphLoader,
    VaeGraphSaver,
    VaeGraphLoader,
    OneDiffModelBooster,
    OneFlowDeepcacheBooster,
    OneDiffOnlineQuantizationBooster,
    OneDiffTorchCompileBooster,
    OneDiffNexfortBooster,
    *onediff_quantised.NODES,
    *onediff_prompt.NODES,
    *onediff_checks.NODES,
)


def unclaimed() -> list[type[OldNode]]:
    """Return the nodes whose ids no extension has that is loaded already.

    An extension that is loaded later takes its ids over: in ComfyUI's table the last one wins.
    """
    taken = getattr(sys.modules.get("nodes"), "NODE_CLASS_MAPPINGS", {})
    return [node for node in NODES if node.ID not in taken]


def _with_deep_cache(model: Any, shown: NodeText, custom_booster: Any) -> Any:
    """Return the model with shallow steps if a booster has settings of them."""
    wanted = [each for each in _boosters(custom_booster) if not isinstance(each, str)]
    return with_deep_cache(model, wanted[0], shown)[0] if wanted else model


def _answer(*result: Any, shown: NodeText, custom_booster: Any) -> dict[str, Any]:
    """Return what a node gives, with what boosters say on its text."""
    said = join(line for line in _boosters(custom_booster) if isinstance(line, str))
    text = shown.show("boosters", said) if said else shown.put("boosters", "")
    return {"ui": {"text": [text]}, "result": result}


def _boosters(custom_booster: Any) -> list[Any]:
    """Return the settings of DeepCache among boosters, and what the others say."""
    if isinstance(custom_booster, list):
        return custom_booster
    return [] if custom_booster is None else [NO_BOOSTER]
