"""Nodes under the ids of OneDiff's abandoned extension, so that workflows made with it open and run.

Sockets, widgets and their order are those that its workflows contain (siliconflow/onediff, `onediff_comfy_nodes`).
Each does what the node of ours named in its description does; what has no meaning any more is accepted, and the
node says so. All are marked deprecated.
"""

from __future__ import annotations

import sys
from typing import Any

import folder_paths

from . import messages, sockets
from .compile_model import CompileModel
from .control_net_speedup import ControlNetSpeedup
from .deep_cache import STEPS, settings, with_deep_cache
from .graph_files import NONE, SUFFIX, LoadGraph, SaveGraph, listed_files
from .vae_speedup import VAESpeedup

CATEGORY = "compiled graphs/OneDiff workflows"
NO_BOOSTER = "boosters are of no use any more: the blocks are compiled by Inductor"
ANY_BATCH = "nothing to do: one set of graphs serves every batch size"
_BOOSTER = ("CUSTOM_BOOSTER", {"tooltip": "Accepted from old workflows; has no effect."})
_INPLACE = ("BOOLEAN", {"default": True, "label_on": "yes", "label_off": "no", "tooltip": "Has no effect."})
_SWITCH = (["disable", "enable"], {"tooltip": "Whether the VAE's decoder is compiled as well."})
_STATIC = (["enable", "disable"], {"tooltip": "Has no effect."})


_OUTPUTS = {
    "MODEL": "The model, to be used as it is.",
    "CLIP": "The text encoder, as the checkpoint has it.",
    "VAE": "The VAE, to be used as it is.",
    "CONTROL_NET": "The ControlNet with compiled blocks.",
    "CUSTOM_BOOSTER": "For nodes of OneDiff's workflows.",
    "DeepCacheBooster": "Settings of DeepCache.",
    "QuantizationBooster": "Has no effect.",
    "TorchCompileBooster": "Has no effect.",
}


class _Node:
    """What all have. `INPUTS` are the sockets and widgets, by group."""

    CATEGORY = CATEGORY
    FUNCTION = "run"
    DEPRECATED = True
    INPUTS: dict[str, dict[str, Any]] = {}
    RETURN_TYPES: tuple[str, ...] = ()
    OUTPUT_TOOLTIPS: tuple[str, ...] = ()

    def __init_subclass__(cls) -> None:
        cls.OUTPUT_TOOLTIPS = tuple(_OUTPUTS[kind] for kind in cls.RETURN_TYPES)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802  ComfyUI's name
        return {**cls.INPUTS, "hidden": sockets.HIDDEN}


class ModelSpeedup(_Node):
    RETURN_TYPES = ("MODEL",)
    DESCRIPTION = "From OneDiff's workflows. Use Compile Model instead: this does the same."
    INPUTS = {
        "required": {"model": ("MODEL", {"tooltip": "The diffusion model to compile."})},
        "optional": {"custom_booster": _BOOSTER, "inplace": _INPLACE},
    }

    def run(self, model: Any, custom_booster: Any = None, inplace: bool = True, **hidden: Any) -> dict[str, Any]:
        """Return the compiled clone; the model that came in is never changed, whatever `inplace` says."""
        return _boosted(CompileModel().compile(model, **hidden), hidden, custom_booster)


class VaeSpeedup(_Node):
    RETURN_TYPES = ("VAE",)
    DESCRIPTION = "From OneDiff's workflows. Use VAE Speedup of Compiled Graphs instead: this does the same."
    INPUTS = {
        "required": {"vae": ("VAE", {"tooltip": "The VAE whose decoder is to be compiled."})},
        "optional": {"custom_booster": _BOOSTER, "inplace": _INPLACE},
    }

    def run(self, vae: Any, custom_booster: Any = None, inplace: bool = True, **hidden: Any) -> dict[str, Any]:
        """Return a VAE of its own; the one that came in is never changed."""
        return _with(VAESpeedup().compile(vae, **hidden), hidden, _booster(custom_booster))


