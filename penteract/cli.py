"""The command line. Each command is a function; everything it needs is imported inside it.

Exit codes: 0 done; 1 a fault; 2 the user's input is wrong (one message, no traceback); 3 a hang;
4 suspected hardware.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
import traceback
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from penteract import checkpoint_command, options
from penteract.errors import UserError
from penteract.launch import die_with_parent, environment, report_failure
from penteract.local_ranks import Restarts, start_local

if TYPE_CHECKING:
    from penteract.config import Config

FILE_ERRORS = (
    FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError, FileExistsError,
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    die_with_parent()
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = options.parser(RUNS)
    arguments, rest = parser.parse_known_args(argv)
    arguments.argv, arguments.rest = argv, rest
    if rest and arguments.command not in (train, verify, data_show):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        return int(arguments.command(arguments))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has left
        sys.stderr.close()
        return 1
    except Exception as error:
        code, text = _verdict(error)
        report_failure(text, said_here=getattr(error, "said_here", True))
        return code


def _verdict(error: Exception) -> tuple[int, str]:
    """The exit code that an error gives, and what is shown of it."""
    from penteract.checkpoint.format import SaveError, StoreError

    if isinstance(error, UserError):
        return 1 if isinstance(error, SaveError | StoreError) else 2, f"penteract: {error}"
    if isinstance(error, ConnectionError) and error.filename:  # of a checkpoint at a URL
        return 1, f"penteract: {error.filename}: {error.strerror}"
    if isinstance(error, FILE_ERRORS) and error.filename:
        return 2, f"penteract: {error.filename}: {error.strerror}"
    from penteract.parallel.pipeline.executor import StalledError
    from penteract.train.nonfinite import NonFiniteError
    from penteract.train.rerun import HardwareError
    from penteract.train.spikes import SpikeError

    if isinstance(error, NonFiniteError | SpikeError):
        return 1, f"penteract: {error}"
    if isinstance(error, HardwareError):
        return 4, f"penteract: {error}"
    if isinstance(error, StalledError):
        return 3, f"penteract: {error}"
    return 1, "".join(traceback.format_exception(error))


# --- commands ---


def train(arguments: argparse.Namespace) -> int:
    """Train a model."""
    from penteract.config_file import help_text, to_toml

    if arguments.help:
        print(f"{arguments.parser.format_help()}\nEvery key of the file is an option too.\n")
        print(help_text())
        return 0
    place = (arguments.world, arguments.rank)
    if place != (None, None) and not arguments.dry_run:
        raise UserError("--world and --rank are for --dry-run")
    if arguments.dry_run and arguments.nproc is not None:
        raise UserError("--dry-run is one process: give --world, not --nproc")
    if arguments.max_restarts and arguments.nproc is None:
        raise UserError("--max-restarts is for --nproc; torchrun has its own")
    if arguments.nproc is not None and len(arguments.nproc) > 1 and not arguments.max_restarts:
        raise UserError("--nproc MIN:MAX needs --max-restarts: it begins with MAX ranks")
    config = _load(arguments)
    if arguments.print_config:
        from penteract.train.language_model import with_vocabulary

        print(to_toml(with_vocabulary(config)[0]), end="")
        return 0
    if arguments.dry_run:
        return _dry_run(config, arguments.world or 1, arguments.rank or 0)
    if arguments.nproc is not None:
        return _train_local(config, arguments)
    return _train_rank(config)


def _train_local(config: Config, arguments: argparse.Namespace) -> int:
    from penteract.checkpoint.steps import pointed
    from penteract.train.pipeline import fitted

    least, most = arguments.nproc[0], arguments.nproc[-1]
    fitted(config, most)
    assert config.checkpoint.dir is not None
    directory, counts = config.checkpoint.dir, []
    for n in reversed(range(least, most)):
        with contextlib.suppress(UserError):
            fitted(config, n)
            counts.append(n)

    known: list[int | None] = [None]

    def newest() -> int | None:
        with contextlib.suppress(ConnectionError):  # else what is known
            step = pointed(directory)  # moves with each save, past damaged steps too
            known.append(None if step is None else int(step.name.removeprefix("step-")))
        return known[-1]

    restarts = Restarts(arguments.max_restarts, newest, counts)
    return start_local(most, _for_ranks(arguments.argv), restarts=restarts)


def _load(arguments: argparse.Namespace) -> Config:
    from penteract.config_file import load, split_config

    path, overrides = split_config(arguments.rest)
    if path is None:
        command = arguments.parser.prog
        raise UserError(f"{command} needs a configuration file: {command} CONFIG.toml")
    return load(path, overrides)


def _train_rank(config: Config) -> int:
    from penteract.launch import connect, surroundings
    from penteract.train.pipeline import fitted
    from penteract.train.signals import StopRequest

    launch = environment()
    config, chosen = fitted(config, launch.world)
    if chosen and launch.rank == 0:
        print(chosen, file=sys.stderr, flush=True)
    with StopRequest(config.train.max_minutes) as stop:
        from penteract.checkpoint.agreement import agreed
        from penteract.mesh import create_mesh, world_axis
        from penteract.train.alike import check_alike, facts_of
        from penteract.train.language_model import language_model
        from penteract.train.loop import train as train_loop

        with stop.released():
            device = connect(launch, device=config.train.device, timeout_s=_patience_s(config))
        world = world_axis()
        check_alike(agreed(world, lambda: {**surroundings(), **facts_of(config)}), world)
        mesh = create_mesh(_grid(config, launch.world), launch.rank)
        task, config = language_model(config, mesh, device)
        train_loop(task, config, mesh, device, stop=stop, report=report_failure)
    return 0


def _patience_s(config: Config) -> float:
    """How long a rank waits for a message: longer than the watchdog, which says more."""
    return max(600.0, 60 * config.train.hang_minutes + 120)


def _dry_run(config: Config, world: int, rank: int) -> int:
    from penteract.train.dry_run import dry_run
    from penteract.train.language_model import with_vocabulary
    from penteract.train.pipeline import check

    check(config, world)
    if not 0 <= rank < world:
        raise UserError(f"--rank {rank} is outside 0 .. {world - 1} of --world {world}")
    print("\n".join(dry_run(with_vocabulary(config)[0], _grid(config, world), rank)))
    return 0


def _grid(config: Config, world: int) -> Any:
    from penteract.grid import Grid

    p = config.parallel
    return Grid(world, tp=p.tp, cp=p.cp, pp=p.pp, ep=p.ep, etp=p.etp, order=p.order)


def _for_ranks(argv: Sequence[str]) -> list[str]:
    """The command line of the ranks: that of the launcher without what says how to start them."""
    kept, skip, ours = [], False, ("--nproc", "--max-restarts")
    for word in argv:
        if not skip and word not in ours and not word.startswith(tuple(f"{o}=" for o in ours)):
            kept.append(word)
        skip = not skip and word in ours
    return kept


def verify(arguments: argparse.Namespace) -> int:
    """Check that layouts train to the same numbers as one process."""
    from dataclasses import replace

    from penteract.verify.command import Options, verify_config, verify_random

    common = Options(arguments.dtype or "float64", arguments.steps or 2, arguments.json)
    if arguments.fuzz is not None:
        if arguments.rest or arguments.layout or arguments.shrink:
            raise UserError("--fuzz draws models and layouts itself: no CONFIG.toml beside it")
        return verify_random(arguments.fuzz, arguments.seed, arguments.max_world, common)
    config = _load(arguments)
    if not arguments.layout:
        raise UserError('verify needs at least one layout, such as --layout "tp=2,dp=2"')
    given = {word.split("=")[0] for word in arguments.rest}  # --train.dtype does what --dtype does
    if arguments.dtype is None and "--train.dtype" in given:
        if config.train.dtype == "float16":
            raise UserError("verify compares float64, float32 and bfloat16, not float16")
        common = replace(common, dtype=config.train.dtype)
    if arguments.steps is None and "--train.steps" in given:
        common = replace(common, steps=config.train.steps or 2)
    return verify_config(config, arguments.layout, common, small=arguments.shrink)


def layout(arguments: argparse.Namespace) -> int:
    """Show which rank is where."""
    from penteract.grid import Grid, layout_json
    from penteract.layout_picture import draw

    sizes = {name: getattr(arguments, name) for name in ("tp", "cp", "pp", "ep", "etp", "order")}
    grid = Grid(arguments.world, **sizes)
    if arguments.json:
        print(json.dumps(layout_json(grid), separators=(",", ":")))
    else:
        print(draw(grid, arguments.gpus_per_node))
    return 0


def schedule(arguments: argparse.Namespace) -> int:
    """Show what each pipeline rank does when, and how long it is idle."""
    from penteract.schedule_command import load, make, show

    sizes = {"--ranks": arguments.ranks, "--microbatches": arguments.microbatches}
    if arguments.table is not None:
        given = [name for name, value in (*sizes.items(), ("--chunks", arguments.chunks)) if value]
        if given:
            raise UserError(f"--table says its sizes itself: no {', '.join(given)} beside it")
        plan = load(arguments.table)
    else:
        missing = [name for name, value in sizes.items() if value is None]
        if missing:
            raise UserError(f"--kind needs {' and '.join(missing)}")
        plan = make(arguments.kind, arguments.ranks, arguments.chunks, arguments.microbatches)
    show(plan, as_json=arguments.json, picture=arguments.svg, trace=arguments.trace)
    return 0


def loads(arguments: argparse.Namespace) -> int:
    """Show how a run's experts were loaded over time."""
    from penteract.load_command import show

    show(arguments.run, layer=arguments.layer, picture=arguments.svg)
    return 0


