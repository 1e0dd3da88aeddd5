#!/usr/bin/env bash
# The first minutes on a new card, and the hour after them. Nothing has run on a GPU yet.
#
#     pip install -e ".[test,tile]"
#     bash runs/first_gpu.sh first-gpu
#
# The most telling commands come first: values compared with a CPU's, steps of `1b` and their rates; then tests and more
# measurements. You can stop the script at any time: it writes summary.txt after each command, and each command has a
# time limit and a log in the directory. A failed command does not stop the others, unless no process can use the GPU
# any more. A second run skips commands that passed: to repeat one, delete first-gpu/NAME.passed; for another card or
# other versions, name a new directory. We guess an hour on an H200 for everything; the limits add up to four. The
# script needs Linux and 25 GB of disk for checkpoints, which it deletes after use.
set -uo pipefail
dir=$(realpath -m "${1:?name a directory for the results}")
if [ -e "$dir" ] && ! [ -e "$dir/values.log" ]; then  # its files of the same names would be deleted
    echo "first_gpu.sh: $dir was not made by this script: name a new directory" >&2
    exit 2
fi
cd "$(dirname "$0")/.."
export PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1  # logs are complete, with the stacks at a time limit
ulimit -c 0  # a core dump may be as large as the memory

probe='
import torch
from importlib.util import find_spec
packages = "pytest hypothesis loguru torchao bitsandbytes triton tile_kernels safetensors tokenizers".split()
missing = [name for name in packages if not find_spec(name)]
if missing:
    print("not installed, so commands that need them fail or are skipped:", *missing)
for i in range(max(1, torch.cuda.device_count())):
    assert torch.ones(8, device=f"cuda:{i}").sum() == 8
print(torch.cuda.get_device_capability() >= (8, 9))
'
usable() {  # sets has_fp8: True, False or an error
    answer=$(timeout 120 python -c "$probe" 2>&1)
    local status=$?
    has_fp8=${answer##*$'\n'}
    return $status
}

if ! usable; then
    echo "first_gpu.sh: PyTorch cannot use a GPU here (check nvidia-smi): $has_fp8" >&2
    exit 2
fi
grep "^not installed" <<< "$answer"
mkdir -p "$dir"
table=""
failed=""
stopped=""

run() {  # NAME SECONDS COMMAND...
    local name=$1 limit=$2 result=passed
    local log=$dir/$name.log
    shift 2
    if [ -n "$stopped" ]; then
        [ -f "$dir/$name.passed" ] || result="not run"
    elif ! [ -f "$dir/$name.passed" ]; then
        echo "$name: at most $((limit / 60)) minutes, log in $log"
        echo "$ $*" > "$log"
        rm -rf "${dir:?}/$name"
        # In the background, because bash handles signals at once only in `wait`. SIGABRT prints the stacks.
        timeout --signal ABRT --kill-after 30 "$limit" "$@" >> "$log" 2>&1 &
        trap "kill $!; wait $!; exit 130" INT TERM HUP
        if wait $!; then
            touch "$dir/$name.passed"
        else
            result="FAILED ($?)"
            failed=yes
            usable || stopped=yes
        fi
        echo "    $result"
        [ ! -d "$dir/$name" ] || find "$dir/$name" \( -name "*.pt*" -o -name "*.safetensors" \) -delete
    fi
    table+=$(printf '%-20s %-13s %.88s' "$name" "$result" "$(grep -a . "$log" 2> /dev/null | tail -n 1)")$'\n'
    printf 'commit %s, %s\n\n%s' "$(git describe --always --dirty=+)" "$(date)" "$table" > "$dir/summary.txt"
}

# ----------------------------------------------------------------------------------------------------------------------
# Values: a step of a small `1b`, compared with a CPU's. Then steps of `1b` at full size: eager, compiled with a trace,
# and in FP8. The losses should be within 3% of the eager run's.

tests="python -m pytest -q -m gpu -rs"
steps="python train.py --device cuda --model 1b --seq_len 256 --micro_batch 64 --mock_data --max_skipped 1 --eval_every 2"
run values 300 $tests tests/model/test_compile.py -k a_step_on_a_gpu
run eager 300 $steps --compile off --sample_every 3 --max_steps 3 --ckpt_dir "$dir/eager"
run compiled 600 $steps --compile on --profile --max_steps 6 --ckpt_dir "$dir/compiled"
if [ "$has_fp8" = True ]; then
    run fp8 600 $steps --compile on --precision fp8 --max_steps 3 --ckpt_dir "$dir/fp8"
fi

# ----------------------------------------------------------------------------------------------------------------------
# Rates: a step at 448 x 256 bytes, compiled and eager, with each backend of the experts; versions and peak rates

precisions=bf16
if [ "$has_fp8" = True ]; then
    precisions="bf16 fp8"
fi
for precision in $precisions; do
    run "step_$precision" 600 python bench.py --only step --compile on --precision "$precision"
done
run step_eager 300 python bench.py --only step --compile off
run machine 300 python bench.py --only machine
# Status 2: a line says why this card or installation lacks the backend
run backends 600 bash -c '
    for backend in loop grouped triton tile; do
        python bench.py --only step --compile off --moe_backend $backend || [ $? = 2 ] || exit 1
    done'

# ----------------------------------------------------------------------------------------------------------------------
# Kernels: the tests that need a GPU, one process per file; if the CUDA toolkit is installed, a check of every memory
# access of our kernels

for file in test_tile_moe model/test_grouped_triton test_tile_kernels model/test_compile; do
    run "${file#*/}" 900 $tests "tests/$file.py"
done
if sanitizer=$(PATH=$PATH:/usr/local/cuda/bin type -P compute-sanitizer); then
    # Without torch's memory cache, in which an access beyond a tensor hits its neighbor
    run memcheck 900 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
        "$sanitizer" --tool=memcheck --report-api-errors=no --error-exitcode=9 $tests tests/model/test_grouped_triton.py
fi

# ----------------------------------------------------------------------------------------------------------------------
# Longer commands: the uses of a checkpoint; steps at the default batch, and with documents of 50 bytes; losses compared
# with a CPU's, commands, resumed runs

run checkpoint 900 bash -ec '
    $1 --compile off --max_steps 2 --ckpt_dir "$0"
    python sample.py "$0" --prompt "def " --bytes 100
    python sample.py "$0" --eval LICENSE
    python sample.py "$0" --export "$0/exported"
    python sample.py "$0/exported" --prompt "def " --bytes 100
    ' "$dir/checkpoint" "$steps"
batch="--seq_len 2048 --global_batch 131072"
for precision in $precisions; do
    run "step_2048_$precision" 900 python bench.py --only step --compile on --precision "$precision" $batch
done
run short_documents 300 bash -ec '
    mkdir "$0"
    grep -hE "^[^\"\\]{30,70}$" ./*.py spider/*.py spider/*/*.py tests/*.py | sed "s/.*/{\"text\": \"&\"}/" > "$0/lines.jsonl"
    python data.py prepare "$0/lines.jsonl" --out "$0/data"
    python bench.py --only step --compile off --data_dir "$0/data" $1
    ' "$dir/short_documents" "$batch"
for file in test_train test_command_line training/test_resumption; do
    run "${file#*/}" 900 $tests "tests/$file.py"
done

# ----------------------------------------------------------------------------------------------------------------------

echo
cat "$dir/summary.txt"
echo "Send the directory: tar czf first-gpu.tgz -C '$dir' ."
[ -z "$failed" ]
