"""``coder-plugin share``."""

from __future__ import annotations

import argparse

from coder_plugin.terminal import echo


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "share",
        help="write a trained model for others, with a model card: to a folder, or to the Hugging Face Hub",
        description="Write a trained model, with everything needed to embed with it and a model card, to a folder or to a "
        "repository of the Hugging Face Hub. coder_plugin.from_pretrained opens either.",
    )
    parser.add_argument("run_folder", metavar="RUN", help="folder of a training run, an export, or a shared model")
    places = parser.add_mutually_exclusive_group(required=True)
    places.add_argument("--to", metavar="FOLDER", help="a new folder, or that of a shared model, which is replaced")
    places.add_argument("--repo", metavar="OWNER/NAME", help="a repository, created if it does not exist (log in with: "
    "hf auth login)")
    parser.add_argument(
        "--export", choices=("best", "last"), help="which export of the run [best; last if no validation was run]"
    )
    parser.add_argument("--private", action="store_true", help="make the repository private")
    parser.add_argument("--card-license", dest="license", metavar="ID", help="the card's licence, such as cc-by-nc-4.0")
    parser.add_argument(
        "--card-base-model", dest="base_model", metavar="ID", help="the repository of the model that training started from"
    )
    parser.add_argument("--card-datasets", dest="datasets", nargs="+", default=[], metavar="NAME", help="training data")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from coder_plugin.cli.checks import check_model

    check_model(arguments.run_folder)
    from coder_plugin.integrations.hub import share_command

    echo(share_command(arguments))
    return 0