class ControlnetSpeedup(_Node):
    RETURN_TYPES = ("CONTROL_NET",)
    DESCRIPTION = "From OneDiff's workflows. Use ControlNet Speedup of Compiled Graphs instead: this does the same."
    INPUTS = {
        "required": {"control_net": ("CONTROL_NET", {"tooltip": "The ControlNet to compile."})},
        "optional": {"inplace": _INPLACE, "custom_booster": _BOOSTER},
    }

    def run(self, control_net: Any, inplace: bool = True, custom_booster: Any = None, **hidden: Any) -> dict[str, Any]:
        """Return a ControlNet with compiled blocks."""
        return _with(ControlNetSpeedup().compile(control_net, **hidden), hidden, _booster(custom_booster))


class SVDSpeedup(_Node):
    RETURN_TYPES = ("MODEL",)
    DESCRIPTION = "From OneDiff's workflows. Use Compile Model instead: this does the same."
    INPUTS = {
        "required": {
            "model": ("MODEL", {"tooltip": "The video model to compile."}),
            "inplace": ([False, True], {"tooltip": "Has no effect."}),
            "cache_name": (
                "STRING",
                {"default": "svd", "tooltip": "Has no effect: graphs are found by what they are."},
            ),
        },
        "optional": {"custom_booster": _BOOSTER},
    }

    def run(
        self, model: Any, inplace: bool = False, cache_name: str = "", custom_booster: Any = None, **hidden: Any
    ) -> dict[str, Any]:
        """Return the compiled clone."""
        return _boosted(CompileModel().compile(model, **hidden), hidden, custom_booster)


class ModuleDeepCacheSpeedup(_Node):
    RETURN_TYPES = ("MODEL",)
    DESCRIPTION = "From OneDiff's workflows. Use Compile Model and DeepCache instead: this does the same."
    INPUTS = {
        "required": {
            "model": ("MODEL", {"tooltip": "The diffusion model to compile."}),
            "static_mode": _STATIC,
            **STEPS,
        }
    }

    def run(self, model: Any, static_mode: str = "enable", **widgets: Any) -> dict[str, Any]:
        """Return the compiled clone with shallow steps."""
        hidden, steps = _apart(widgets)
        return _boosted(CompileModel().compile(model, **hidden), hidden, [settings(**steps)])


class BatchSizePatcher(_Node):
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
        return _with({"result": (model,)}, hidden, [ANY_BATCH])


class OneDiffCheckpointLoaderSimple(_Node):
    RETURN_TYPES = ("MODEL", "CLIP", "VAE")
    DESCRIPTION = "From OneDiff's workflows. Use Load Checkpoint and Compile Model instead: this does the same."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802  ComfyUI's name
        names = (folder_paths.get_filename_list("checkpoints"), {"tooltip": "The checkpoint to load."})
        inputs = {"required": {"ckpt_name": names, "vae_speedup": _SWITCH, **cls._more()}}
        return {**inputs, "optional": cls._optional(), "hidden": sockets.HIDDEN}

    @classmethod
    def _more(cls) -> dict[str, Any]:
        return {}

    @classmethod
    def _optional(cls) -> dict[str, Any]:
        return {"custom_booster": _BOOSTER}

    def run(
        self, ckpt_name: str, vae_speedup: str = "disable", custom_booster: Any = None, **hidden: Any
    ) -> dict[str, Any]:
        """Return the checkpoint's model, compiled, its text encoder, and its VAE, compiled if asked for."""
        return self._load(ckpt_name, vae_speedup, hidden, custom_booster)

    @staticmethod
    def _load(ckpt_name: str, vae_speedup: str, hidden: dict[str, Any], custom_booster: Any) -> dict[str, Any]:
        model, clip, vae = _load_checkpoint(ckpt_name)
        answer = CompileModel().compile(model, **hidden)
        (model,) = answer["result"]
        texts = answer["ui"]["text"]
        if vae_speedup == "enable":
            made = VAESpeedup().compile(vae, **hidden)
            (vae,) = made["result"]
            texts = [*texts, *(f"VAE: {text}" for text in made["ui"]["text"])]
        return _boosted({"ui": {"text": texts}, "result": (model, clip, vae)}, hidden, custom_booster)