def data_build(arguments: argparse.Namespace) -> int:
    """Make a token file."""
    from penteract.data.build import Build, build

    report = build(
        Build(
            output=arguments.output,
            inputs=tuple(arguments.input),
            source=arguments.source,
            tokenizer=arguments.tokenizer,
            end_of_document=arguments.eod,
            key=arguments.key,
            workers=arguments.workers,
            limit_bytes=arguments.limit,
        )
    )
    print(f"{arguments.output}: {report.summary()}", file=sys.stderr)
    return 0


def data_chat(arguments: argparse.Namespace) -> int:
    """Make a token file of chats, for fine-tuning."""
    from penteract.data.chat import Chat, build_chat

    report = build_chat(
        Chat(
            output=arguments.output,
            inputs=tuple(arguments.input),
            tokenizer=arguments.tokenizer,
            end_of_document=arguments.eod,
            template=arguments.template,
        )
    )
    print(f"{arguments.output}: {report.summary()}", file=sys.stderr)
    return 0


def data_inspect(arguments: argparse.Namespace) -> int:
    """Describe a token file."""
    from penteract.data.build import inspect
    from penteract.data.tokenizers import load_tokenizer

    spec = arguments.tokenizer
    tokenizer = None if spec is None else load_tokenizer(spec, arguments.eod)
    print("\n".join(inspect(arguments.prefix, tokenizer)))
    return 0


