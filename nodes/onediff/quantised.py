"""OneDiff's nodes for quantised models. Nothing is quantised here: models are loaded as their files have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import folder_paths

from ...compiler.common.words import say
from .old_node import OldNode, checkpoints, ignored, load_checkpoint, with_lines

PLAIN = say("Loaded as the file has it, neither quantised nor compiled: connect Compile Model to make it faster.")
VAE_PLAIN = say("The VAE is not compiled either: connect VAE Speedup.")
AS_THEY_ARE = say(
    "Nothing is quantised and no file is written: Compile Model compiles quantised checkpoints as they are."
)

_VAE = ignored(["disable", "enable"])
_CALIBRATION = ignored("STRING", default="")
"""OneDiff lists its own files here. A text accepts the name of any."""
_COMPILE = ignored(["enable", "disable"])
_INT8_FILE = "unet_int8.safetensors"
"""What OneDiff writes into each folder under models/unet_int8."""


class _PlainLoader(OldNode):
    """Loads a checkpoint as ComfyUI's own loader does. Says so, and that the options have no effect."""

    RETURN_TYPES = ("MODEL", "CLIP", "VAE")
    DESCRIPTION = "From OneDiff's workflows. Use Load Checkpoint instead: this does the same. Nothing is quantised."
    MORE: dict[str, Any] = {}
    """Widgets between the checkpoint and `vae_speedup`."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802  ComfyUI's name
        options = {**cls.MORE, "vae_speedup": _VAE}
        return {**super().INPUT_TYPES(), "required": {"ckpt_name": checkpoints()}, "optional": options}

    def run(self, ckpt_name: str, vae_speedup: str = "disable", **given: Any) -> dict[str, Any]:
        """Return what is in the checkpoint."""
        lines = [PLAIN, VAE_PLAIN] if vae_speedup == "enable" else [PLAIN]
        return with_lines({"result": self._load(ckpt_name)}, given, lines)

    def _load(self, name: str) -> tuple[Any, Any, Any]:
        model, clip, vae, *_ = load_checkpoint(name)
        return model, clip, vae


class OneDiffQuantCheckpointLoaderSimple(_PlainLoader):
    TITLE = "Load Checkpoint - OneDiff Quant (old)"


class OneDiffQuantCheckpointLoaderSimpleAdvanced(_PlainLoader):
    TITLE = "Load Checkpoint - OneDiff Quant Advanced (old)"
    MORE = {"model_path": _CALIBRATION, "compile": _COMPILE}


class ImageOnlyOneDiffQuantCheckpointLoaderAdvanced(_PlainLoader):
    TITLE = "Load Checkpoint - OneDiff Quant Advanced (img2vid, old)"
    RETURN_TYPES = ("MODEL", "CLIP_VISION", "VAE")
    DESCRIPTION = (
        "From OneDiff's workflows. Use Image Only Checkpoint Loader instead: this does the same. Nothing is quantised."
    )
    MORE = {"model_path": _CALIBRATION, "compile": _COMPILE}

    def _load(self, name: str) -> tuple[Any, Any, Any]:
        model, _, vae, vision, *_ = load_checkpoint(name, output_clip=False, output_clipvision=True)
        return model, vision, vae


class UNETLoaderInt8(OldNode):
    TITLE = "UNET Loader Int8 (old)"
    RETURN_TYPES = ("MODEL",)
    DESCRIPTION = (
        "From OneDiff's workflows. Use Load Diffusion Model instead: this does the same. Nothing is quantised."
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802  ComfyUI's name
        names = [*_int8_folders(), *folder_paths.get_filename_list(_model_folder())]
        tooltip = "A file under models/diffusion_models, or a folder under models/unet_int8."
        return {**super().INPUT_TYPES(), "required": {"model_path": (names, {"tooltip": tooltip})}}

    def run(self, model_path: str, **hidden: Any) -> dict[str, Any]:
        """Return the diffusion model."""
        folder = _int8_folders().get(model_path)
        if folder is None:
            path = folder_paths.get_full_path(_model_folder(), model_path)
        else:
            path = str(folder / _INT8_FILE)
            _refuse_int8(path, model_path)
        return with_lines({"result": (_load_diffusion_model(path),)}, hidden, [PLAIN])


class Quant8Model(OldNode):
    TITLE = "Model Quantization(int8) (old)"
    OUTPUT_NODE = True
    RETURN_TYPES = ("MODEL",)
    """OneDiff's node has no output: it ends a workflow that only writes a file."""
    DESCRIPTION = "From OneDiff's workflows. Hands the model on. Quantised checkpoints are compiled as they are."
    INPUTS = {
        "required": {"model": ("MODEL", {"tooltip": "Is handed on."})},
        "optional": {
            "output_dir": ignored("STRING", default="int8"),
            "conv": ignored(["enable", "disable"]),
            "linear": ignored(["enable", "disable"]),
        },
    }

    def run(self, model: Any, **given: Any) -> dict[str, Any]:
        """Return the model as it is."""
        return with_lines({"result": (model,)}, given, [AS_THEY_ARE])


NODES = (
    OneDiffQuantCheckpointLoaderSimple,
    OneDiffQuantCheckpointLoaderSimpleAdvanced,
    ImageOnlyOneDiffQuantCheckpointLoaderAdvanced,
    UNETLoaderInt8,
    Quant8Model,
)


def _int8_folders() -> dict[str, Path]:
    """Return the folders that OneDiff wrote quantised models to, by their names in workflows."""
    root = Path(folder_paths.models_dir, "unet_int8")
    found = sorted(path.parent for path in root.rglob(_INT8_FILE))
    return {folder.relative_to(root).as_posix(): folder for folder in found}


def _model_folder() -> str:
    """Return what ComfyUI calls the folder of diffusion models: since August 2024 by that name."""
    known = getattr(folder_paths, "folder_names_and_paths", {})
    return "diffusion_models" if "diffusion_models" in known else "unet"


def _refuse_int8(path: str, name: str) -> None:
    """Raise ValueError for weights in int8 without scales: OneDiff has these in a text file of its own."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        keys = list(file.keys())
        has_scales = any("scale" in key or key.endswith("comfy_quant") for key in keys)
        if not has_scales and any(file.get_slice(key).get_dtype() == "I8" for key in keys):
            raise ValueError(say("Only OneDiff reads the weights in {name}. Choose the unquantised model.", name=name))


def _load_diffusion_model(path: str) -> Any:
    """Do what ComfyUI's UNETLoader does; the function was called `load_unet` until August 2024."""
    import comfy.sd

    load = getattr(comfy.sd, "load_diffusion_model", None) or comfy.sd.load_unet
    return load(path)
