"""The flags of ``coder-plugin eval`` beside those of model and data: what is measured besides recall."""

from __future__ import annotations

import argparse


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("further figures")
    group.add_argument(
        "--by",
        nargs="+",
        choices=("words", "length", "place"),
        metavar="KIND",
        help="recall of kinds of captions: words (colour, number, relation, size, people, action), length, or place among "
        "their image's; with counts and 95 %% intervals",
    )
    group.add_argument(
        "--eccv",
        action="store_true",
        help="ECCV Caption on COCO's Karpathy test split: mAP@R, R-Precision and recall, and CxC's and COCO's recall",
    )
    group.add_argument(
        "--cxc", metavar="FOLDER", help="CxC's recalls, i2t t2i i2i t2t, on that split: its csv files, or VSE-infinity's of it"
    )
    group = parser.add_argument_group("what fine-tuning has kept")
    group.add_argument(
        "--zeroshot",
        metavar="FOLDER",
        help="classify the pictures of FOLDER/CLASS/ by their classes' names, before and after fine-tuning",
    )
    group.add_argument(
        "--classnames", metavar="FILE", help="names of --zeroshot's classes: JSON, or folder TAB name [FOLDER/classnames.txt]"
    )
    group.add_argument(
        "--templates", metavar="NAME", help="prompts of --zeroshot: openai (80), simple (7) or a file of lines with {} [openai]"
    )
    group.add_argument(
        "--base",
        metavar="MODEL",
        help="the model before: a run's folder, an export's, or weights of the same architecture [the run's --pretrained]",
    )
    group.add_argument(
        "--wise-ft",
        type=float,
        nargs="+",
        metavar="A",
        help="also the towers between the two, (1 - A) * before + A * after: a row for each (WiSE-FT)",
    )
    group.add_argument(
        "--wise-ft-save", nargs=2, metavar=("A", "FOLDER"), help="write the model at A as an export, to use or to train on"
    )
