#!/usr/bin/env bash
# From an empty machine to a compiled image: see "Try it" in README.md.
#   bash scripts/quickstart.sh [--json FILE] [--keep]
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

make_venv
install_torch
comfyui=$(find_comfyui clone)
install_comfyui "$comfyui"
exec "$CG_HOME/venv/$BIN/python" "$ROOT/scripts/quickstart.py" --home "$CG_HOME" --comfyui "$comfyui" "$@"
