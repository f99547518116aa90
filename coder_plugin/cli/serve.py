"""``coder-plugin serve``."""

from __future__ import annotations

import argparse
import ipaddress
import logging
from importlib.util import find_spec
from pathlib import Path

from coder_plugin.cli.parsing import mark_rare
from coder_plugin.errors import CoderError
from coder_plugin.terminal import echo, plural

log = logging.getLogger(__name__)


def add_parser(commands: argparse._SubParsersAction) -> None:
    from coder_plugin.cli.flags import add_reranker

    parser = commands.add_parser(
        "serve",
        help="search an index in a browser, and by a JSON API",
        description="Serve one page and a JSON API to search an index by text, by picture or by its own images. "
        "Only this machine reaches it, unless --host says otherwise.",
    )
    parser.add_argument("index", metavar="INDEX", help="a folder written by coder-plugin index")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at; 0.0.0.0: all of this machine [127.0.0.1]")
    parser.add_argument("--port", type=int, default=8000, help="port to listen at; 0: any free one [8000]")
    parser.add_argument(
        "--data", nargs="+", metavar="FOLDER",
        help="folders in which the pictures' own files may be opened [where the index says its data were]"
    )
    parser.add_argument(
        "--allow-host", nargs="+", default=[], metavar="NAME",
        help="further names that this server is reached by, such as that of a reverse proxy"
    )
    parser.add_argument(
        "--model", dest="model_folder", metavar="RUN", help="the index's model, if it has moved: a run or an export"
    )
    parser.add_argument(
        "--rerank", metavar="K",
        help="candidates that are re-ranked, or all; 0: none [32 if the index keeps what re-ranking needs]"
    )
    add_reranker(parser)
    parser.add_argument("--search-parameters", metavar="P", help="FAISS search parameters, such as nprobe=16 or efSearch=64")
    parser.add_argument(
        "--gpu", action=argparse.BooleanOptionalAction, default=True, help="search on a GPU if FAISS has one [True]"
    )
    parser.add_argument(
        "--verify", action=argparse.BooleanOptionalAction, default=False, help="verify the files' checksums first [False]"
    )
    for action in (
        parser.add_argument("--max-requests", type=int, default=128, metavar="N", help="requests answered at once [128]"),
        parser.add_argument("--max-upload-mb", type=int, default=20, metavar="MB", help="largest picture that is a query [20]"),
        parser.add_argument(
            "--max-image-pixels", type=int, default=50_000_000, metavar="N", help="most pixels of such a picture [50000000]"
        ),
    ):
        mark_rare(action)
    parser.add_help_all()
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from coder_plugin.cli.checks import check_exists, check_folder, check_reranker

    check_folder(arguments.index, "an index", command="coder-plugin index")
    for folder in arguments.data or ():
        check_exists(folder, flag="--data")
        if not Path(folder).is_dir():
            raise CoderError(f"--data {folder} is a file: give the folder that it is in")
    if not 0 <= arguments.port < 1 << 16:
        raise CoderError(f"--port must be 0 to 65535, got {arguments.port}")
    for name in ("max_requests", "max_upload_mb", "max_image_pixels"):
        if getattr(arguments, name) < 1:
            raise CoderError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(arguments, name)}")
    check_reranker(arguments.reranker)
    missing = [name for name in ("fastapi", "uvicorn", "python_multipart") if find_spec(name) is None]
    if missing:
        raise CoderError(f'serve needs {", ".join(missing)}: pip install "coder-plugin[serve]"')
    serve_command(arguments)
    return 0


def serve_command(arguments: argparse.Namespace) -> None:
    """Open the index and answer requests until the process is stopped."""
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
        )
        bound.listen(128)  # whoever connects from now on is answered
        sizes = ", ".join(plural(searcher.index.size(f"{kind}s"), kind) for kind in ("image", "caption"))
        echo(f"{arguments.index}: {sizes}; model {note['model'].get('name') or 'without a name'}")
        echo(f"serving at http://{name}:{port}/ (Ctrl-C stops)")
        try:
            server.run(app, bound, requests=arguments.max_requests)
        finally:
            engine.close()


def _hint(data: str, folders: list[str] | None) -> str:
    """What to do where the pictures that were embedded from ``data`` are not found; nothing for those that are no files."""
    from coder_plugin.data.tars import local_path
    from coder_plugin.locations import is_local

    if data == "scenes":
        return ": the built-in scenes are drawn, so they have none"
    if folders is None and not (is_local(data) and Path(local_path(data)).is_absolute()):
        return f": they were read from {data[:200]}, not from a folder of this machine"
    return ": --data FOLDER says where they are"
