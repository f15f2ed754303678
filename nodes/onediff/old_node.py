"""What the nodes under OneDiff's ids have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import folder_paths

from ...compiler.common.words import join
from ...web_server import events
from .. import inputs
from ..node_text import NodeText

CATEGORY = "compiled graphs/OneDiff workflows"
SAME = "From OneDiff's workflows. Use {} instead: this does the same."


def ignored(kind: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Return an input that has no effect."""
    return kind, {**options, "tooltip": "Has no effect."}


INPLACE = ignored("BOOLEAN", default=True, label_on="yes", label_off="no")
STATIC_MODE = ignored(["enable", "disable"])

_OUTPUTS = {
    "MODEL": "The model, to be used as it is.",
    "CLIP": "The text encoder, as the checkpoint has it.",
    "CLIP_VISION": "The image encoder, as the checkpoint has it.",
    "VAE": "The VAE, to be used as it is.",
    "CONTROL_NET": "The ControlNet with compiled blocks.",
    "CONDITIONING": "The encoded prompt.",
    "LATENT": "The latent that came in.",
    "CUSTOM_BOOSTER": "For nodes of OneDiff's workflows.",
    "DeepCacheBooster": "Settings of DeepCache.",
    "QuantizationBooster": "Has no effect.",
    "TorchCompileBooster": "Has no effect.",
}


class OldNode:
    """What all of these nodes have. A node's id is the name of its class, `INPUTS` has its inputs by group."""

    CATEGORY = CATEGORY
    FUNCTION = "run"
    DEPRECATED = True
    ID = ""
    TITLE = ""
    INPUTS: dict[str, dict[str, Any]] = {}
    RETURN_TYPES: tuple[str, ...] = ()
    OUTPUT_TOOLTIPS: tuple[str, ...] = ()

    def __init_subclass__(cls) -> None:
        cls.ID = cls.__name__
        cls.OUTPUT_TOOLTIPS = tuple(_OUTPUTS[kind] for kind in cls.RETURN_TYPES)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802  ComfyUI's name
        return {**cls.INPUTS, "hidden": inputs.HIDDEN}

    @classmethod
    def VALIDATE_INPUTS(  # noqa: N802  ComfyUI's name
        cls,
        inplace: Any = None,
        static_mode: Any = None,
        vae_speedup: Any = None,
        compile: Any = None,  # noqa: A002  OneDiff's name
        conv: Any = None,
        linear: Any = None,
        check: Any = None,
        raise_if_diff: Any = None,
        style: Any = None,
        fullgraph: Any = None,
        dynamic: Any = None,
        backend: Any = None,
        mode: Any = None,
        disable: Any = None,
    ) -> bool:
        """Accept any value of a switch: ComfyUI leaves the inputs that are named here to this method.

        A workflow saves values by their order. Where OneDiff replaced a switch by another, an old workflow has a value
        of the old one in its place.
        """
        return True


def apart(widgets: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a node's hidden inputs, and its others."""
    hidden = {name: value for name, value in widgets.items() if name in inputs.HIDDEN}
    return hidden, {name: value for name, value in widgets.items() if name not in hidden}


def node_text(hidden: dict[str, Any], headings: Mapping[str, str] | None = None) -> NodeText:
    """Return the text of the node that has these hidden inputs."""
    return NodeText(hidden.get("unique_id", ""), headings)


def with_lines(answer: dict[str, Any], hidden: dict[str, Any], lines: list[str]) -> dict[str, Any]:
    """Add lines to what a node shows."""
    if not lines:
        return answer
    ui = answer.get("ui", {})
    text = join([*ui.get("text", []), *lines])
    events.show(hidden.get("unique_id", ""), text)
    return {**answer, "ui": {**ui, "text": [text]}}


def checkpoints() -> tuple[list[str], dict[str, Any]]:
    """Return the choice of a checkpoint."""
    return folder_paths.get_filename_list("checkpoints"), {"tooltip": "The checkpoint to load."}


def load_checkpoint(name: str, **outputs: bool) -> tuple[Any, ...]:
    """Return a checkpoint's model, text encoder, VAE and image encoder. `outputs` are those of ComfyUI's loader."""
    import comfy.sd

    path = folder_paths.get_full_path("checkpoints", name)
    embeddings = folder_paths.get_folder_paths("embeddings")
    wanted = {"output_vae": True, "output_clip": True, **outputs}
    return comfy.sd.load_checkpoint_guess_config(path, **wanted, embedding_directory=embeddings)
