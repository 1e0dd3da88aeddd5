#!/usr/bin/env bash
# On a new card: tests, then short runs of `1b`, then measurements. Nothing has run on a GPU yet.
#
#     pip install -e ".[test,tile]"
#     bash runs/first_gpu.sh first-gpu
#
# By a guess all takes an hour on an H200; the time limits add up to four and a half. Each command has a log in the
# directory. One that fails does not stop the others, unless no process can use the GPU any more. The same command again
# skips what has passed: delete first-gpu/NAME.passed to repeat it, and name a new directory for another card or other
# versions. It needs Linux and 25 GB of disk, for checkpoints that are deleted after use.
set -uo pipefail
dir=$(realpath -m "${1:?name a directory for the results}")
if [ -e "$dir" ] && ! [ -e "$dir/machine.log" ]; then  # what it has of our names would be deleted
    echo "first_gpu.sh: $dir is not of this script: name a new directory" >&2
    exit 2
fi
cd "$(dirname "$0")/.."
export PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1  # a log has everything, and at the time limit the stacks
ulimit -c 0  # a core dump may be as large as the memory

probe='
import torch
for i in range(max(1, torch.cuda.device_count())):
    assert torch.ones(8, device=f"cuda:{i}").sum() == 8
print(torch.cuda.get_device_capability() >= (8, 9))
'
usable() { has_fp8=$(timeout 120 python -c "$probe" 2>&1 | tail -n 1); }  # True, False or an error

if ! usable; then
    echo "first_gpu.sh: PyTorch cannot use a GPU here, look at nvidia-smi: $has_fp8" >&2
    exit 2
fi
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
        # In the background, since bash handles signals at once only in `wait`. SIGABRT prints the stacks.
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
}

# ----------------------------------------------------------------------------------------------------------------------
# Kernels: GPU, versions, torch.compile and peak rates, and the tests that need a GPU, a process for each file

run machine 300 python bench.py --only machine
for file in tile_moe grouped_triton tile_kernels compile; do
    run "test_$file" 900 python -m pytest -q -m gpu -rs "tests/test_$file.py"
done

# ----------------------------------------------------------------------------------------------------------------------
# Short runs: three steps of `1b` and the use of a checkpoint; compiled, with a trace; in FP8. The losses should be those
# of the eager run but for 3%. Then every memory access of a step, if the CUDA toolkit is installed.

steps="python train.py --device cuda --model 1b --seq_len 256 --micro_batch 64 --mock_data --max_skipped 1 --eval_every 2"
run eager 900 bash -ec '
    $1 --compile off --sample_every 3 --max_steps 3 --ckpt_dir "$0"
    python sample.py "$0" --prompt "def " --bytes 100
    python sample.py "$0" --export "$0/exported"
    python sample.py "$0/exported" --prompt "def " --bytes 100
    python sample.py "$0" --eval LICENSE
    ' "$dir/eager" "$steps"
run compiled 900 $steps --compile on --profile --max_steps 6 --ckpt_dir "$dir/compiled"
if [ "$has_fp8" = True ]; then
    run fp8 900 $steps --compile on --precision fp8 --max_steps 3 --ckpt_dir "$dir/fp8"
fi
if sanitizer=$(PATH=$PATH:/usr/local/cuda/bin type -P compute-sanitizer); then
    # Without torch's segments, in which an access beyond a tensor is one of its neighbour
    run memcheck 600 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
        "$sanitizer" --tool=memcheck --report-api-errors=no --error-exitcode=9 \
        python train.py --device cuda --model tiny --mock_data --seq_len 256 --micro_batch 4 --max_steps 1 \
        --eval_every 0 --compile off --ckpt_dir "$dir/memcheck"
fi

# ----------------------------------------------------------------------------------------------------------------------
# The other tests: losses next to those of a CPU, commands, resumed runs

for file in train command_line resumption; do
    run "test_$file" 900 python -m pytest -q -m gpu -rs "tests/test_$file.py"
done

# ----------------------------------------------------------------------------------------------------------------------
# Measurements: a compiled step at 448 x 256 bytes and at the default batch, in bf16 and FP8; an eager one, with each
# backend of the experts, and of documents of 50 bytes

batch="--seq_len 2048 --global_batch 131072"
precisions=bf16
if [ "$has_fp8" = True ]; then
    precisions="bf16 fp8"
fi
for precision in $precisions; do
    run "step_$precision" 900 python bench.py --only step --compile on --precision "$precision"
    run "step_2048_$precision" 900 python bench.py --only step --compile on --precision "$precision" $batch
done
run step_eager 300 python bench.py --only step --compile off
# Status 2: a line says why this card or installation does not have the backend
run backends 600 bash -c '
    for backend in loop grouped triton tile; do
        python bench.py --only step --compile off --moe_backend $backend || [ $? = 2 ] || exit 1
    done'
run short_documents 300 bash -ec '
    mkdir "$0"
    grep -hE "^[^\"\\]{30,70}$" ./*.py spider/*.py tests/*.py | sed "s/.*/{\"text\": \"&\"}/" > "$0/lines.jsonl"
    python data.py prepare "$0/lines.jsonl" --out "$0/data"
    python bench.py --only step --compile off --data_dir "$0/data" $1
    ' "$dir/short_documents" "$batch"

# ----------------------------------------------------------------------------------------------------------------------

printf '\ncommit %s, %s\n\n%s' "$(git describe --always --dirty=+)" "$(date)" "$table" | tee "$dir/summary.txt"
echo "Send the directory: tar czf first-gpu.tgz -C '$dir' ."
[ -z "$failed" ]
