"""The doctor says what compiling needs, whether this machine has it, and what to do if not: one fact per line.

The checks change nothing. Some of them ask other programs and may take a second, so a server runs them off its event
loop. `Surroundings` holds what only a host knows. ComfyUI's are made in `hosts/comfy/doctor_facts.py`.
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
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..backends import BACKENDS
from ..backends.inductor import OLDEST_TORCH, find_cpp_compiler
from ..backends.oneflow import onediff_text
from ..common.torch_compat import missing
from ..common.words import Words, in_language, join, say
from ..storage.store import GIGABYTE, FolderStore, StoreError, open_store
from ..storage.trust import KEY_BYTES, Trust

PATIENCE = 10.0
"""Seconds that another program may take to answer."""
C_COMPILERS = ("gcc", "clang")
"""Triton looks for these if the environment variable CC names none."""


@dataclass(frozen=True)
class Fact:
    """The result of one check."""

    name: str
    text: str
    """What the check found, without a full stop."""
    ok: bool = True
    remedy: str = ""
    """What to do, in sentences. Empty if nothing is wrong."""
    present: bool = True
    """Whether what the fact names is there. If it is not there and nobody needs it, the fact is ok as well."""


@dataclass(frozen=True)
class Surroundings:
    """The facts that only a host knows."""

    device: torch.device
    """The device that models run on."""
    store: str
    """Folder or URL of the compiled graphs."""
    host: str = ""
    """The host's version and place in words. Empty if there is no host."""
    host_known: bool = True
    """Whether the host's code was found, and not its folders alone."""
    extensions: tuple[Path, ...] = ()
    """Folders of all extensions that are installed beside this package."""


def examine(around: Surroundings) -> list[Fact]:
    """Return every fact. Each one comes after those that it depends on.

    A check that raises becomes a fact as well, so that one broken part does not hide the others.
    """
    facts = [_run_check(name, check, around) for name, check in _CHECKS.items()]
    return facts + [_run_check(name, _backend, around, name) for name in BACKENDS] + _other_compilers(around)


def in_words(fact: Fact, language: str) -> Fact:
    """Return a fact as people read it in a language."""
    name, text, remedy = (in_language(part, language) for part in (_NAMES.get(fact.name), fact.text, fact.remedy))
    return replace(fact, name=name or fact.name, text=text, remedy=remedy)


def usual_device() -> torch.device:
    """Return the device that models run on unless somebody decides otherwise."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def _run_check(name: str, check: Callable[..., Fact], *arguments: object) -> Fact:
    try:
        return check(*arguments)
    except Exception as error:  # drivers and half-installed packages fail in their own ways
        text = str(error).strip().splitlines()
        cause = f"{type(error).__name__}{': ' + text[0] if text else ''}"
        found = say("could not be examined ({error})", error=cause)
        return Fact(name, found, False, say("Install it again, or report this line."))


def _torch(around: Surroundings) -> Fact:
    if torch.version.hip or torch.version.cuda:
        built = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    else:
        built = say("no CUDA")
    text = say("{version}, with {built}", version=torch.__version__, built=built)
    if torch.torch_version.TorchVersion(torch.__version__) < OLDEST_TORCH:
        wanted = ".".join(map(str, OLDEST_TORCH))
        return Fact("torch", text, False, say("Update torch to {wanted} or newer.", wanted=wanted))
    if reason := missing():
        return Fact("torch", text, False, reason)
    return Fact("torch", text)


def _gpu(around: Surroundings) -> Fact:
    device = around.device
    if device.type == "cuda":
        drivers = [say("driver {version}", version=version) for version in _nvidia("driver_version")[:1]]
        return Fact("GPU", join([_described(device), *drivers], ", "))
    if device.type != "cpu":
        remedy = say("Models run on it as they do without these nodes. Graphs need an NVIDIA or AMD GPU, or a CPU.")
        return Fact("GPU", say("{device}, for which there are no graphs", device=device.type), False, remedy)
    names = _nvidia("name")
    if not names:
        return Fact("GPU", say("none; models are compiled for the CPU"), present=False)
    if torch.cuda.is_available():
        return Fact("GPU", say("{gpu}, not used: models run on the CPU", gpu=names[0]), present=False)
    remedy = say(
        "Update NVIDIA's driver." if torch.version.cuda else "Install a build of torch with CUDA (pytorch.org)."
    )
    return Fact("GPU", say("{gpu}, which torch cannot use", gpu=names[0]), False, remedy)


def _described(device: torch.device) -> Words:
    properties = torch.cuda.get_device_properties(device)
    capability = say("compute capability {number}", number=f"{properties.major}.{properties.minor}")
    return join([properties.name, f"{properties.total_memory / 2**30:.0f} GiB", capability], ", ")


def _nvidia(field: str) -> list[str]:
    """Return what NVIDIA's driver says about each GPU. The list is empty if the driver does not answer."""
    try:
        command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def _triton(around: Surroundings) -> Fact:
    if around.device.type != "cuda":
        return Fact("Triton", say("not needed without a GPU"), present=False)
    try:
        import triton
    except ModuleNotFoundError:
        package = "triton-windows" if os.name == "nt" else "triton"
        remedy = say("Install it into this Python: pip install {package}.", package=package)
        return Fact("Triton", say("not installed"), False, remedy)
    return Fact("Triton", triton.__version__)


