#!/usr/bin/env bash
# All that is known about a GPU, in under eight minutes: run.sh [--dry] [--wheels FOLDER] [--out FOLDER]
#
# Every part is a process with a time of its own; one that fails or takes too long hides no other.
# Results are JSON files in the out folder (build/gpu), their logs beside them, and summary.json,
# which is also printed.  Exit code 1 where a part failed.
#
#   --wheels FOLDER  make an environment in the out folder from what wheels.sh downloaded and this
#                    machine's own torch; without it PYTHON must be able to import branchline
#   --dry            on the CPU, at toy sizes, to see that the script itself works
#   PYTHON           the interpreter that has torch (.venv's, where there is one, else python3)
set -uo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
cd "$root" || exit 1
out=build/gpu wheels='' dry=''
while [ $# -gt 0 ]; do
  case $1 in
    --dry) dry=1; shift ;;
    --wheels) wheels=${2:?--wheels needs a folder}; shift 2 ;;
    --out) out=${2:?--out needs a folder}; shift 2 ;;
    *) echo "error: unknown option $1; see the head of $0" >&2; exit 2 ;;
  esac
done
python=${PYTHON:-}
[ -n "$python" ] || { [ -x .venv/bin/python ] && python=$PWD/.venv/bin/python || python=python3; }
mkdir -p "$out" || exit 1
out=$(cd "$out" && pwd)
rm -f "$out"/*.json "$out"/*.log "$out/parts.tsv"

# Its packages come by a .pth file: torch may lie in an environment itself, which
# --system-site-packages does not reach.
environment() {
  local venv=$1
  rm -rf "$venv" && "$python" -m venv --system-site-packages "$venv" || return 1
  "$python" -c 'import site; print(*site.getsitepackages(), sep="\n")' > \
    "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/host.pth" \
    || return 1
  "$venv/bin/python" -m pip --disable-pip-version-check --quiet install --no-index --no-deps \
    --ignore-installed "$wheels"/*.whl || return 1
  "$venv/bin/python" -m pip --disable-pip-version-check --quiet install --no-index --no-deps \
    --no-build-isolation --editable . || return 1
}

part() { # NAME SECONDS COMMAND...
  local name=$1 budget=$2 began=$SECONDS code
  shift 2
  echo "== $name (at most $budget s)"
  # The second signal comes where a compiler does not react to the first, which asks for results.
  timeout --kill-after=8 "$budget" "$@" > "$out/$name.log" 2>&1
  code=$?
  tail -n 4 "$out/$name.log"
  printf '%s\t%s\t%s\t%s\n' "$name" "$code" "$((SECONDS - began))" "$budget" >> "$out/parts.tsv"
}

if [ -n "$wheels" ]; then
  environment "$out/venv" > "$out/environment.log" 2>&1 || {
    tail -n 20 "$out/environment.log" >&2
    echo "error: no environment from $wheels; see $out/environment.log" >&2
    exit 1
  }
  python=$out/venv/bin/python
fi

gpu=("$python" -W ignore -m benchmarks.gpu)
if [ -n "$dry" ]; then
  device=cpu
  gpu+=(--device cpu --rounds 1 --hidden 64 --depth 1)
  compile=() sizes=(--rows 4 --columns 256) adapters=(--adapters 0 1 8 --prompts 1 4)
  # Threads that wait for one another spin, on a machine that has other work.
  export OMP_NUM_THREADS=1
  linears=(--tokens 1 17 --weights 64x128) layers=(--tokens 2 --layers 3x2x32x64)
else
  device=cuda
  compile=(--compile) sizes=(--rows 4096 64) adapters=() linears=() layers=()
fi

# 440 s in all. `verify` is the command a user has; its JSON is the report alone.
part verify 80 bash -c '"$1" -m branchline verify --device "$2" --quick --json > "$3"' \
  _ "$python" "$device" "$out/verify.json"
part producers 125 "${gpu[@]}" --only producers --no-verify ${compile[@]+"${compile[@]}"} \
  "${sizes[@]}" --out "$out/producers.json"
part graphs 45 "${gpu[@]}" --only graphs --out "$out/graphs.json"
part routes 75 "${gpu[@]}" --only routes ${adapters[@]+"${adapters[@]}"} --out "$out/routes.json"
part matmul 60 "${gpu[@]}" --only matmul ${linears[@]+"${linears[@]}"} --out "$out/matmul.json"
part experts 55 "${gpu[@]}" --only experts ${layers[@]+"${layers[@]}"} --out "$out/experts.json"

"$python" -W ignore -m benchmarks.gpu.summary "$out"
