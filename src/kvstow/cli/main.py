"""The ``kvstow`` command."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

import kvstow
from kvstow.cli.paths import disk_folder, project_cache, user_cache
from kvstow.cli.serve import ServeOptions, choose_disk, server_command
from kvstow.errors import KvstowError

app = typer.Typer(
    name="kvstow",
    help="KV-cache offload for LLM servers: DRAM and disk, bit for bit.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Model name or folder, as vLLM takes it.")],
    arena_gib: Annotated[
        float | None, typer.Option(help="DRAM for keys and values, in GiB; at most 4 if not given.")
    ] = None,
    disk: Annotated[
        str | None,
        typer.Option(
            metavar="PATH|none",
            help="Folder of the disk tier. Not given: one for each model, in the user's cache folder.",
        ),
    ] = None,
    disk_gib: Annotated[
        float | None, typer.Option(help="Disk for keys and values, in GiB; 32 if not given.")
    ] = None,
) -> None:
    """Serve MODEL with vLLM's OpenAI server; every other option goes to vLLM as it is."""
    try:
        options = ServeOptions(
            model=model,
            arena_gib=arena_gib,
            disk=choose_disk(disk, disk_folder(user_cache(os.environ), model)),
            disk_gib=disk_gib,
            vllm_args=tuple(context.args),
        )
        command = server_command(options)
    except KvstowError as error:
        print(f"kvstow: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    # In place of this process: the server gets the signals and gives the exit status itself.
    os.execv(command[0], command)


@app.command()
def version() -> None:
    """Print the version."""
    print(kvstow.__version__)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("out"),
) -> None:
    """Show what a long document costs cold, from DRAM, from disk, and computed again."""
    # Here, not above: plotting and the model's conversion are heavy, and `serve` needs neither.
    from kvstow.cli.demo.run import run_demo

    cache = project_cache(os.environ, Path(kvstow.__file__).parent)
    sys.exit(run_demo(cache=cache, out=out))