def _triton_compiles() -> bool:
    """Whether Triton runs this machine's C compiler to build kernel launchers. On Windows Triton brings its own."""
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
        return Fact("compiler", say("not needed"), present=False)
    named = os.environ.get("CC")
    found = shutil.which(named) if named else next(filter(None, map(shutil.which, C_COMPILERS)), None)
    if found is None:
        text = say("CC is {named}, which is not there" if named else "no C compiler was found", named=named)
        return Fact("compiler", text, False, say("Triton needs one: install gcc or clang, or set CC to one."))
    return Fact("compiler", found)


def _cpp_compiler() -> Fact:
    found = find_cpp_compiler()
    if found is None:
        which = "Visual Studio Build Tools" if os.name == "nt" else say("g++ or clang")
        remedy = say("Install {which}, or set CXX to one.", which=which)
        return Fact("compiler", say("no C++ compiler was found"), False, remedy)
    if not found:
        return Fact("compiler", say("not looked for: this torch does not say which it takes"), present=False)
    return Fact("compiler", shutil.which(found) or found)


def _headers(around: Surroundings) -> Fact:
    needed = around.device.type == "cpu" or (around.device.type == "cuda" and _triton_compiles())
    path = Path(sysconfig.get_paths()["include"], "Python.h")
    if path.is_file():
        return Fact("Python headers", str(path))
    if not needed:
        return Fact("Python headers", say("not needed"), present=False)
    remedy = say("Install the python3-dev package of this Python.")
    if os.name == "nt":  # the Python of ComfyUI's portable build has none
        remedy = say("Copy the folders Include and libs from an installed Python of the same version.")
    return Fact("Python headers", say("{path} is not there", path=path), False, remedy)


def _backend(around: Surroundings, name: str) -> Fact:
    """Return the fact about a backend. Only Inductor is needed: a backend that nobody chose may be missing."""
    backend = BACKENDS[name]
    reason = backend.available(around.device)
    if reason is None:
        notes = onediff_text() if name == "oneflow" else ""
        usable = say("can be used on {device}", device=around.device.type)
        return Fact(name, _without_stop(join([usable, notes], " ")))
    if name == "inductor":
        return Fact(name, say("cannot be used on {device}", device=around.device.type), False, reason)
    return Fact(name, _without_stop(reason), present=False)


def _without_stop(sentence: str) -> Words:
    return Words(sentence.rstrip("."), lambda language: in_language(sentence, language).rstrip(".。"))


def _host(around: Surroundings) -> Fact:
    return Fact("ComfyUI", around.host or say("none found from here"), present=bool(around.host) and around.host_known)