class OneDiffDeepCacheCheckpointLoaderSimple(OneDiffCheckpointLoaderSimple):
    DESCRIPTION = "From OneDiff's workflows. Use Load Checkpoint, Compile Model and DeepCache: this does the same."

    @classmethod
    def _more(cls) -> dict[str, Any]:
        return {"static_mode": _STATIC, **STEPS}

    @classmethod
    def _optional(cls) -> dict[str, Any]:
        return {}

    def run(
        self, ckpt_name: str, vae_speedup: str = "disable", static_mode: str = "enable", **widgets: Any
    ) -> dict[str, Any]:
        """Return what the loader without DeepCache returns, with shallow steps."""
        hidden, steps = _apart(widgets)
        return self._load(ckpt_name, vae_speedup, hidden, [settings(**steps)])


class OneDiffControlNetLoader(_Node):
    RETURN_TYPES = ("CONTROL_NET",)
    DESCRIPTION = "From OneDiff's workflows. Use Load ControlNet Model and ControlNet Speedup: this does the same."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802  ComfyUI's name
        names = (folder_paths.get_filename_list("controlnet"), {"tooltip": "The ControlNet to load."})
        return {
            "required": {"control_net_name": names},
            "optional": {"custom_booster": _BOOSTER},
            "hidden": sockets.HIDDEN,
        }

    def run(self, control_net_name: str, custom_booster: Any = None, **hidden: Any) -> dict[str, Any]:
        """Return the ControlNet with compiled blocks."""
        import comfy.controlnet

        control_net = comfy.controlnet.load_controlnet(folder_paths.get_full_path("controlnet", control_net_name))
        return _with(ControlNetSpeedup().compile(control_net, **hidden), hidden, _booster(custom_booster))


class ModelGraphSaver(_Node):
    RETURN_TYPES = ()
    OUTPUT_NODE = True
    DESCRIPTION = "From OneDiff's workflows. Use Save Graph instead: this does the same."
    INPUTS = {
        "required": {
            "samples": ("LATENT", {"tooltip": "Saves after this has been made."}),
            "model": ("MODEL", {"tooltip": "The compiled model."}),
            "filename_prefix": ("STRING", {"default": "unet", "tooltip": "The file is PREFIX_00001_" + SUFFIX}),
        }
    }

    def run(self, samples: Any, model: Any, filename_prefix: str, unique_id: str = "", **hidden: Any) -> dict[str, Any]:
        """Write the file and return the text the node shows."""
        return SaveGraph().save(filename_prefix, model=model, unique_id=unique_id)


class VaeGraphSaver(_Node):
    RETURN_TYPES = ()
    OUTPUT_NODE = True
    DESCRIPTION = "From OneDiff's workflows. Use Save Graph instead: this does the same."
    INPUTS = {
        "required": {
            "images": ("IMAGE", {"tooltip": "Saves after these have been made."}),
            "vae": ("VAE", {"tooltip": "The compiled VAE."}),
            "filename_prefix": ("STRING", {"default": "vae", "tooltip": "The file is PREFIX_00001_" + SUFFIX}),
        }
    }

    def run(self, images: Any, vae: Any, filename_prefix: str, unique_id: str = "", **hidden: Any) -> dict[str, Any]:
        """Write the file and return the text the node shows."""
        return SaveGraph().save(filename_prefix, vae=vae, unique_id=unique_id)


class _Loader(_Node):
    KIND = ""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802  ComfyUI's name
        files = listed_files()
        thing = (cls.RETURN_TYPES[0], {"tooltip": "What to put the graphs into."})
        graph = (
            files or [NONE],
            {"tooltip": "A file under models/compiled_graphs. OneDiff's own files are of no use."},
        )
        return {"required": {cls.KIND: thing, "graph": graph}, "hidden": sockets.HIDDEN}

    @classmethod
    def VALIDATE_INPUTS(cls, graph: str) -> bool:  # noqa: N802  ComfyUI's name
        """Accept any name: workflows name files of OneDiff, and then the blocks are compiled."""
        return True

    IS_CHANGED = LoadGraph.IS_CHANGED

    def run(self, graph: str, **connected: Any) -> dict[str, Any]:
        """Return what is connected with the file's graphs."""
        answer = LoadGraph().load(graph, **connected)
        return {**answer, "result": (answer["result"][LoadGraph.RETURN_TYPES.index(self.RETURN_TYPES[0])],)}


