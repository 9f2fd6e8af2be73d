#!/bin/sh
# The tests on the GPUs of this machine, with their output kept in docs/results/gpu-tests-<date>.txt.
#
#   scripts/test-gpu.sh            all of them
#   scripts/test-gpu.sh core       what is run again on the last commit: the operations, in ten minutes at most
#   scripts/test-gpu.sh parked     the proofs of the parked way: what people run, moved while it computes; then 200 moves
#   scripts/test-gpu.sh nccl       jobs of several ranks: swapped while they compute, ended and brought back; then 100 swaps
#   scripts/test-gpu.sh containers jobs in containers with one GPU's nodes: moved in place, to disk, cloned (six minutes)
#   scripts/test-gpu.sh driver     the driver's calls, maps
#   scripts/test-gpu.sh conformance   what the driver answers, call by call (the tests that software GPUs pass, too)
#   scripts/test-gpu.sh faults     330 faulted runs of the campaign, those that are safe here (JOBS=… side by side)
#   scripts/test-gpu.sh large      two jobs that fill their GPUs (minutes)
#   scripts/test-gpu.sh -- ARGS    pytest with these arguments
#
# LIMOSA_ONE_GPU=1: what one GPU is enough for; where the others move a job there and back, it is suspended and resumed.
# LIMOSA_PROOF_TURNS=6: how often a training is moved in "parked", instead of twenty times, and in "nccl", instead of ten.
# LIMOSA_LLM_GB=30, LIMOSA_RUNC=path: of "containers" the server's size, and the runc if it is not that of scripts/gpu-carry.
# LIMOSA_PROOF_PAIR=1: "nccl" and "containers" are on GPUs 2 and 3, whoever runs it.
# KEYS='swapped and ddp': which of these proofs (pytest's -k); PROOFS=work without, PROOFS=loop only the long loop.
# PY=python (default: .venv's, else python3), COMMIT=… where there is no git, OUT=folder, LIMIT=seconds for each part,
# PYTHONPATH=folders of packages (those that others can write to, and relative ones, do not count),
# JOBS=how many tests side by side (those that fill GPUs or measure always run alone).
set -u
cd "$(dirname "$0")/.." || exit 2
if [ -z "${PY:-}" ]; then
    if [ -x .venv/bin/python ]; then PY=.venv/bin/python; else PY=python3; fi
fi
more=$(scripts/own-folders "${PYTHONPATH:-}") # packages that lie in no Python's own folders
PYTHONPATH=$PWD/src${more:+:$more}
unset PYTHONHOME PYTHONSTARTUP PYTHONINSPECT PYTHONUSERBASE
PYTHONUNBUFFERED=1
# NVLink multicast stays off: nothing here needs it.
NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
export PYTHONPATH PYTHONUNBUFFERED NCCL_NVLS_ENABLE TORCH_SYMM_MEM_DISABLE_MULTICAST

what=${1:-all}
[ $# -gt 0 ] && shift
[ "${1:-}" = -- ] && shift
out=${OUT:-docs/results}
mkdir -p "$out"
log=$out/gpu-tests-$(date -u +%Y-%m-%d).txt
commit=${COMMIT:-$(git describe --always --dirty 2>/dev/null || echo unknown)}
limit=${LIMIT:-570}
side=
if "$PY" -c 'import xdist' 2>/dev/null; then side="-n ${JOBS:-4}"; fi
failed=0

head_lines() {
    echo "=== $what, $(date -u +%Y-%m-%dT%H:%M:%SZ), commit $commit"
    echo "$(uname -sr), $("$PY" -c 'import platform; print("Python", platform.python_version())'), $(nproc) cores"
    nvidia-smi --query-gpu=index,name,driver_version,memory.total --format=csv,noheader 2>&1
    "$PY" -c 'import importlib.metadata as m
print(", ".join(f"{p} {m.version(p)}" for p in ("torch", "jax", "cuda-bindings", "cuda-core", "nvidia-ml-py")
      if any(d.metadata["Name"] == p for d in m.distributions())))' 2>&1
    "$PY" -c 'from limosa.process.criu.find import find; print("CRIU", find().version)' 2>&1 | tail -1
    nvidia-smi topo -m 2>/dev/null | sed -n 2,3p
}

# One part: what is printed is kept as it comes; a part that hangs is ended, the next one runs all the same.
part() {
    echo "--- pytest $*"
    timeout -k 40 "$limit" "$PY" -m pytest -v --tb=short --durations=15 "$@"
    code=$?
    case $code in
        0) ;;
        5) echo "(no tests here)" ;;
        124 | 137) echo "NOT FINISHED within $limit s"; failed=1 ;;
        *) failed=1 ;;
    esac
}

