#!/usr/bin/env bash
# Make a Python that has OneFlow 0.9.0, the newest on the package index, and print its path.
#   COMPILED_GRAPHS_ONEFLOW_PYTHON=$(bash scripts/oneflow.sh) python main.py
# It needs a Python 3.10, 3.9 or 3.8 to start from (PYTHON names one) and 5 GB; a second run finds it there.
# Of CUDA 11 it gets the two libraries that OneFlow cannot be imported without.
set -euo pipefail
HOME_OF_IT=${COMPILED_GRAPHS_ONEFLOW_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/compiled_graphs/oneflow-0.9.0}

works() { "$1" -c 'import oneflow' >/dev/null 2>&1; }
serves() { "$1" -c 'import sys; sys.exit(not (3, 8) <= sys.version_info[:2] <= (3, 10))' >/dev/null 2>&1; }

find_python() {
    local python
    for python in ${PYTHON:-} python3.10 python3.9 python3.8 python3 "$HOME"/.pyenv/versions/3.10.*/bin/python; do
        if serves "$python"; then
            printf '%s\n' "$python"
            return
        fi
    done
    echo "error: no Python 3.10, 3.9 or 3.8 is here, and OneFlow has packages for no newer one: install one, or set PYTHON to it" >&2
    return 1
}

python=$HOME_OF_IT/bin/python
if ! works "$python"; then
    [ "$(uname -s)" = Linux ] || { echo "error: OneFlow has packages for Linux only" >&2; exit 1; }
    base=$(find_python)
    echo "== installing OneFlow 0.9.0 into $HOME_OF_IT" >&2
    mkdir -p "$HOME_OF_IT"
    "$base" -m venv "$HOME_OF_IT"
    "$python" -m pip install -qq --disable-pip-version-check oneflow==0.9.0 'numpy<2' 'protobuf<3.21' \
        nvidia-cudnn-cu11==8.5.0.96 nvidia-cublas-cu11==11.10.3.66 >&2
    works "$python" || { echo "error: OneFlow cannot be imported by $python" >&2; exit 1; }
fi
printf '%s\n' "$python"
