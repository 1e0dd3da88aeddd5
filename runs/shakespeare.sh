#!/usr/bin/env bash
# From scratch to a model that talks like Shakespeare, on a CPU, in minutes after the installation.
#
#     git clone URL spider && cd spider
#     bash runs/shakespeare.sh
#
# It needs Linux or macOS, Python 3.11 or later, and 3 GB of disk. If it can reach only PyPI, it uses PyPI's build of
# PyTorch and the documentation that comes with Python. After an interruption, run it again: finished work is kept, and
# training resumes. Flags go to train.py, so for a longer run of a larger model:
#
#     SPIDER_DIR=larger bash runs/shakespeare.sh --model small --target_tokens 12e6
set -euo pipefail
cd "$(dirname "$0")/.."

base=${SPIDER_DIR:-.}  # data and checkpoints go here

# ----------------------------------------------------------------------------------------------------------------------
# Python: the active virtual environment, or else a new one in .venv.

activate=""
if [ -z "${VIRTUAL_ENV:-}" ]; then
    if ! [ -f .venv/installed ]; then
        if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
            echo "runs/shakespeare.sh: needs Python 3.11 or later, but $(command -v python3) is older" >&2
            exit 2
        fi
        python3 -m venv .venv
        # PyTorch's CPU build; the Linux build on PyPI includes CUDA, more than 2 GB
        index=https://download.pytorch.org/whl/cpu
        if curl --silent --fail --location --max-time 10 --output /dev/null "$index/torch/"; then
            .venv/bin/pip install "torch>=2.11,<2.14" --index-url "$index"
        else
            echo "Cannot reach download.pytorch.org: installing PyTorch from PyPI."
        fi
        .venv/bin/pip install -e .
        touch .venv/installed
    fi
    activate=". .venv/bin/activate && "
    . .venv/bin/activate
fi

# ----------------------------------------------------------------------------------------------------------------------
# Data: 1.1 MB of plays, or else Python's documentation. `prepare` turns any text into shards of byte ids, and holds out
# the last tenth for validation.

mkdir -p "$base/data"
if ! [ -f "$base/data/shakespeare.txt" ] && ! [ -f "$base/data/python-docs.txt" ]; then
    # Use another name until the text is complete
    if curl --silent --show-error --fail --location --connect-timeout 10 --max-time 60 --output "$base/data/download" \
        https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt; then
        mv "$base/data/download" "$base/data/shakespeare.txt"
    else
        echo "Shakespeare cannot be downloaded: training on Python's documentation instead."
        # Several topics share paragraphs. Write each paragraph once, so that the last tenth is new to the model.
        python -c 'from pydoc_data.topics import topics
paragraphs = "\n\n".join(topics.values()).split("\n\n")
print(*dict.fromkeys(paragraphs), sep="\n\n")' > "$base/data/download"
        mv "$base/data/download" "$base/data/python-docs.txt"
    fi
fi
name=shakespeare
prompt="ROMEO:"
if [ -f "$base/data/python-docs.txt" ]; then
    name=python-docs
    prompt="The "
fi
text=$base/data/$name.txt
data=$base/data/$name
run=$base/checkpoints/$name
[ -f "$data/metadata.json" ] || python data.py prepare "$text" --out "$data"

# ----------------------------------------------------------------------------------------------------------------------
# Train `tiny` for one pass over the plays. The log shows loss, speed and time left; metrics.jsonl in the run's
# directory has one line per step. Twelve passes (--target_tokens 12e6) lower the loss from 1.27 to 1.22.

python train.py --model tiny --data_dir "$data" --ckpt_dir "$run" --target_tokens 1003520 "$@"

# ----------------------------------------------------------------------------------------------------------------------
# Measure: bits per byte of the held-out tenth, first with fixed weights, then while the model learns as it reads.

size=$(wc -c < "$text")
tail -c $(((size + 9) / 10)) "$text" > "$base/data/held-out.txt"
python sample.py "$run" --eval "$base/data/held-out.txt"
python sample.py "$run" --eval "$base/data/held-out.txt" --adapt

# ----------------------------------------------------------------------------------------------------------------------
# Look inside: where segments end, and which bytes surprise the model.

head -c 600 "$base/data/held-out.txt" | python sample.py "$run" --show - --html "$run/look.html"

# ----------------------------------------------------------------------------------------------------------------------
# Talk.

python sample.py "$run" --prompt "$prompt" --bytes 300 --seed 1

echo
echo "Talk to it yourself:  ${activate}python sample.py $run"
echo "Open in a browser:    $run/look.html"
