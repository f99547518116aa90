#!/usr/bin/env bash
# Flickr30K, from downloaded files to a table: CODER on Faster-RCNN regions and BERT (METHODS 6).
#
#   scripts/f30k.sh PRECOMP GLOVE [flags of coder-plugin train …]
#
# PRECOMP: SCAN's f30k_precomp folder: {train,dev,test}_{ims.npy,caps.txt,ids.txt}, 36 regions of 2048 channels an image. From
#          other files, once for each split (train; val as dev; test):
#          coder-plugin regions convert FILE PRECOMP --to precomp --captions-data dataset_flickr30k.json --split val --to-split dev
# GLOVE:   glove.840B.300d.txt or any other vectors of words.
# PROCESSES=4 trains on four GPUs (without GPUs: processes); their batches make the paper's 128.
# BERT comes from the hub; another one or a folder: --model-kwargs text=FOLDER. The table: --loss coder/table2-1 … and so on.
set -euo pipefail
precomp=${1:?folder of f30k_precomp}
glove=${2:?file of word vectors}
shift 2
runs=${RUNS:-logs}
name=${NAME:-coder-f30k}
concepts=$runs/$name-concepts.safetensors
processes=${PROCESSES:-1}
launch=(--num_processes "$processes")
((processes > 1)) && launch+=(--multi_gpu)
mkdir -p "$runs"

if [[ ! -f $concepts ]]; then
    coder-plugin concepts --train-data "$precomp" --vectors "$glove" --output "$concepts"
fi
accelerate launch "${launch[@]}" -m coder_plugin.cli train --loss coder-f30k --concepts "$concepts" \
    --train-data "$precomp" --val-data "$precomp" --batch-size $((128 / processes)) \
    --logs "$runs" --name "$name" --resume latest "$@"
coder-plugin eval "$runs/$name" --val-data "$precomp" --split test
