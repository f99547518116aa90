"""``coder-plugin share``."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from coder_plugin.cli.encoding import ExportFlag
from coder_plugin.cli.flags import add_command
from coder_plugin.config import MISSING, option
from coder_plugin.errors import CoderError
from coder_plugin.terminal import echo


@dataclass(frozen=True, kw_only=True)
class Command(ExportFlag):
    """The flags of ``coder-plugin share``."""

    run_folder: str = option(MISSING, "folder of a training run, an export, or a shared model", metavar="RUN", positional=True)
    to: str | None = option(None, "a new folder, or that of a shared model, which is replaced", metavar="FOLDER")
    repo: str | None = option(
        None, "a repository, created if it does not exist (log in with: hf auth login)", metavar="OWNER/NAME"
    )
    private: bool = option(False, "make the repository private")
    license: str | None = option(None, "the card's licence, such as cc-by-nc-4.0", flag="card_license", metavar="ID")
    base_model: str | None = option(
        None, "the repository of the model that training started from", flag="card_base_model", metavar="ID"
    )
    datasets: list[str] = option([], "training data", flag="card_datasets", metavar="NAME")

    def __post_init__(self) -> None:
        if (self.to is None) == (self.repo is None):
            raise CoderError("give one destination: --to FOLDER or --repo OWNER/NAME")


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "share",
        help="write a trained model for others, with a model card: to a folder, or to the Hugging Face Hub",
        description="Write a trained model, with everything needed to embed with it and a model card, to a folder or to a "
        "repository of the Hugging Face Hub. coder_plugin.from_pretrained opens either.",
    )
    add_command(parser, Command, run)


def run(arguments: Command) -> int:
    from coder_plugin.cli.checks import check_model

    check_model(arguments.run_folder)
    from coder_plugin.integrations.hub import share_command

    echo(share_command(arguments))
    return 0
