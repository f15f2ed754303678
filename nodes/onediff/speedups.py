"""Nodes that compile what comes in, and those that did so for a fixed batch size."""

from __future__ import annotations

from typing import Any

from ...compiler.common.words import say
from ..compile_model import CompileModel
from ..compile_node import CompileNode
from ..control_net_speedup import ControlNetSpeedup as OurControlNetSpeedup
from ..deep_cache import STEPS, settings, with_deep_cache
from ..vae_speedup import VAESpeedup
from .boosters import BOOSTER, answer, with_boosters_deep_cache
from .old_node import INPLACE, SAME, STATIC_MODE, OldNode, apart, node_text, with_lines

ANY_BATCH = say("Nothing to do: the same graphs serve every batch size.")


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
            made = with_boosters_deep_cache(made, shown, custom_booster)
        return answer(made, shown=shown, custom_booster=custom_booster)


class ModelSpeedup(_Speedup):
    TITLE = "Model Speedup (old)"
    NODE = CompileModel
    RETURN_TYPES = ("MODEL",)
    DESCRIPTION = SAME.format("Compile Model")
    INPUTS = {
        "required": {"model": ("MODEL", {"tooltip": "The diffusion model to compile."})},
        "optional": {"custom_booster": BOOSTER, "inplace": INPLACE},
    }


class VaeSpeedup(_Speedup):
    TITLE = "VAE Speedup (old)"
    NODE = VAESpeedup
    RETURN_TYPES = ("VAE",)
    DESCRIPTION = SAME.format("VAE Speedup of Compiled Graphs")
    INPUTS = {
        "required": {"vae": ("VAE", {"tooltip": "The VAE whose decoder is to be compiled."})},
        "optional": {"custom_booster": BOOSTER, "inplace": INPLACE},
    }


class ControlnetSpeedup(_Speedup):
    TITLE = "ControlNet Speedup (old)"
    NODE = OurControlNetSpeedup
    RETURN_TYPES = ("CONTROL_NET",)
    DESCRIPTION = SAME.format("ControlNet Speedup of Compiled Graphs")
    INPUTS = {
        "required": {"control_net": ("CONTROL_NET", {"tooltip": "The ControlNet to compile."})},
        "optional": {"inplace": INPLACE, "custom_booster": BOOSTER},
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
            "custom_booster": BOOSTER,
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


NODES = (
    ModelSpeedup,
    VaeSpeedup,
    ControlnetSpeedup,
    ControlNetSpeedup,
    SVDSpeedup,
    ModuleDeepCacheSpeedup,
    BatchSizePatcher,
)