# Some minutes for a thousand small tests (the driver makes contexts one after the other); every answer is written down (tests/conformance/record.py shows it).
conformance() {
    record=${RECORD:-$(mktemp -d)}
    many=
    [ -n "$side" ] && many="-n ${JOBS:-6} --dist loadgroup"
    LIMOSA_CONFORMANCE=real LIMOSA_CONFORMANCE_RECORD=$record
    export LIMOSA_CONFORMANCE LIMOSA_CONFORMANCE_RECORD
    # shellcheck disable=SC2086 # no option or several words
    part $many tests/conformance
    unset LIMOSA_CONFORMANCE LIMOSA_CONFORMANCE_RECORD
    echo "every call of it: $record"
}

# Programs without a framework find PyTorch's libnccl.
find_nccl() {
    nccl=$("$PY" -c 'import nvidia.nccl; print(list(nvidia.nccl.__path__)[0] + "/lib")')
    export LD_LIBRARY_PATH="$nccl${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
}

# What was found beside the summary: FAULTS=… names the file. WAY=ranks: jobs of two ranks, one room at a time.
faults() {
    echo "--- fault campaign"
    rooms=${JOBS:-8}
    if [ "${WAY:-driver}" = ranks ]; then
        rooms=1 # ranks of several jobs on the same GPUs end each other
        find_nccl
    fi
    LIMOSA_CAMPAIGN=real PYTHONPATH=$PWD/tests:$PYTHONPATH timeout -k 15 "$limit" "$PY" -m campaign --way "${WAY:-driver}" \
        --rooms "$rooms" --count "${RUNS:-330}" --seed "${SEED:-1}" --limit "$((limit - 90))" --only "${KEYS:-}" \
        ${FAULTS:+--summary "$FAULTS"}
    code=$?
    [ "$code" = 0 ] || failed=1
    [ "$code" = 124 ] && echo "NOT FINISHED within $limit s"
}

# JOBS=8 side by side: what is compared are bits, not times. The table of it is made from $LIMOSA_PROOFS.
parked() {
    LIMOSA_PROOFS=${LIMOSA_PROOFS:-$out/proofs-$(date -u +%Y-%m-%d).jsonl}
    TORCHINDUCTOR_COMPILE_THREADS=4
    export LIMOSA_PROOFS TORCHINDUCTOR_COMPILE_THREADS
    many=
    [ -n "$side" ] && many="-n ${JOBS:-8}"
    if [ "${PROOFS:-all}" = beside ]; then # all at once, the loop among them: what others hold on the GPUs is not counted
        export LIMOSA_LOOP_BESIDE=1
        # shellcheck disable=SC2086
        part $many -m gpu_parked ${KEYS:+-k "$KEYS"} tests/gpu
    elif [ "${PROOFS:-all}" != loop ]; then
        # shellcheck disable=SC2086 # no option or several words
        part $many -m "gpu_parked and not gpu_alone" ${KEYS:+-k "$KEYS"} tests/gpu
    fi
    [ "${PROOFS:-all}" = work ] || [ "${PROOFS:-all}" = beside ] || part -m "gpu_parked and gpu_alone" tests/gpu
    [ -s "$LIMOSA_PROOFS" ] && "$PY" tests/gpu/proofs.py "$LIMOSA_PROOFS" | tee "${LIMOSA_PROOFS%.jsonl}.md"
}

