#!/usr/bin/env bash
# Install what the tests need and run them all; arguments go to pytest.
# COMFYUI_PATH names the ComfyUI to test in; without it, the build on the package index is.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

make_venv
install_torch
comfyui=$(find_comfyui)
install_comfyui "$comfyui"
pip -e "$ROOT[test]" --no-build-isolation
export COMFYUI_PATH=$comfyui COMPILED_GRAPHS_HOME=$CG_HOME
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}  # the models are tiny: to share their work out takes longer than to do it
# Not `python -m pytest`: that would put the current folder, with this diffusers.py, before the real diffusers.
exec "$CG_HOME/venv/$BIN/pytest" -c "$ROOT/tests/pytest.ini" "$ROOT/tests" "$@"
