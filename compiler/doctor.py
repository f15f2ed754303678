"""What this machine has of what compiling needs, and what to do about the rest: one fact a line.

Every check looks and changes nothing. Some ask other programs and may take a second, so a server asks off its event
loop. What only a host knows comes in as `Surroundings`; ComfyUI's are in `hosts/comfy/doctor_facts.py`.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import stat
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from .backends import BACKENDS
from .backends.inductor import OLDEST_TORCH
from .backends.oneflow import onediff_text
from .store import GIGABYTE, FolderStore, StoreError, open_store
from .trust import KEY_BYTES, Trust

PATIENCE = 10.0
"""Seconds that another program may take to answer."""
C_COMPILERS = ("gcc", "clang")
"""What Triton looks for, beside the environment variable CC."""


@dataclass(frozen=True)
class Fact:
    """One thing that was looked at."""

    name: str
    text: str
    """What was found, without a full stop."""
    ok: bool = True
    remedy: str = ""
    """What to do, in sentences; empty where nothing is wrong."""


@dataclass(frozen=True)
class Surroundings:
    """What a host knows of itself."""

    device: torch.device
    """Where models run."""
    store: str
    """Folder or URL of the compiled graphs."""
    host: str = ""
    """The host's version and place in words; empty if there is none."""
    extensions: tuple[Path, ...] = ()
    """Folders of everything that is installed beside this package."""


def examine(around: Surroundings) -> list[Fact]:
    """Return every fact, in the order in which things build on one another.

    A check that fails itself is a fact as well: what is broken must not hide the rest.
    """
    facts = [_asked(name, check, around) for name, check in _CHECKS.items()]
    return facts + [_asked(name, _backend, around, name) for name in BACKENDS] + _other_compilers(around)


def usual_device() -> torch.device:
    """Return the device that models run on unless somebody decides otherwise."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def _asked(name: str, check: Callable[..., Fact], *arguments: object) -> Fact:
    try:
        return check(*arguments)
    except Exception as error:  # drivers and half-installed packages fail in their own ways
        text = str(error).strip().splitlines()
        told = f"could not be examined ({type(error).__name__}{': ' + text[0] if text else ''})"
        return Fact(name, told, False, "Install it again, or report this line.")


def _torch(around: Surroundings) -> Fact:
    if torch.version.hip or torch.version.cuda:
        built = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    else:
        built = "no CUDA"
    text = f"{torch.__version__}, with {built}"
    if torch.torch_version.TorchVersion(torch.__version__) < OLDEST_TORCH:
        return Fact("torch", text, False, f"Update torch to {'.'.join(map(str, OLDEST_TORCH))} or newer.")
    return Fact("torch", text)


def _gpu(around: Surroundings) -> Fact:
    device = around.device
    if device.type == "cuda":
        drivers = [f"driver {version}" for version in _nvidia("driver_version")[:1]]
        return Fact("GPU", ", ".join([_described(device), *drivers]))
    if device.type != "cpu":
        remedy = "On it models run as they do without these nodes; graphs are for NVIDIA and AMD GPUs and for CPUs."
        return Fact("GPU", f"{device.type}, for which there are no graphs", False, remedy)
    names = _nvidia("name")
    if not names:
        return Fact("GPU", "none; models are compiled for the CPU")
    if torch.cuda.is_available():
        return Fact("GPU", f"{names[0]}, not used: models run on the CPU")
    remedy = "Update NVIDIA's driver." if torch.version.cuda else "Install a build of torch with CUDA (pytorch.org)."
    return Fact("GPU", f"{names[0]}, which torch cannot use", False, remedy)


def _described(device: torch.device) -> str:
    properties = torch.cuda.get_device_properties(device)
    capability = f"compute capability {properties.major}.{properties.minor}"
    return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, {capability}"


def _nvidia(field: str) -> list[str]:
    """Return what NVIDIA's driver says of each GPU, or nothing where it does not answer."""
    try:
        command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def _triton(around: Surroundings) -> Fact:
    if around.device.type != "cuda":
        return Fact("Triton", "not needed without a GPU")
    try:
        import triton
    except ModuleNotFoundError:
        package = "triton-windows" if os.name == "nt" else "triton"
        return Fact("Triton", "not installed", False, f"Install it into this Python: pip install {package}.")
    return Fact("Triton", triton.__version__)


def _triton_compiles() -> bool:
    """Whether Triton runs a C compiler on this machine, for what calls its kernels. On Windows it brings one."""
    if os.name == "nt":
        return False
    try:
        if torch.version.hip:
            from triton.backends.amd import driver
        else:
            from triton.backends.nvidia import driver
    except ImportError:
        return False
    return hasattr(driver, "compile_module_from_src")


def _compiler(around: Surroundings) -> Fact:
    if around.device.type == "cpu":
        return _cpp_compiler()
    if around.device.type != "cuda" or not _triton_compiles():
        return Fact("compiler", "not needed")
    named = os.environ.get("CC")
    found = shutil.which(named) if named else next(filter(None, map(shutil.which, C_COMPILERS)), None)
    if found is None:
        told = f"CC is {named}, which is not there" if named else "no C compiler was found"
        return Fact("compiler", told, False, "Triton needs one: install gcc or clang, or set CC to one.")
    return Fact("compiler", found)


def _cpp_compiler() -> Fact:
    from torch._inductor import cpp_builder, exc

    try:
        found = cpp_builder.get_cpp_compiler()
    except (exc.InvalidCxxCompiler, RuntimeError, OSError):
        which = "Visual Studio Build Tools" if os.name == "nt" else "g++ or clang"
        return Fact("compiler", "no C++ compiler was found", False, f"Install {which}, or set CXX to one.")
    return Fact("compiler", shutil.which(found) or found)


