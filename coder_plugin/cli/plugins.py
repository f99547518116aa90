"""``coder-plugin plugins``."""

from __future__ import annotations

import argparse

from coder_plugin.terminal import echo


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("plugins", help="list losses, heads, readers … and where they come from")
    parser.add_argument("group", nargs="?", help="one group: losses, heads, readers, recipes …")
    parser.add_argument("--check", action="store_true", help="import each one and report failures")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from coder_plugin.registry import format_plugins, list_plugins

    plugins = list_plugins(arguments.group, check=arguments.check)
    echo(format_plugins(plugins))
    return 1 if any(plugin.error for plugin in plugins) else 0
