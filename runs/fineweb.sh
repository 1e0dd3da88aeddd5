#!/usr/bin/env bash
# From nothing to a model of a billion parameters that continues English text: FineWeb-Edu, on the GPUs of one host.
#
#     git clone URL spider && cd spider
#     screen -L -Logfile fineweb.log -S fineweb bash runs/fineweb.sh
#
# It needs Linux, GPUs of NVIDIA from Ampere on with at least 24 GB, Python 3.11 or later, and 60 GB of disk: 7 for the
# download, 21 for shards, 22 for checkpoints, 6 for Python. By estimate it takes 13 hours on an H200, on eight of them
# two. Nothing has run on a GPU yet. So begin with an hour of tests and measurements, and send what fails:
#
#     bash runs/first_gpu.sh results
#
# After an interruption run the script again: whatever is done is kept, and training resumes. Flags go to train.py:
#
#     bash runs/fineweb.sh --run fineweb-1b                    # log to wandb; `wandb login` before
#     SPIDER_DIR=/scratch/base bash runs/fineweb.sh --model base
set -euo pipefail
cd "$(dirname "$0")/.."

base=${SPIDER_DIR:-.}  # data and checkpoints go here
pages=$base/data/fineweb-pages
data=$base/data/fineweb
run=$base/checkpoints/fineweb
gpus=$(nvidia-smi --list-gpus 2> /dev/null | grep --count "^GPU " || true)
if [ "$gpus" = 0 ]; then
    echo "runs/fineweb.sh: nvidia-smi lists no GPU of NVIDIA here; for a CPU there is runs/shakespeare.sh" >&2
    exit 2
fi

# ----------------------------------------------------------------------------------------------------------------------
# Python. An active virtual environment is used as it is; otherwise one is made in .venv-gpu:
# runs/shakespeare.sh has a build of PyTorch without CUDA in .venv.

activate=""
if [ -z "${VIRTUAL_ENV:-}" ]; then
    if ! [ -f .venv-gpu/installed ]; then
        python3 -m venv .venv-gpu
        .venv-gpu/bin/pip install -e ".[data,hf]"  # to read Parquet, with the program hf; to export
        touch .venv-gpu/installed
    fi
    activate=". .venv-gpu/bin/activate && "
    . .venv-gpu/bin/activate
fi

# ----------------------------------------------------------------------------------------------------------------------
# Data. Three of the 14 files of FineWeb-Edu's sample of 10 billion tokens have 10 GB of text: a little more than the
# horizon, so that no page is read twice. Without an account the hub may limit the rate; `hf auth login` helps.

if ! [ -f "$data/metadata.json" ]; then
    hf download HuggingFaceFW/fineweb-edu --repo-type dataset --local-dir "$pages" \
        sample/10BT/000_00000.parquet sample/10BT/001_00000.parquet sample/10BT/002_00000.parquet
    # Each page is a document, and a hash of its text decides whether it validates: of 100 pages one does
    python data.py prepare "$pages" --out "$data" --val_fraction 0.01
    python data.py verify "$data"
    rm -r "$pages"
fi

# ----------------------------------------------------------------------------------------------------------------------
# Train `1b`. The first command says within a minute what was chosen for these GPUs, whether memory and disk suffice and
# how long it takes; if they do not suffice, it fails, and so does this script. docs/guide/training.md has the remedies.

if [ "$gpus" -gt 1 ]; then
    train=(torchrun --standalone --nproc_per_node "$gpus" train.py --config configs/8gpus.toml --shards "$gpus")
else
    train=(python train.py --config configs/1gpu.toml)
fi
"${train[@]}" --data_dir "$data" --ckpt_dir "$run" "$@" --dry_run
"${train[@]}" --data_dir "$data" --ckpt_dir "$run" "$@"

# ----------------------------------------------------------------------------------------------------------------------
# Measure: bits per byte of held-out pages, by the number of loops of the core.

python sample.py "$run" --eval "$data" --n_loops 1,2,4,6

# ----------------------------------------------------------------------------------------------------------------------
# Talk. The model has read pages, not dialogues: it continues what you begin.

python sample.py "$run" --prompt "The moon is" --bytes 500 --samples 3 --seed 1

# ----------------------------------------------------------------------------------------------------------------------
# Export for Hugging Face's libraries: a directory that loads without this project.

python sample.py "$run" --export "$run/exported"

echo
echo "Talk to it yourself:  ${activate}python sample.py $run"
