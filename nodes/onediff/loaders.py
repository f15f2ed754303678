"""Nodes that load a checkpoint or a ControlNet and compile it."""

from __future__ import annotations

from typing import Any

import folder_paths

from .. import inputs
from ..compile_model import CompileModel
from ..control_net_speedup import ControlNetSpeedup
from ..deep_cache import STEPS, settings
from ..node_text import HEADINGS
from ..vae_speedup import VAESpeedup
from .boosters import BOOSTER, answer, with_boosters_deep_cache
from .old_node import SAME, STATIC_MODE, OldNode, apart, checkpoints, load_checkpoint, node_text

_VAE_SWITCH = (["disable", "enable"], {"tooltip": "Whether the VAE's decoder is compiled as well."})


class OneDiffCheckpointLoaderSimple(OldNode):
    TITLE = "Load Checkpoint - OneDiff (old)"
    RETURN_TYPES = ("MODEL", "CLIP", "VAE")
    DESCRIPTION = SAME.format("Load Checkpoint and Compile Model")
    MORE: dict[str, Any] = {}
    """Widgets after `vae_speedup`."""
    OPTIONAL: dict[str, Any] = {"custom_booster": BOOSTER}

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
        model = with_boosters_deep_cache(model, shown, custom_booster)
        return answer(model, clip, vae, shown=shown, custom_booster=custom_booster)


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
            "optional": {"custom_booster": BOOSTER},
            "hidden": inputs.HIDDEN,
        }

    def run(self, control_net_name: str, custom_booster: Any = None, **hidden: Any) -> dict[str, Any]:
        """Return the ControlNet with compiled blocks."""
        import comfy.controlnet

        control_net = comfy.controlnet.load_controlnet(folder_paths.get_full_path("controlnet", control_net_name))
        shown = node_text(hidden)
        (control_net,) = ControlNetSpeedup().compile(control_net=control_net, **hidden, shown=shown)["result"]
        return answer(control_net, shown=shown, custom_booster=custom_booster)


NODES = (OneDiffCheckpointLoaderSimple, OneDiffDeepCacheCheckpointLoaderSimple, OneDiffControlNetLoader)
