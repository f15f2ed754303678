"""OneDiff's nodes that look at what others made: its size, the weights of two models, two images."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from ...compiler.common.words import Words, join, say
from ..preview import save_preview
from .old_node import OldNode, with_lines

if TYPE_CHECKING:
    from collections.abc import Iterator

ALL_SIZES = say("Compiled graphs serve every size; on NVIDIA GPUs, CUDA graphs are recorded once for each.")
NOT_COMPARED = say("Not compared: check is off.")
OLD_TOLERANCES = say("This workflow is from before March 2024: its tolerances have no effect.")
SWITCH = ("enable", "disable")
WINDOW = 7
"""Pixels on each side of the squares whose structure is compared."""


class ResolutionSpeedupChecker(OldNode):
    TITLE = "Speedup Checker - Resolution (old)"
    RETURN_TYPES = ("LATENT",)
    DESCRIPTION = "From OneDiff's workflows. Shows the size of a latent: compiled graphs serve every size."
    INPUTS = {"required": {"samples": ("LATENT", {"tooltip": "Is handed on."})}}

    def run(self, samples: dict[str, Any], **hidden: Any) -> dict[str, Any]:
        """Return the latent as it is."""
        *_, height, width = samples["samples"].shape
        size = say("Latent of {width} x {height}, batch {batch}.", width=width, height=height, batch=_batch(samples))
        return with_lines({"result": (samples,)}, hidden, [join([size, ALL_SIZES], " ")])


class CompareModel(OldNode):
    TITLE = "Model Weight Comparator (old)"
    OUTPUT_NODE = True
    DESCRIPTION = (
        "From OneDiff's workflows. Compares the weights of two models, with their LoRAs, and shows how many differ."
    )
    INPUTS = {
        "required": {
            "torch_model": ("MODEL", {"tooltip": "One model."}),
            "oneflow_model": ("MODEL", {"tooltip": "The other one, for instance compiled."}),
            "check": (list(SWITCH), {"tooltip": "disable: nothing is compared."}),
        }
    }

    def run(self, torch_model: Any, oneflow_model: Any, check: str = "enable", **hidden: Any) -> dict[str, Any]:
        """Return the text that the node shows."""
        text = NOT_COMPARED if check == "disable" else compare_weights(torch_model, oneflow_model)
        return with_lines({}, hidden, [text])


class ShowImageDiff(OldNode):
    TITLE = "Image Distinction Scanner (old)"
    OUTPUT_NODE = True
    DESCRIPTION = "From OneDiff's workflows. Shows the absolute difference of two images, and how large it is."
    INPUTS = {
        "required": {
            "images1": ("IMAGE", {"tooltip": "Images."}),
            "images2": ("IMAGE", {"tooltip": "As many images of the same size."}),
        },
        "optional": {  # not required, because workflows from before March 2024 have no threshold
            "ssim_threshold": (
                "STRING",
                {"default": "0.9", "tooltip": "How alike they must be: 1 for the same image."},
            ),
            "raise_if_diff": (list(SWITCH), {"tooltip": "enable: images that are less alike stop the workflow."}),
            "image_id": ("STRING", {"default": "ComfyUI", "tooltip": "The beginning of the names of the pictures."}),
        },
    }

    def run(
        self,
        images1: torch.Tensor,
        images2: torch.Tensor,
        ssim_threshold: str = "0.9",
        raise_if_diff: str = "enable",
        image_id: str = "ComfyUI",
        **hidden: Any,
    ) -> dict[str, Any]:
        """Return the pictures and the text that the node shows. Raises ValueError if the images are not alike."""
        if images1.shape != images2.shape:
            raise ValueError(
                say(
                    "The images have different numbers or sizes: {one} and {other}.",
                    one=_size(images1),
                    other=_size(images2),
                )
            )
        alike = min(similarity(*pair) for pair in zip(images1, images2))
        if raise_if_diff == "enable" and not alike > float(ssim_threshold):
            raise ValueError(
                say(
                    "The images are not alike: similarity {alike:.4f}, limit {limit}.",
                    alike=alike,
                    limit=ssim_threshold,
                )
            )
        difference = (images1 - images2).abs()
        pictures = [save_preview(_picture(each), f"{image_id}_difference") for each in difference]
        lines = [_how_large(difference, alike), *([] if raise_if_diff in SWITCH else [OLD_TOLERANCES])]
        return with_lines({"ui": {"images": pictures}}, hidden, lines)


NODES = (ResolutionSpeedupChecker, CompareModel, ShowImageDiff)


def _batch(samples: dict[str, Any]) -> int:
    return samples["samples"].shape[0]


def compare_weights(one: Any, other: Any) -> Words:
    """Return how many weights of two MODELs differ, and by how much, after their LoRAs."""
    ones, others = one.get_key_patches(), other.get_key_patches()
    shared = [key for key in ones if key in others]
    lonely = len(ones) + len(others) - 2 * len(shared)
    differences = {key: _difference(key, ones[key], others[key], one) for key in shared}
    found = {key: difference for key, difference in differences.items() if difference > 0}
    if found:
        key = max(found, key=found.get)
        text = say(
            "{count} of {total} weights differ, by at most {most:.3g}: {key}",
            count=len(found), total=len(shared), most=found[key], key=key,
        )  # fmt: skip
    else:
        text = say("{total} weights are the same.", total=len(shared))
    return join([text, say("{count} weights are in one of the models only.", count=lonely) if lonely else ""])


def _difference(key: str, one: list[Any], other: list[Any], model: Any) -> float:
    """Return the largest difference between two weights; infinity for weights of different shapes."""
    if len(one) == len(other) and all(a is b for a, b in zip(_parts(one), _parts(other))):
        return 0.0  # the usual case, a clone: nothing needs to be computed
    ours, theirs = (_effective(key, patches, model) for patches in (one, other))
    if ours.shape != theirs.shape:
        return float("inf")
    return (ours - theirs).abs().max().item() if ours.numel() else 0.0


def _parts(patches: list[Any]) -> Iterator[Any]:
    """Yield a weight and its patches. ComfyUI since August 2024 has a function beside the weight."""
    weight, *rest = patches
    yield weight[0] if isinstance(weight, tuple) else weight
    yield from rest


def _effective(key: str, patches: list[Any], model: Any) -> torch.Tensor:
    """Return a weight with its patches, in float32 on the CPU."""
    import comfy.lora

    weight, *rest = _parts(patches)
    if isinstance(patches[0], tuple):
        weight = patches[0][1](weight)
    weight = weight.detach().to(device="cpu", dtype=torch.float32, copy=True)
    calculate = getattr(comfy.lora, "calculate_weight", None) or model.calculate_weight
    return calculate(rest, weight, key) if rest else weight


def similarity(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the structural similarity (Wang et al. 2004) of two images [height, width, channels] from 0 to 1."""
    x, y = (image.movedim(-1, 0)[None].double() for image in (one, other))
    window = min(WINDOW, *x.shape[-2:])
    count = window**2
    unbiased = count / max(count - 1, 1)

    def mean(values: torch.Tensor) -> torch.Tensor:
        return F.avg_pool2d(values, window, stride=1)

    mean_x, mean_y = mean(x), mean(y)
    variances = (mean(x * x) - mean_x**2 + mean(y * y) - mean_y**2) * unbiased
    covariance = (mean(x * y) - mean_x * mean_y) * unbiased
    light, contrast = 0.01**2, 0.03**2
    top = (2 * mean_x * mean_y + light) * (2 * covariance + contrast)
    return (top / ((mean_x**2 + mean_y**2 + light) * (variances + contrast))).mean().item()


def _how_large(difference: torch.Tensor, alike: float) -> Words:
    return say(
        "The images differ by at most {most:.3g} of 255, by {mean:.3g} on average. Similarity (SSIM): {alike:.4f}",
        most=difference.max().item() * 255, mean=difference.mean().item() * 255, alike=alike,
    )  # fmt: skip


def _picture(image: torch.Tensor) -> Any:
    from PIL import Image

    pixels = (image[..., :3] * 255).round().clamp(0, 255).to(torch.uint8).cpu().numpy()
    return Image.fromarray(pixels)


def _size(images: torch.Tensor) -> str:
    count, height, width, _ = images.shape
    return f"{count} x {width} x {height}"
