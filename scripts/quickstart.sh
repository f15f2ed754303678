#!/usr/bin/env bash
# From an empty machine to a compiled image: see "Try it" in README.md.
#   bash scripts/quickstart.sh [--json FILE] [--keep]
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# What comes from the network, where it goes and how long that takes, before any of it begins.
announce() {
    local size
    say "one workflow with and without Compile Model, in a real ComfyUI server, with a tiny model"
    if [ -f "$CG_HOME/venv/comfyui.stamp" ]; then
        say "an earlier run left all that is needed in $CG_HOME: this takes a minute or two"
        return
    fi
    case $torch in
        cpu) size="500 MB" ;;
        pypi) if has_gpu; then size="3 GB"; else size="500 MB"; fi ;;
        *) size="3 GB" ;;
    esac
    say "this downloads about $size, torch and ComfyUI and what they need, into $CG_HOME"
    say "that and the run take 3 to 10 minutes on a fast line; a second run downloads nothing"
    say "an environment that is active is not used; to undo all of it, remove that folder (pip's cache has copies)"
}

choose_torch
announce
make_venv
install_torch
comfyui=$(find_comfyui clone)
install_comfyui "$comfyui"
exec "$CG_HOME/venv/$BIN/python" "$ROOT/scripts/quickstart.py" --home "$CG_HOME" --comfyui "$comfyui" "$@"
