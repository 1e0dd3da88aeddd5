#!/usr/bin/env bash
# From nothing to a model that talks like Shakespeare, on one CPU core: about five minutes after the installation.
#
#     git clone URL spider && cd spider
#     bash runs/shakespeare.sh
#
# It needs Linux or macOS, Python 3.11 or later, and 3 GB of disk. After an interruption run it again: whatever is done
# is kept, and training resumes. Flags go to train.py, so a longer run of a larger model is
#
#     SPIDER_DIR=larger bash runs/shakespeare.sh --model small --target_tokens 12e6
set -euo pipefail
cd "$(dirname "$0")/.."

base=${SPIDER_DIR:-.}  # data and checkpoints go here
text=$base/data/shakespeare.txt
data=$base/data/shakespeare
run=$base/checkpoints/shakespeare
export OMP_NUM_THREADS=1  # a model of this size gains little from a second core

# ----------------------------------------------------------------------------------------------------------------------
# Python. An active virtual environment is used as it is; otherwise one is made in .venv.

activate=""
if [ -z "${VIRTUAL_ENV:-}" ]; then
    if ! [ -f .venv/installed ]; then
        python3 -m venv .venv
        # PyTorch's build for CPUs; what PyPI has for Linux brings CUDA along, more than 2 GB
        .venv/bin/pip install "torch>=2.11,<2.14" --index-url https://download.pytorch.org/whl/cpu
        .venv/bin/pip install -e .
        touch .venv/installed
    fi
    activate=". .venv/bin/activate && "
    . .venv/bin/activate
fi

# ----------------------------------------------------------------------------------------------------------------------
# Data: 1.1 MB of plays. `prepare` turns any text into shards of byte ids, and holds its last tenth out for validation.

mkdir -p "$base/data"
if ! [ -f "$text" ]; then
    # --output under another name, so that half a download is no text
    curl --fail --location --output "$text.part" \
        https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt
    mv "$text.part" "$text"
fi
[ -f "$data/metadata.json" ] || python data.py prepare "$text" --out "$data"

# ----------------------------------------------------------------------------------------------------------------------
# Train `tiny` for one pass over the text. The log shows loss, speed and time left; metrics.jsonl in the run's directory
# has a line per step. Twelve passes (--target_tokens 12e6, half an hour) lower the loss from 1.28 to 1.23.

python train.py --model tiny --data_dir "$data" --ckpt_dir "$run" --target_tokens 1003520 "$@"

# ----------------------------------------------------------------------------------------------------------------------
# Measure: bits per byte of the held-out tenth, with the model as it is, and with one that keeps learning as it reads.

size=$(wc -c < "$text")
tail -c $(((size + 9) / 10)) "$text" > "$base/data/held-out.txt"
python sample.py "$run" --eval "$base/data/held-out.txt"
python sample.py "$run" --eval "$base/data/held-out.txt" --adapt

# ----------------------------------------------------------------------------------------------------------------------
# Look inside: where segments end, and which bytes surprise the model.

head -c 600 "$base/data/held-out.txt" | python sample.py "$run" --show - --html "$run/look.html"

# ----------------------------------------------------------------------------------------------------------------------
# Talk.

python sample.py "$run" --prompt "ROMEO:" --bytes 300 --seed 1

echo
echo "Talk to it yourself:  ${activate}python sample.py $run"
echo "Open in a browser:    $run/look.html"
