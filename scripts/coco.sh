#!/usr/bin/env bash
# Train and evaluate CODER on MS-COCO, with Faster-RCNN regions and BERT, as in section 4.2 of the paper.
#
#   scripts/coco.sh PRECOMP GLOVE [flags of coder-plugin train …]
#
# PRECOMP: SCAN's coco_precomp folder: {train,dev,testall}_{ims.npy,caps.txt,ids.txt}. To make it as f30k.sh says, add
#          --captions-per-image 5, and --split test --to-split testall for the test split.
#
# The rest is that of f30k.sh. The table has the 5K test figures and the mean of five 1K folds.
export RECIPE=coder-coco EVAL="--split testall --folds 5" NAME=${NAME:-coder-coco}
exec bash "$(dirname "$0")/f30k.sh" "$@"