class ModelGraphLoader(_Loader):
    KIND = "model"
    RETURN_TYPES = ("MODEL",)
    DESCRIPTION = "From OneDiff's workflows. Use Load Graph instead: this does the same."


class VaeGraphLoader(_Loader):
    KIND = "vae"
    RETURN_TYPES = ("VAE",)
    DESCRIPTION = "From OneDiff's workflows. Use Load Graph instead: this does the same."


class OneDiffModelBooster(_Node):
    RETURN_TYPES = ("CUSTOM_BOOSTER",)
    DESCRIPTION = "From OneDiff's workflows. Has no effect: the blocks are compiled by Inductor."
    INPUTS = {
        "required": {},
        "optional": {
            "quantization_booster": ("QuantizationBooster", {"tooltip": "Has no effect."}),
            "deepcache_booster": ("DeepCacheBooster", {"tooltip": "Settings of DeepCache."}),
            "torchcompile_booster": ("TorchCompileBooster", {"tooltip": "Has no effect."}),
        },
    }

    def run(
        self,
        quantization_booster: str = "",
        deepcache_booster: Any = None,
        torchcompile_booster: str = "",
        **hidden: Any,
    ) -> tuple[list[Any]]:
        """Return what the nodes that it is connected to are to say, and DeepCache's settings for them to use."""
        boosters = [each for each in (quantization_booster, deepcache_booster, torchcompile_booster) if each]
        return (boosters or [NO_BOOSTER],)


class _Booster(_Node):
    """A booster is the sentence that says what has become of it."""

    SAYS = ""

    def run(self, **ignored: Any) -> tuple[str]:
        return (self.SAYS,)


class OneFlowDeepcacheBooster(_Node):
    RETURN_TYPES = ("DeepCacheBooster",)
    DESCRIPTION = "From OneDiff's workflows. Use DeepCache instead: the model that this is for gets the same."
    INPUTS = {"required": dict(STEPS)}

    def run(self, **widgets: Any) -> tuple[Any]:
        """Return the settings."""
        return (settings(**_apart(widgets)[1]),)


class OneDiffOnlineQuantizationBooster(_Booster):
    RETURN_TYPES = ("QuantizationBooster",)
    DESCRIPTION = "From OneDiff's workflows. Has no effect: nothing is quantised."
    SAYS = "without quantisation: weights stay what the checkpoint has"
    INPUTS = {
        "required": {
            name: ("INT", {"default": default, "min": 0, "max": most, "tooltip": "Has no effect."})
            for name, default, most in (
                ("quantized_conv_percentage", 100, 100),
                ("quantized_linear_percentage", 100, 100),
                ("conv_compute_density_threshold", 100, 2000),
                ("linear_compute_density_threshold", 300, 2000),
            )
        }
    }


class OneDiffTorchCompileBooster(_Booster):
    RETURN_TYPES = ("TorchCompileBooster",)
    DESCRIPTION = "From OneDiff's workflows. Has no effect: the blocks are compiled by Inductor."
    SAYS = NO_BOOSTER
    INPUTS = {
        "required": {
            "fullgraph": ([False, True], {"tooltip": "Has no effect."}),
            "dynamic": ([None, True, False], {"tooltip": "Has no effect."}),
            "backend": (["inductor"], {"tooltip": "Has no effect."}),
            "mode": (
                ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"],
                {"tooltip": "Has no effect."},
            ),
            "disable": ([False, True], {"tooltip": "Has no effect."}),
            "docs_link": ("STRING", {"multiline": True, "default": "", "tooltip": "Has no effect."}),
        }
    }


class OneDiffNexfortBooster(_Booster):
    RETURN_TYPES = ("TorchCompileBooster",)
    DESCRIPTION = "From OneDiff's workflows. Has no effect: the blocks are compiled by Inductor."
    SAYS = NO_BOOSTER
    INPUTS = {
        "required": {
            "fullgraph": ([False, True], {"tooltip": "Has no effect."}),
            "dynamic": ([True, False], {"tooltip": "Has no effect."}),
            "mode": ("STRING", {"default": "", "tooltip": "Has no effect."}),
            "docs_link": ("STRING", {"multiline": True, "default": "", "tooltip": "Has no effect."}),
        }
    }


