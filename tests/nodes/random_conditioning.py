"""Nodes for test servers: conditioning without text and image encoders, which at full width would take gigabytes."""

from __future__ import annotations

import torch


class RandomConditioning:
    CATEGORY = "tests"
    FUNCTION = "make"
    RETURN_TYPES = ("CONDITIONING",)

    @classmethod
    def INPUT_TYPES(cls):
        sizes = {"width": ("INT", {"default": 2048}), "seed": ("INT", {"default": 0})}
        return {"required": sizes, "optional": {"pooled_width": ("INT", {"default": 1280})}}

    def make(self, width, seed, pooled_width=1280):
        generator = torch.Generator().manual_seed(seed)
        text = torch.randn(1, 77, width, generator=generator)
        return ([[text, {"pooled_output": torch.randn(1, pooled_width, generator=generator)}]],)


class RandomVideoConditioning:
    """SVD_img2vid_Conditioning with a random embedding of the image."""

    CATEGORY = "tests"
    FUNCTION = "make"
    RETURN_TYPES = ("CONDITIONING", "CONDITIONING", "LATENT")

    @classmethod
    def INPUT_TYPES(cls):
        sizes = ("width", "height", "video_frames", "motion_bucket_id", "fps")
        inputs = {"init_image": ("IMAGE",), "vae": ("VAE",), "augmentation_level": ("FLOAT", {"default": 0.0})}
        return {"required": inputs | {name: ("INT", {"default": 16}) for name in sizes}}

    def make(self, init_image, vae, width, height, video_frames, **settings):
        pixels = torch.nn.functional.interpolate(init_image.movedim(-1, 1)[:, :3], (height, width)).movedim(1, -1)
        latent = vae.encode(pixels)
        embedding = torch.randn(1, 1, 1024, generator=torch.Generator().manual_seed(0))
        positive, negative = (
            [[embedding * factor, {**settings, "concat_latent_image": latent * factor}]] for factor in (1, 0)
        )
        return positive, negative, {"samples": torch.zeros(video_frames, 4, height // 8, width // 8)}


NODE_CLASS_MAPPINGS = {
    "RandomConditioning": RandomConditioning,
    "RandomVideoConditioning": RandomVideoConditioning,
}