def data_show(arguments: argparse.Namespace) -> int:
    """Name the samples that a step of a run saw."""
    from penteract.data.loader import show
    from penteract.train.batch_ramp import cursor, global_batch
    from penteract.train.language_model import train_source, with_vocabulary
    from penteract.train.passed import data_step
    from penteract.train.spikes import passed_in

    config, tokenizer = with_vocabulary(_load(arguments))
    assert config.checkpoint.dir is not None
    step = data_step(arguments.step, passed_in(config.checkpoint.dir))
    lines = show(
        train_source(config),
        cursor=cursor(step - 1, config.train),
        global_batch=global_batch(step, config.train),
        tokenizer=tokenizer,
    )
    print("\n".join(lines))
    return 0


def generate(arguments: argparse.Namespace) -> int:
    """Write text with a trained model."""
    from penteract.generate_command import write

    if arguments.nproc is not None:
        return start_local(arguments.nproc, _for_ranks(arguments.argv))
    write(arguments)
    return 0


RUNS: Mapping[str, options.Command] = MappingProxyType(
    {
        "train": train,
        "verify": verify,
        "layout": layout,
        "schedule": schedule,
        "loads": loads,
        "data build": data_build,
        "data chat": data_chat,
        "data inspect": data_inspect,
        "data show": data_show,
        "checkpoint inspect": checkpoint_command.inspect,
        "checkpoint verify": checkpoint_command.verify,
        "checkpoint reshard": checkpoint_command.reshard,
        "checkpoint diff": checkpoint_command.diff,
        "checkpoint pin": checkpoint_command.pin,
        "checkpoint unpin": checkpoint_command.unpin,
        "generate": generate,
    }
)