# JOBS=… side by side, spread over pairs of GPUs. On each pair one job at a time is moved; its twins follow when it has ended.
nccl() {
    LIMOSA_PROOFS=${LIMOSA_PROOFS:-$out/proofs-nccl-$(date -u +%Y-%m-%d).jsonl}
    TORCHINDUCTOR_COMPILE_THREADS=4
    export LIMOSA_PROOFS TORCHINDUCTOR_COMPILE_THREADS
    many=
    [ -n "$side" ] && many="-n ${JOBS:-1}"
    if [ "${PROOFS:-all}" != loop ]; then
        # shellcheck disable=SC2086 # no option or several words
        part $many -m "gpu_nccl and not gpu_alone" ${KEYS:+-k "$KEYS"} tests/gpu
    fi
    [ "${PROOFS:-all}" = work ] || part -m "gpu_nccl and gpu_alone" tests/gpu
    [ -s "$LIMOSA_PROOFS" ] && "$PY" tests/gpu/proofs.py "$LIMOSA_PROOFS" | tee "${LIMOSA_PROOFS%.jsonl}.md"
}

# One after the other, those first that are up in a second: they show whether containers work here at all.
containers() {
    LIMOSA_PROOFS=${LIMOSA_PROOFS:-$out/proofs-containers-$(date -u +%Y-%m-%d).jsonl}
    export LIMOSA_PROOFS
    # Meanwhile what later ones load comes into the page cache.
    timeout 120 "$PY" -c 'import torch; from transformers import LlamaForCausalLM' >/dev/null 2>&1 &
    if "$PY" -I native_build.py >/dev/null; then
        if [ -n "${KEYS:-}" ]; then
            limit=${LIMIT:-300}
            case $KEYS in *plain*) find_nccl ;; esac
            part -s -m gpu_containers -k "$KEYS" tests/gpu/test_containers_*.py
        else
            limit=${LIMIT:-90}
            (find_nccl && part -s -m gpu_containers -k plain tests/gpu/test_containers_*.py; exit "$failed") || failed=1
            limit=${LIMIT:-300}
            part -s -m gpu_containers -k "not plain" tests/gpu/test_containers_*.py
        fi
    else
        echo "what is in C cannot be compiled here"
        failed=1
    fi
    [ -s "$LIMOSA_PROOFS" ] && "$PY" tests/gpu/proofs.py "$LIMOSA_PROOFS" | tee "${LIMOSA_PROOFS%.jsonl}.md"
}

run() {
    head_lines
    case $what in
        driver) part -m gpu tests/gpu/test_process.py tests/gpu/test_maps.py ;;
        core)
            limit=${LIMIT:-290} # two parts in ten minutes
            # shellcheck disable=SC2086 # no option or two words
            part $side -m "gpu_core and not gpu_alone" tests/gpu
            part -m "gpu_core and gpu_alone" tests/gpu
            ;;
        parked) parked ;;
        nccl) nccl ;;
        containers) containers ;;
        conformance) conformance ;;
        faults) faults ;;
        large) part -m "gpu and slow" tests/gpu ;;
        all)
            conformance
            part -m "gpu and not gpu_core and not gpu_parked and not gpu_nccl and not gpu_containers and not slow" tests/gpu
            # shellcheck disable=SC2086
            part $side -m "gpu_core and not gpu_alone" tests/gpu
            part -m "gpu_core and gpu_alone" tests/gpu
            part -m "gpu and slow" tests/gpu
            parked
            unset LIMOSA_PROOFS
            [ -n "${LIMOSA_ONE_GPU:-}" ] || nccl
            unset LIMOSA_PROOFS
            [ -n "${LIMOSA_ONE_GPU:-}" ] || containers
            faults
            ;;
        --) part "$@" ;;
        *) echo "test-gpu.sh: no part called $what" >&2; failed=2 ;;
    esac
    echo "=== $(date -u +%H:%M:%SZ): exit code $failed"
    return $failed
}

# The exit code travels past tee in a file: POSIX sh has no pipefail.
status=$(mktemp)
{ run "$@" 2>&1; echo $? >"$status"; } | tee -a "$log"
code=$(cat "$status")
rm -f "$status"
echo "written: $log"
exit "${code:-1}"
