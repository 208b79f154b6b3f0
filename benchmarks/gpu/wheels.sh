#!/usr/bin/env bash
# Downloads what a GPU machine without internet lacks: wheels.sh [FOLDER] [PYTHON-VERSION].
# Pure wheels, and those of x86-64 Linux, at the versions in constraints.txt; torch, triton and
# transformers are that machine's own. About 10 MB; run.sh --wheels FOLDER installs them.
set -euo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
folder=${1:-$root/build/gpu-wheels}
version=${2:-3.12}
python=${PYTHON:-$root/.venv/bin/python}

pinned() { grep "^$1==" "$root/constraints.txt"; }

fetch() {
  "$python" -m pip --disable-pip-version-check --quiet download --dest "$folder" \
    --only-binary=:all: --python-version "$version" --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
    --platform manylinux2014_x86_64 "$@"
}

rm -rf "$folder"
mkdir -p "$folder"
# With what it needs: its core must be of one exact version.
fetch "$(pinned pydantic)"
# Without: torch and transformers would come along.
fetch --no-deps "$(pinned peft)" "$(pinned blake3)" "$(pinned typer)" "$(pinned setuptools)" \
  "$(pinned rich)" "$(pinned platformdirs)" "$(pinned jinja2)" annotated-doc shellingham
ls "$folder"
