"""`tfx-jax serve`: a page and JSON endpoints on this machine for a trained or pretrained model."""

import argparse
import ipaddress
import os
import socket
from collections.abc import Sequence

from tfx_jax.arguments import Parser, at_least_one
from tfx_jax.cli.support.options import add_folder_options, check_one_source, load_model, set_up_program
from tfx_jax.errors import UserError, install_command, one_line
from tfx_jax.generation import Transcriber
from tfx_jax.hub import local_folder
from tfx_jax.models import WhisperConfig, hf
from tfx_jax.training import LoadedModel, load
from tfx_jax.training.predictor import load_from_run
from tfx_jax.training.workdir import is_workdir


def run(argv: Sequence[str]) -> int:
    """Serves a model until Ctrl-C or SIGTERM; requests that have begun are answered first."""
    parser = Parser(
        "serve",
        "Serves a model on this machine: a page for a browser, a JSON endpoint, and for language models OpenAI-style "
        "/v1/completions and /v1/chat/completions. Ctrl-C ends it after the requests that have begun. There is no "
        "password and no encryption: other machines reach it only with --host.",
    )
    add_folder_options(parser, "of a model that generates text, or of a Whisper")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; %(default)s, this machine only, by default; 0.0.0.0 serves other machines too",
    )
    parser.add_argument("--port", type=_port, default=8000, help="port; 0 takes a free one; %(default)s by default")
    parser.add_argument(
        "--max-new-tokens",
        type=at_least_one,
        default=512,
        help="most new tokens that a request may ask for; %(default)s by default",
    )
    parser.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME[:PORT]",
        help="host name by which browsers and clients reach this server, such as that of a proxy; repeatable",
    )
    arguments = parser.parse_args(argv)
    check_one_source(arguments)
    try:
        from tfx_jax.cli.support.server import make_app, run_server
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] not in ("starlette", "uvicorn", "h11"):
            raise
        raise UserError(f"serve needs Starlette and uvicorn ({one_line(error)}): {install_command('serve')}") from None
    set_up_program()
    with _listener(arguments.host, arguments.port) as listener:
        name = _name(arguments)
        transcriber = None
        if arguments.workdir is not None:
            run, params = load_model(arguments)
            model = load_from_run(run, params, source=local_folder(arguments.workdir) / "tokenizer")
        elif _is_whisper(arguments.model):
            transcriber = Transcriber.load(arguments.model, allow_nonfinite=arguments.allow_nonfinite)
            model = LoadedModel(transcriber.model)
        else:
            model = load(arguments.model, allow_nonfinite=arguments.allow_nonfinite)
        app, worker = make_app(
            model,
            name,
            transcriber=transcriber,
            max_tokens=arguments.max_new_tokens,
            hosts=_hosts(listener),
            allowed_hosts=arguments.allowed_host,
        )
        run_server(app, worker, listener, name)
    return 0


def _name(arguments: argparse.Namespace) -> str:
    """Returns the name of the model for clients: the last part of a folder's path, or the name on the hub."""
    source = str(arguments.workdir or arguments.model)
    if arguments.workdir is None and "://" not in source and not os.path.isdir(source):
        return source
    return os.path.basename(os.path.abspath(source))


def _is_whisper(source: str) -> bool:
    """Returns whether a pretrained model is a Whisper; False for a workdir."""
    folder = local_folder(source)
    return not is_workdir(folder) and isinstance(hf.load_config(folder), WhisperConfig)


def _listener(host: str, port: int) -> socket.socket:
    """Returns a listening socket; raises UserError if the address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=512)
    except OSError as error:
        reason = error.strerror or one_line(error)
        raise UserError(f"cannot listen on {host}, port {port} ({reason}): use another --host or --port") from None


def _hosts(listener: socket.socket) -> frozenset[str] | None:
    """Returns the names by which clients may call this server; None accepts any IP address and this machine's name."""
    if ipaddress.ip_address(listener.getsockname()[0]).is_loopback:
        return frozenset({"127.0.0.1", "localhost", "[::1]", listener.getsockname()[0]})
    return None


def _port(text: str) -> int:
    """Parses a port; 0 means a free one."""
    if text == "0":
        return 0
    if at_least_one(text) > 65_535:
        raise argparse.ArgumentTypeError(f"must be at most 65,535, got {text}")
    return int(text)