def _store(around: Surroundings) -> Fact:
    choose = say("Make room or change its permissions, or set COMPILED_GRAPHS_STORE to another folder.")
    try:
        store = open_store(around.store)
    except StoreError as error:
        return Fact("store", say("cannot be used"), False, str(error))
    if isinstance(store, FolderStore) and (problem := _unwritable(store.folder)):
        text = say("{place} cannot be written ({problem})", place=store.place, problem=problem)
        return Fact("store", text, False, choose)
    try:
        entries = store.entries()
    except OSError as error:
        text = say("{place} cannot be read ({problem})", place=store.place, problem=error.strerror or error)
        return Fact("store", text, False, choose)
    text = say(
        "{place}, {count} graphs, {size:.2f} of {limit:g} GB",
        place=store.place,
        count=len(entries),
        size=sum(entry.size for entry in entries) / GIGABYTE,
        limit=store.limit / GIGABYTE,
    )
    return Fact("store", text)


def _key(around: Surroundings) -> Fact:
    trust = Trust()
    path = trust.folder / "key"
    elsewhere = say("Set COMPILED_GRAPHS_TRUST to a folder that only you can read.")
    try:
        status = path.stat()
        size = len(path.read_bytes())
    except FileNotFoundError:
        if problem := _unwritable(trust.folder):
            text = say("{place} cannot be made ({problem})", place=path, problem=problem)
            return Fact("key file", text, False, elsewhere)
        return Fact("key file", say("{path} is made with the first graph", path=path), present=False)
    except OSError as error:
        text = say("{place} cannot be read ({problem})", place=path, problem=error.strerror or error)
        return Fact("key file", text, False, elsewhere)
    if size != KEY_BYTES:
        return Fact("key file", say("{path} is not a key", path=path), False, say("Remove it, and a new one is made."))
    if os.name != "nt" and stat.S_IMODE(status.st_mode) & 0o077:
        text = say("{path} is open to other users (mode {mode:04o})", path=path, mode=stat.S_IMODE(status.st_mode))
        remedy = say(
            "chmod 600 {path}, or remove it if somebody may have copied it: a new one is made.",
            path=shlex.quote(str(path)),
        )
        return Fact("key file", text, False, remedy)
    return Fact("key file", say("{path}, {count} trusted files", path=path, count=len(trust.trusted_digests())))


def _unwritable(folder: Path) -> str | None:
    """Return why nothing can be written to a folder, or None. The folder need not exist. Leaves nothing behind."""
    existing = next((place for place in (folder, *folder.parents) if place.exists()), folder)
    try:
        with tempfile.TemporaryFile(dir=existing):
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

_NAMES = {
    "compiler": say("compiler"),
    "Python headers": say("Python headers"),
    "store": say("store"),
    "key file": say("key file"),
    "other compilers": say("other compilers"),
}
"""What the facts are about, where that is no name that is the same in every language."""
_LATER_DECIDES = say("in each branch, the later one of its torch.compile nodes and Compile Model decides")
_ONE_OF_TWO = say("it keeps the models that it compiled; use either it or Compile Model in a branch")
_COMPILING_EXTENSIONS = {
    "kjnodes": ("KJNodes", _LATER_DECIDES),
    "wavespeed": ("WaveSpeed", say("{text}; its first block cache works with both", text=_LATER_DECIDES)),
    "teacache": ("TeaCache", _LATER_DECIDES),
    "torchcompile": ("torch.compile", _LATER_DECIDES),
    "onediff": ("OneDiff", say("nodes with its ids come from it, not from this package")),
    "tensorrt": ("TensorRT", _ONE_OF_TWO),
    "stablefast": ("stable-fast", _ONE_OF_TWO),
}
"""For part of a folder's name, in lower case and without separators: the extension's name, and how it works with us."""


def _other_compilers(around: Surroundings) -> list[Fact]:
    """Return a fact for each other extension here that compiles models. Their folders' names identify them."""
    folders = [path for path in around.extensions if path.suffix.lower() != ".disabled"]
    facts = []
    for part, (title, text) in _COMPILING_EXTENSIONS.items():
        named = [path for path in folders if part in re.sub("[^a-z0-9]", "", path.name.lower())]
        facts += [Fact(title, say("{name}: {text}", name=path.name, text=text)) for path in named]
    if facts or not folders:
        return facts
    return [Fact("other compilers", say("none known among {count} extensions", count=len(folders)))]