def _headers(around: Surroundings) -> Fact:
    needed = around.device.type == "cpu" or (around.device.type == "cuda" and _triton_compiles())
    path = Path(sysconfig.get_paths()["include"], "Python.h")
    if path.is_file():
        return Fact("Python headers", str(path))
    if not needed:
        return Fact("Python headers", "not needed")
    remedy = "Install the python3-dev package of this Python."
    if os.name == "nt":  # the Python of ComfyUI's portable build comes without
        remedy = "Copy the folders Include and libs from an installed Python of the same version."
    return Fact("Python headers", f"{path} is not there", False, remedy)


def _backend(around: Surroundings, name: str) -> Fact:
    """The verdict on a compiler. Inductor is needed; the others are there for those who choose them."""
    backend = BACKENDS[name]
    reason = backend.available(around.device)
    if reason is None:
        notes = onediff_text() if name == "oneflow" else ""
        return Fact(name, " ".join(filter(None, [f"can be used on {around.device.type}", notes])).rstrip("."))
    if name == "inductor":
        return Fact(name, f"cannot be used on {around.device.type}", False, reason)
    return Fact(name, reason.rstrip("."))


def _host(around: Surroundings) -> Fact:
    return Fact("ComfyUI", around.host or "none found from here")


def _store(around: Surroundings) -> Fact:
    choose = "Make room or change its permissions, or set COMPILED_GRAPHS_STORE to another folder."
    try:
        store = open_store(around.store)
    except StoreError as error:
        return Fact("store", "cannot be used", False, str(error))
    if isinstance(store, FolderStore) and (problem := _unwritable(store.folder)):
        return Fact("store", f"{store.place} cannot be written ({problem})", False, choose)
    try:
        entries = store.entries()
    except OSError as error:
        return Fact("store", f"{store.place} cannot be read ({error.strerror or error})", False, choose)
    size = sum(entry.size for entry in entries) / GIGABYTE
    return Fact("store", f"{store.place}, {len(entries)} graphs, {size:.2f} of {store.limit / GIGABYTE:g} GB")


def _key(around: Surroundings) -> Fact:
    trust = Trust()
    path = trust.folder / "key"
    elsewhere = "Set COMPILED_GRAPHS_TRUST to a folder that only you can read."
    try:
        status = path.stat()
        size = len(path.read_bytes())
    except FileNotFoundError:
        if problem := _unwritable(trust.folder):
            return Fact("key file", f"{path} cannot be made ({problem})", False, elsewhere)
        return Fact("key file", f"{path} is made with the first graph")
    except OSError as error:
        return Fact("key file", f"{path} cannot be read ({error.strerror or error})", False, elsewhere)
    if size != KEY_BYTES:
        return Fact("key file", f"{path} is not a key", False, "Remove it, and a new one is made.")
    if os.name != "nt" and stat.S_IMODE(status.st_mode) & 0o077:
        told = f"{path} is open to other users (mode {stat.S_IMODE(status.st_mode):04o})"
        remedy = f"chmod 600 {shlex.quote(str(path))}, or remove it if somebody may have copied it: a new one is made."
        return Fact("key file", told, False, remedy)
    return Fact("key file", f"{path}, {len(trust.trusted_digests())} trusted files")


def _unwritable(folder: Path) -> str | None:
    """Return why nothing can be written to a folder, which need not be there yet, or None. Leaves nothing behind."""
    there = next((place for place in (folder, *folder.parents) if place.exists()), folder)
    try:
        with tempfile.TemporaryFile(dir=there):
            return None
    except OSError as error:
        return error.strerror or str(error)


_CHECKS: dict[str, Callable[[Surroundings], Fact]] = {
    "torch": _torch,
    "GPU": _gpu,
    "Triton": _triton,
    "compiler": _compiler,
    "Python headers": _headers,
    "ComfyUI": _host,
    "store": _store,
    "key file": _key,
}

_LATER_DECIDES = "of its torch.compile nodes and Compile Model, the later one in a branch decides"
_ONE_OF_TWO = "what it compiled stays its own; use it or Compile Model in a branch, not both"
_COMPILING_EXTENSIONS = {
    "kjnodes": ("KJNodes", _LATER_DECIDES),
    "wavespeed": ("WaveSpeed", f"{_LATER_DECIDES}; its first block cache works with both"),
    "teacache": ("TeaCache", _LATER_DECIDES),
    "torchcompile": ("torch.compile", _LATER_DECIDES),
    "onediff": ("OneDiff", "nodes under its ids are its own, not ours"),
    "tensorrt": ("TensorRT", _ONE_OF_TWO),
    "stablefast": ("stable-fast", _ONE_OF_TWO),
}
"""Part of a folder's name, in lower case and without separators: what people call it, and how the two get along."""


def _other_compilers(around: Surroundings) -> list[Fact]:
    """Say which other extensions here compile models; they are known by their folders' names."""
    folders = [path for path in around.extensions if path.suffix.lower() != ".disabled"]
    facts = []
    for part, (title, text) in _COMPILING_EXTENSIONS.items():
        named = [path for path in folders if part in re.sub("[^a-z0-9]", "", path.name.lower())]
        facts += [Fact(title, f"{path.name}: {text}") for path in named]
    if facts or not folders:
        return facts
    return [Fact("other compilers", f"none known among {len(folders)} extensions")]
