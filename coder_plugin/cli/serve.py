"""``coder-plugin serve``."""

from __future__ import annotations

import argparse
import ipaddress
import logging
from dataclasses import dataclass
from pathlib import Path

from coder_plugin.cli.encoding import SearchFlags
from coder_plugin.cli.flags import add_command
from coder_plugin.config import option
from coder_plugin.errors import CoderError
from coder_plugin.terminal import echo, plural

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Command(SearchFlags):
    """The flags of ``coder-plugin serve``."""

    host: str = option("127.0.0.1", "address to listen at; 0.0.0.0: all of this machine")
    port: int = option(8000, "port to listen at; 0: any free one")
    data: list[str] | None = option(
        None, "folders whose pictures may be shown in full size [those that the index was built from]", metavar="FOLDER"
    )
    allow_host: list[str] = option([], "further names that this server is reached by, such as that of a reverse proxy")
    max_requests: int = option(128, "requests answered at once", at_least=1, common=False)
    max_upload_mb: int = option(20, "largest picture that is a query", metavar="MB", at_least=1, common=False)
    max_image_pixels: int = option(50_000_000, "most pixels of such a picture", at_least=1, common=False)


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "serve",
        help="search an index in a browser, and by a JSON API",
        description="Serve one page and a JSON API to search an index by text, by picture or by its own images. "
        "Only this machine reaches it, unless --host says otherwise.",
    )
    add_command(parser, Command, run)


def run(arguments: Command) -> int:
    from coder_plugin.cli.checks import check_exists, check_folder

    check_folder(arguments.index, "an index", command="coder-plugin index")
    for folder in arguments.data or ():
        check_exists(folder, flag="--data")
        if not Path(folder).is_dir():
            raise CoderError(f"--data {folder} is a file: give the folder that it is in")
    if not 0 <= arguments.port < 1 << 16:
        raise CoderError(f"--port must be 0 to 65535, got {arguments.port}")
    from coder_plugin.serve import app as server

    names = {name: server.name_of(name) for name in arguments.allow_host}
    for given, name in names.items():
        if not name:
            raise CoderError(f"--allow-host {given}: give a name without https:// and path, such as search.example.org")
    with server.bind(arguments.host, arguments.port) as bound:
        from coder_plugin.data.decode import check_max_pixels
        from coder_plugin.search.searcher import open_searcher
        from coder_plugin.serve.originals import Originals, recorded_folders

        check_max_pixels(arguments.max_image_pixels)
        searcher = open_searcher(
            arguments.index,
            model=arguments.model_folder,
            verify=arguments.verify,
            parameters=arguments.search_parameters,
            gpu=arguments.gpu,
            reranker=arguments.reranker,
        )
        engine = server.Engine(searcher, rerank=arguments.rerank)
        among = "images" if "images" in searcher.index.vectors else "captions"
        engine.text("a picture", 1, among=among, where=None)  # the first search takes longer than the others
        note = searcher.index.note
        originals = Originals(recorded_folders(note) if arguments.data is None else arguments.data)
        if note["images"] and originals.open(searcher.index.records.images([0])[0]) is None:
            hint = _hint(str(note["plan"].get("data")), arguments.data)
            log.warning("the pictures' own files are not found, so thumbnails are shown%s", hint)
        address, port = bound.getsockname()[:2]
        local = ipaddress.ip_address(address.partition("%")[0]).is_loopback
        if not local:
            log.warning("--host %s: whoever reaches this machine can search the index and see its pictures", arguments.host)
        name = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
        app = server.make_app(
            engine,
            originals,
            hosts={*server.LOCAL, *names.values(), server.name_of(name)} if local or names else None,
            upload_bytes=arguments.max_upload_mb << 20,
            pixels=arguments.max_image_pixels,
            requests=arguments.max_requests,
        )
        bound.listen(128)  # whoever connects from now on is answered
        sizes = ", ".join(plural(searcher.index.size(f"{kind}s"), kind) for kind in ("image", "caption"))
        echo(f"{arguments.index}: {sizes}; model {note['model'].get('name') or 'without a name'}")
        echo(f"serving at http://{name}:{port}/ (Ctrl-C stops)")
        try:
            server.run(app, bound, requests=arguments.max_requests)
        finally:
            engine.close()
    return 0


def _hint(data: str, folders: list[str] | None) -> str:
    """What to do where the pictures that were embedded from ``data`` are not found; nothing for those that are no files."""
    from coder_plugin.data.tars import local_path
    from coder_plugin.locations import is_local

    if data == "scenes":
        return ": the built-in scenes are drawn, so they have none"
    if folders is None and not (is_local(data) and Path(local_path(data)).is_absolute()):
        return f": they were read from {data[:200]}, not from a folder of this machine"
    return ": --data FOLDER says where they are"
