#!/usr/bin/env bash
# Train and evaluate CODER on MS-COCO, with Faster-RCNN regions and BERT, as in section 4.2 of the paper.
#
#   scripts/coco.sh PRECOMP GLOVE [flags of coder-plugin train …]
#
# PRECOMP: SCAN's coco_precomp folder: {train,dev,testall}_{ims.npy,caps.txt,ids.txt}.
#          To make it from bottom-up-attention's TSV file, run this once for each split (train; val as dev; test as testall):
#          coder-plugin regions convert trainval_36.tsv PRECOMP --to precomp --captions-data dataset_coco.json \
#              --captions-per-image 5 --split test --to-split testall
# GLOVE:   glove.6B.300d.txt (trained on Wikipedia, as CODER prints), or another file of word vectors.
#
# Environment variables and further flags are those of f30k.sh. The table has the 5K test figures and the mean of five 1K folds.
set -euo pipefail
precomp=${1:?the folder coco_precomp}
glove=${2:?word vectors, such as glove.6B.300d.txt}
shift 2
runs=${RUNS:-logs}
name=${NAME:-coder-coco}
concepts=$runs/$name-concepts.safetensors
processes=${PROCESSES:-1}
launch=(--num_processes "$processes")
((processes > 1)) && launch+=(--multi_gpu)
resume=()
[[ -f $runs/$name/config.json ]] && resume=(--resume latest) # the same command continues a run that was stopped
mkdir -p "$runs"

if [[ ! -f $concepts ]]; then
    coder-plugin concepts --train-data "$precomp" --vectors "$glove" --output "$concepts" ${TAGGER:+--tagger "$TAGGER"}
fi
accelerate launch "${launch[@]}" -m coder_plugin.cli train --recipe coder-coco --concepts "$concepts" \
    --train-data "$precomp" --val-data "$precomp" --batch-size $((128 / processes)) \
    --logs "$runs" --name "$name" ${resume[@]+"${resume[@]}"} "$@"
coder-plugin eval "$runs/$name" --val-data "$precomp" --split testall --folds 5
