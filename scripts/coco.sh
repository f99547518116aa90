#!/usr/bin/env bash
# MS-COCO, from downloaded files to a table: CODER on Faster-RCNN regions and BERT (METHODS 6, 10).
#
#   scripts/coco.sh PRECOMP GLOVE [flags of coder-plugin train …]
#
# PRECOMP: SCAN's coco_precomp folder: {train,dev,testall}_{ims.npy,caps.txt,ids.txt}. From bottom-up-attention's files (its
#          TSV is read in place as well: --regions trainval_resnet101_faster_rcnn_genome_36.tsv with Karpathy's captions):
#          once for each split (train; val as dev; test as testall):
#          coder-plugin regions convert trainval_36.tsv PRECOMP --to precomp --captions-data dataset_coco.json \
#              --captions-per-image 5 --split test --to-split testall
# GLOVE:   glove.840B.300d.txt or any other vectors of words.
# The rest is as in f30k.sh. The table has the 5K figures of testall and the mean of its five folds of 1K.
set -euo pipefail
precomp=${1:?folder of coco_precomp}
glove=${2:?file of word vectors}
shift 2
runs=${RUNS:-logs}
name=${NAME:-coder-coco}
concepts=$runs/$name-concepts.safetensors
processes=${PROCESSES:-1}
launch=(--num_processes "$processes")
((processes > 1)) && launch+=(--multi_gpu)
mkdir -p "$runs"

if [[ ! -f $concepts ]]; then
    coder-plugin concepts --train-data "$precomp" --vectors "$glove" --output "$concepts"
fi
accelerate launch "${launch[@]}" -m coder_plugin.cli train --loss coder-coco --concepts "$concepts" \
    --train-data "$precomp" --val-data "$precomp" --batch-size $((128 / processes)) \
    --logs "$runs" --name "$name" --resume latest "$@"
coder-plugin eval "$runs/$name" --val-data "$precomp" --split testall --folds 5
