#!/usr/bin/env bash
# Train and evaluate CODER on Flickr30K, with Faster-RCNN regions and BERT, as in section 4.2 of the paper.
#
#   scripts/f30k.sh PRECOMP GLOVE [flags of coder-plugin train …]
#
# PRECOMP: SCAN's f30k_precomp folder: {train,dev,test}_{ims.npy,caps.txt,ids.txt}, with 36 regions of 2048 channels per image.
#          To make it from other region files, run this once for each split (train; val as dev; test):
#          coder-plugin regions convert FILE PRECOMP --to precomp --captions-data dataset_flickr30k.json --split val --to-split dev
# GLOVE:   glove.6B.300d.txt (trained on Wikipedia, as CODER prints), or another file of word vectors; "-" for a loss without
#          concepts: rows 1 to 3 of table 2, vse-infinity.
#
# PROCESSES=4 trains on four GPUs (or CPU processes); the total batch stays the paper's 128. RUNS and NAME choose the folder.
# TAGGER: a spaCy pipeline's name or folder, in place of en_core_web_sm.
# BERT is downloaded from the Hub; for another model or a local folder add --model-kwargs text=FOLDER.
# For a row of the paper's tables add --recipe coder/table2-1, … and set NAME.
set -euo pipefail
precomp=${1:?a folder such as f30k_precomp}
glove=${2:?word vectors, such as glove.6B.300d.txt, or -}
shift 2
runs=${RUNS:-logs}
name=${NAME:-coder-f30k}
processes=${PROCESSES:-1}
launch=(--num_processes "$processes") batch=()
((processes > 1)) && launch+=(--multi_gpu) && batch=(--batch-size $((128 / processes)))
resume=()
[[ -f $runs/$name/config.json ]] && resume=(--resume latest) # the same command continues a run that was stopped
mkdir -p "$runs"

concepts=()
if [[ $glove != - ]]; then
    concepts=(--concepts "$runs/$name-concepts.safetensors")
    [[ -f ${concepts[1]} ]] || coder-plugin concepts --train-data "$precomp" --vectors "$glove" --output "${concepts[1]}" \
        ${TAGGER:+--tagger "$TAGGER"}
fi
accelerate launch "${launch[@]}" -m coder_plugin.cli train --recipe "${RECIPE:-coder-f30k}" \
    ${concepts[@]+"${concepts[@]}"} --train-data "$precomp" --val-data "$precomp" ${batch[@]+"${batch[@]}"} \
    --logs "$runs" --name "$name" ${resume[@]+"${resume[@]}"} "$@"
coder-plugin eval "$runs/$name" --val-data "$precomp" ${EVAL:---split test} # several words
