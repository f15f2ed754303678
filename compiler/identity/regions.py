"""What a region is, and how a model's regions are found.

A region is a repeated block of a network: large enough that fusing it pays, small enough that compiling
it is quick, and the same code for every instance of an architecture. The host's own Python runs between
regions, so patches, ControlNet residuals and previews that act there keep working.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from ..common.torch_compat import is_compiled_in_place

LISTED = frozenset(
    {
        # ComfyUI's UNetModel keeps different layers in one container and passes options between them. So its layers
        # are regions, and the containers that its ModuleLists repeat are not.
        "comfy.ldm.modules.diffusionmodules.openaimodel.ResBlock",
        "comfy.ldm.modules.attention.SpatialTransformer",
        # Every released model repeats these. They are listed so that a model with a single block compiles as well.
        "comfy.ldm.modules.diffusionmodules.mmdit.JointBlock",
        "comfy.ldm.flux.layers.DoubleStreamBlock",
        "comfy.ldm.flux.layers.SingleStreamBlock",
        # The halves of a VAE. One graph frees each feature map after its last use; separate blocks would pass copies.
        "comfy.ldm.modules.diffusionmodules.model.Decoder",
        "comfy.ldm.modules.diffusionmodules.model.Encoder",
        # Blocks of such a half that cuts a video into chunks in a loop of its own: HunyuanVideo's. Its attention stays
        # ComfyUI's, which computes it in slices where memory is short.
        "comfy.ldm.modules.diffusionmodules.model.Downsample",
        "comfy.ldm.modules.diffusionmodules.model.ResnetBlock",
        "comfy.ldm.modules.diffusionmodules.model.Upsample",
        # TAESD stacks these in a Sequential.
        "comfy.taesd.taesd.Block",
        # The video VAEs of Wan, which stack these in Sequentials. Between them frames are cut into smaller chunks.
        "comfy.ldm.wan.vae.AttentionBlock",
        "comfy.ldm.wan.vae.Resample",
        "comfy.ldm.wan.vae.ResidualBlock",
        "comfy.ldm.wan.vae2_2.Resample",
        "comfy.ldm.wan.vae2_2.ResidualBlock",
        # The video VAEs of LTX stack up to a dozen of these in one block, which took minutes to compile.
        "comfy.ldm.lightricks.vae.causal_video_autoencoder.ResnetBlock3D",
        # The same in diffusers: the layers of its UNets, and the halves of its VAEs.
        "diffusers.models.resnet.ResnetBlock2D",
        "diffusers.models.resnet.SpatioTemporalResBlock",
        "diffusers.models.transformers.transformer_2d.Transformer2DModel",
        "diffusers.models.transformers.transformer_temporal.TransformerSpatioTemporalModel",
        "diffusers.models.autoencoders.vae.Decoder",
        "diffusers.models.autoencoders.vae.DecoderTiny",
        "diffusers.models.autoencoders.vae.Encoder",
        "diffusers.models.autoencoders.vae.EncoderTiny",
        "diffusers.models.autoencoders.autoencoder_kl_temporal_decoder.TemporalDecoder",
    }
)
"""Qualified names of the classes that are regions wherever they stand, as are their subclasses."""


@dataclass(frozen=True, eq=False)
class Region:
    """One block of a model."""

    path: str
    """Dotted path of the block below the model, as in its state dict; empty if the model itself is the block."""
    module: nn.Module

    @property
    def label(self) -> str:
        """The class and the place, as people are shown them."""
        name = type(self.module).__name__
        return f"{name} ({self.path})" if self.path else name


def find_regions(model: nn.Module) -> list[Region]:
    """Return the regions of a model, in the order of its modules.

    Regions never nest, and never lie in a module that torch.compile runs. Listed classes are always regions. Any
    other class is a region if it has children and stands at least twice in one ModuleList.
    """
    return list(_walk(model, "", repeated=False))


def is_torch_compiled(module: nn.Module) -> bool:
    """Whether torch.compile runs this module: as a wrapper, or in place (`nn.Module.compile`)."""
    return type(module).__name__ == "OptimizedModule" or is_compiled_in_place(module)


def _walk(module: nn.Module, path: str, repeated: bool) -> Iterator[Region]:
    if is_torch_compiled(module):
        return
    if (repeated or _is_listed(module)) and not _loops_over_chunks(module):
        yield Region(path, module)
        return
    region_classes = _repeated_blocks(module)
    for name, child in module.named_children():
        yield from _walk(child, f"{path}.{name}" if path else name, type(child) in region_classes)


def _repeated_blocks(module: nn.Module) -> set[type]:
    if not isinstance(module, nn.ModuleList):
        return set()
    counts = Counter(type(child) for child in module if _is_block(child))
    containers = {type(child) for child in module if any(_is_listed(m) for m in child.modules())}
    return {cls for cls, count in counts.items() if count > 1} - containers


def _is_block(module: nn.Module) -> bool:
    """Whether a module can be a region: a container has no forward to compile, and a leaf has nothing to fuse."""
    forward = getattr(type(module), "forward", nn.Module.forward)  # classes of TorchScript have none
    return forward is not nn.Module.forward and any(True for _ in module.children())


def _loops_over_chunks(module: nn.Module) -> bool:
    """Whether a half of a VAE has a loop over chunks of a video: as one graph it would serve one number of frames."""
    return getattr(module, "carried", False) is True


def _is_listed(module: nn.Module) -> bool:
    return any(f"{cls.__module__}.{cls.__qualname__}" in LISTED for cls in type(module).__mro__)