NODES = {
    ModelSpeedup: "Model Speedup",
    VaeSpeedup: "VAE Speedup",
    ControlnetSpeedup: "ControlNet Speedup",
    SVDSpeedup: "SVD Speedup",
    ModuleDeepCacheSpeedup: "Model DeepCache Speedup",
    BatchSizePatcher: "Batch Size Patcher",
    OneDiffCheckpointLoaderSimple: "Load Checkpoint - OneDiff",
    OneDiffDeepCacheCheckpointLoaderSimple: "Load Checkpoint - OneDiff DeepCache",
    OneDiffControlNetLoader: "Load ControlNet Model - OneDiff",
    ModelGraphSaver: "Model Graph Saver",
    ModelGraphLoader: "Model Graph Loader",
    VaeGraphSaver: "VAE Graph Saver",
    VaeGraphLoader: "VAE Graph Loader",
    OneDiffModelBooster: "Apply Model Booster - OneDiff",
    OneFlowDeepcacheBooster: "OneFlow Deepcache Booster - OneDiff",
    OneDiffOnlineQuantizationBooster: "Online OneFlow Quantizer - OneDiff",
    OneDiffTorchCompileBooster: "Torch Compile Booster - OneDiff",
    OneDiffNexfortBooster: "Nexfort Booster - OneDiff",
}


def unclaimed() -> dict[str, tuple[type, str]]:
    """Return the nodes, with their titles, whose ids no extension that is loaded already has.

    One that is loaded later takes its ids over: ComfyUI's table has the last word.
    """
    taken = getattr(sys.modules.get("nodes"), "NODE_CLASS_MAPPINGS", {})
    return {cls.__name__: (cls, f"{title} (old)") for cls, title in NODES.items() if cls.__name__ not in taken}


def _booster(custom_booster: Any) -> list[str]:
    """Return what boosters have to say to a node that has no use for any."""
    if custom_booster is None:
        return []
    said = custom_booster if isinstance(custom_booster, list) else [NO_BOOSTER]
    return [line for line in said if isinstance(line, str)]


def _boosted(answer: dict[str, Any], hidden: dict[str, Any], custom_booster: Any) -> dict[str, Any]:
    """Give the model of an answer DeepCache if a booster has its settings, and say what the others have to."""
    boosters = custom_booster if isinstance(custom_booster, list) else []
    wanted = [each for each in boosters if not isinstance(each, str)]
    for each in wanted[:1]:
        model, *rest = answer["result"]
        node_id, above = hidden.get("unique_id", ""), "\n".join(answer["ui"]["text"])
        model, text = with_deep_cache(model, each, node_id, above)
        answer = {**answer, "ui": {"text": [text]}, "result": (model, *rest)}
        messages.show(node_id, text)
    return _with(answer, hidden, _booster(custom_booster))


def _apart(widgets: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a node's hidden inputs, and its others."""
    hidden = {name: value for name, value in widgets.items() if name in sockets.HIDDEN}
    return hidden, {name: value for name, value in widgets.items() if name not in hidden}


def _with(answer: dict[str, Any], hidden: dict[str, Any], lines: list[str]) -> dict[str, Any]:
    """Add lines to what a node shows."""
    if not lines:
        return answer
    text = "\n".join([*answer.get("ui", {}).get("text", []), *lines])
    messages.show(hidden.get("unique_id", ""), text)
    return {**answer, "ui": {"text": [text]}}


def _load_checkpoint(name: str) -> tuple[Any, Any, Any]:
    """Do what ComfyUI's CheckpointLoaderSimple does."""
    import comfy.sd

    path = folder_paths.get_full_path("checkpoints", name)
    embeddings = folder_paths.get_folder_paths("embeddings")
    loaded = comfy.sd.load_checkpoint_guess_config(
        path, output_vae=True, output_clip=True, embedding_directory=embeddings
    )
    return loaded[:3]
