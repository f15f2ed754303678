"""Boosters: inputs of OneDiff's nodes that chose a compiler, quantised weights or turned DeepCache on.

Only DeepCache has an effect. The others give a sentence, for the text of the node that they are connected to.
"""

from __future__ import annotations

from typing import Any

from ...compiler.common.words import join, say
from ..deep_cache import STEPS, settings, with_deep_cache
from ..node_text import NodeText
from .old_node import OldNode, apart, ignored

NO_BOOSTER = say("Boosters have no effect: Inductor compiles the blocks.")
BOOSTER = ("CUSTOM_BOOSTER", {"tooltip": "Accepted from old workflows; has no effect."})


def with_boosters_deep_cache(model: Any, shown: NodeText, custom_booster: Any) -> Any:
    """Return the model with shallow steps if a booster has settings of them."""
    wanted = [each for each in _boosters(custom_booster) if not isinstance(each, str)]
    return with_deep_cache(model, wanted[0], shown)[0] if wanted else model


def answer(*result: Any, shown: NodeText, custom_booster: Any) -> dict[str, Any]:
    """Return what a node gives, with what boosters say on its text."""
    said = join(line for line in _boosters(custom_booster) if isinstance(line, str))
    text = shown.show("boosters", said) if said else shown.put("boosters", "")
    return {"ui": {"text": [text]}, "result": result}


def _boosters(custom_booster: Any) -> list[Any]:
    """Return the settings of DeepCache among boosters, and what the others say."""
    if isinstance(custom_booster, list):
        return custom_booster
    return [] if custom_booster is None else [NO_BOOSTER]


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
    OneDiffModelBooster,
    OneFlowDeepcacheBooster,
    OneDiffOnlineQuantizationBooster,
    OneDiffTorchCompileBooster,
    OneDiffNexfortBooster,
)
