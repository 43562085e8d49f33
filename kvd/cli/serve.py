"""`kvd serve`: runs the daemon in the foreground until SIGTERM or SIGINT."""

import argparse
import asyncio
import contextlib
import os
import sys
from typing import Any

import uvloop
from pydantic_core import PydanticUndefined

from kvd.daemon.config import Config, load
from kvd.daemon.logs import configure
from kvd.daemon.server import Daemon


def add_parser(subparsers: Any) -> None:
    """Adds the command: a flag for every field of the configuration."""
    parser = subparsers.add_parser(
        "serve",
        description="Runs the daemon. Flags override the environment (KVD_NAME, ...), and that the file of --config.",
    )
    for name, field in Config.model_fields.items():
        text = field.description or ""
        if field.default not in (None, PydanticUndefined):
            text += f" (default: {field.default})"
        bare = {"nargs": "?", "const": "true"} if field.annotation is bool else {}
        parser.add_argument(f"--{name.replace('_', '-')}", metavar="VALUE", help=text.replace("%", "%%"), **bare)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serves, and does not return: NIXL's teardown must not decide the exit status (`kvd.transport.nixl.process`)."""
    flags = {name: value for name in Config.model_fields if (value := getattr(args, name)) is not None}
    config = load(flags)
    configure(config.log_level, config.log_format)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        status = runner.run(Daemon(config).serve())
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # nobody reads it any more
                stream.flush()
        os._exit(status)
