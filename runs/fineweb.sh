#!/usr/bin/env bash
# From scratch to a billion-parameter model that continues English text: FineWeb-Edu, on the GPUs of one host.
#
#     git clone URL spider && cd spider
#     screen -L -Logfile fineweb.log -S fineweb bash runs/fineweb.sh
#
# It needs Linux, NVIDIA GPUs (Ampere or newer, at least 24 GB), Python 3.11 or later, and 60 GB of disk: 7 for the
# download, 21 for shards, 22 for checkpoints, 6 for Python. The estimated time is 13 hours on one H200, two hours on
# eight. Nothing has run on a GPU yet, so begin with an hour of tests and measurements, and send the failures:
#
#     bash runs/first_gpu.sh results
#
# After an interruption, run the script again: finished work is kept, and training resumes. Flags go to train.py:
#
#     bash runs/fineweb.sh --run fineweb-1b                    # log to wandb; first `wandb login`
#     SPIDER_DIR=/scratch/base bash runs/fineweb.sh --model base
set -euo pipefail
cd "$(dirname "$0")/.."

base=${SPIDER_DIR:-.}  # data and checkpoints go here
pages=$base/data/fineweb-pages
data=$base/data/fineweb
run=$base/checkpoints/fineweb
gpus=$(nvidia-smi --list-gpus 2> /dev/null | grep --count "^GPU " || true)
if [ "$gpus" = 0 ]; then
    echo "runs/fineweb.sh: nvidia-smi lists no GPU here; on a CPU, use runs/shakespeare.sh" >&2
    exit 2
fi

# ----------------------------------------------------------------------------------------------------------------------
# Python: the active virtual environment, or else a new one in .venv-gpu. (.venv belongs to runs/shakespeare.sh, with a
# PyTorch build without CUDA.)

activate=""
if [ -z "${VIRTUAL_ENV:-}" ]; then
    if ! [ -f .venv-gpu/installed ]; then
        python3 -m venv .venv-gpu
        .venv-gpu/bin/pip install -e ".[data,hf]"  # data: Parquet and the program hf; hf: export
        touch .venv-gpu/installed
    fi
    activate=". .venv-gpu/bin/activate && "
    . .venv-gpu/bin/activate
fi

# ----------------------------------------------------------------------------------------------------------------------
# Data: three of the 14 files in FineWeb-Edu's sample of 10 billion tokens. They have 10 GB of text, a little more than
# the horizon, so no page is read twice. Without an account, the hub may limit the rate; `hf auth login` helps.

if ! [ -f "$data/metadata.json" ]; then
    hf download HuggingFaceFW/fineweb-edu --repo-type dataset --local-dir "$pages" \
        sample/10BT/000_00000.parquet sample/10BT/001_00000.parquet sample/10BT/002_00000.parquet
    # Each page is a document, and a hash of its text decides whether it validates: one page in 100 does
    python data.py prepare "$pages" --out "$data" --val_fraction 0.01
    python data.py verify "$data"
    rm -r "$pages"
fi

# ----------------------------------------------------------------------------------------------------------------------
# Train `1b`. Within a minute, the dry run shows the settings for these GPUs, whether memory and disk suffice, and the
# training time. If memory or disk does not suffice, this script fails; docs/guide/training.md has the remedies.

if [ "$gpus" -gt 1 ]; then
    train=(torchrun --standalone --nproc_per_node "$gpus" train.py --config configs/8gpus.toml --shards "$gpus")
else
    train=(python train.py --config configs/1gpu.toml)
fi
"${train[@]}" --data_dir "$data" --ckpt_dir "$run" "$@" --dry_run
"${train[@]}" --data_dir "$data" --ckpt_dir "$run" "$@"

# ----------------------------------------------------------------------------------------------------------------------
# Measure: bits per byte of held-out pages, for several numbers of core loops.

python sample.py "$run" --eval "$data" --n_loops 1,2,4,6

# ----------------------------------------------------------------------------------------------------------------------
# Talk. The model has read pages, not dialogues, so it continues your text.

python sample.py "$run" --prompt "The moon is" --bytes 500 --samples 3 --seed 1

# ----------------------------------------------------------------------------------------------------------------------
# Export for Hugging Face's libraries: a directory that loads without this project.

python sample.py "$run" --export "$run/exported"

echo
echo "Talk to it yourself:  ${activate}python sample.py $run"
