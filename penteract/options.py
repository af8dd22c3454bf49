"""What every command takes on the command line, and its help."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Command = Callable[[argparse.Namespace], int]

CHECKPOINT = "a step, or the folder of steps; a URL too"
WITH_CONFIG = "%(prog)s CONFIG.toml [options] [--section.key VALUE ...]"


def parser(runs: Mapping[str, Command]) -> argparse.ArgumentParser:
    """The command line, each command with the function that runs it."""
    whole = argparse.ArgumentParser(
        prog="penteract",
        description="Train Transformer language models split over any number of devices.",
        epilog="`penteract COMMAND --help` shows each command's options and an example.",
        allow_abbrev=False,
    )
    commands = whole.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_train(commands, runs["train"])
    _add_verify(commands, runs["verify"])
    _add_layout(commands, runs["layout"])
    _add_schedule(commands, runs["schedule"])
    _add_loads(commands, runs["loads"])
    _add_data(commands, runs)
    _add_checkpoint(commands, runs)
    _add_generate(commands, runs["generate"])
    return whole


def _command(
    commands: Any, name: str, run: Command, example: str, **options: Any
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=run.__doc__,
        description=run.__doc__,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        **options,
    )
    parser.set_defaults(command=run, parser=parser)
    return parser


def _positive(text: str) -> int:
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def _range(text: str) -> tuple[int, ...]:
    """N, or MIN:MAX."""
    found = tuple(_positive(part) for part in text.split(":"))
    if len(found) > 2 or list(found) != sorted(found):
        raise argparse.ArgumentTypeError(f"{text!r} is not N or MIN:MAX")
    return found


def _add_train(commands: Any, run: Command) -> None:
    example = "penteract train configs/demo.toml --nproc 2 --train.steps 100"
    p = _command(commands, "train", run, example, add_help=False, usage=WITH_CONFIG)
    p.add_argument("-h", "--help", action="store_true", help="show this, and every key")
    p.add_argument(
        "--nproc", type=_range, metavar="N", help="start N local ranks; MIN:MAX with restarts"
    )
    p.add_argument(
        "--max-restarts",
        type=_positive,
        default=0,
        metavar="N",
        help="start ranks that failed again from the newest checkpoint, N times without a new one",
    )
    p.add_argument("--print-config", action="store_true", help="print the resolved TOML and stop")
    p.add_argument(
        "--dry-run", action="store_true", help="one step on shapes alone, as any rank of any world"
    )
    p.add_argument("--world", type=_positive, metavar="N", help="world of a dry run")
    p.add_argument("--rank", type=int, metavar="R", help="rank of a dry run")


def _add_verify(commands: Any, run: Command) -> None:
    example = 'penteract verify configs/demo.toml --layout "tp=2,sp=true" --layout "dp=2" --shrink'
    p = _command(commands, "verify", run, example, usage=WITH_CONFIG)
    keys = "keys of [parallel] and dp; may be given several times"
    p.add_argument("--layout", action="append", metavar="KEYS", help=keys)
    p.add_argument("--steps", type=_positive, metavar="N", help="updates (2)")
    dtypes = ["float64", "float32", "bfloat16"]
    p.add_argument("--dtype", choices=dtypes, help="of weights and activations (float64)")
    p.add_argument("--json", type=Path, metavar="FILE", help="write the numbers")
    p.add_argument("--shrink", action="store_true", help="cut the sizes, keep the structure")
    p.add_argument("--fuzz", type=_positive, metavar="N", help="N random models and layouts")
    p.add_argument("--seed", type=int, default=0, help="of --fuzz (0)")
    p.add_argument("--max-world", type=_positive, default=4, metavar="W", help="of --fuzz (4)")


def _add_layout(commands: Any, run: Command) -> None:
    example = "penteract layout --world 32 --tp 8 --pp 2 --etp 2 --ep 4"
    p = _command(commands, "layout", run, example)
    p.add_argument("--world", type=int, required=True, metavar="N", help="number of ranks")
    for name in ("tp", "cp", "pp", "ep"):
        p.add_argument(f"--{name}", type=int, default=1, metavar="N", help=f"size of {name}")
    p.add_argument("--etp", type=int, metavar="N", help="size of etp (default: that of tp)")
    p.add_argument(
        "--order", default="tp-cp-ep-dp-pp", help="axes, fastest-varying first (%(default)s)"
    )
    p.add_argument(
        "--gpus-per-node", type=_positive, default=8, metavar="N", help="for the picture (8)"
    )
    p.add_argument("--json", action="store_true", help="print the groups as JSON")


def _add_schedule(commands: Any, run: Command) -> None:
    example = "penteract schedule --kind interleaved --ranks 4 --chunks 2 --microbatches 8"
    p = _command(commands, "schedule", run, example)
    which = p.add_mutually_exclusive_group(required=True)
    kinds = "gpipe, 1f1b, 1f1b-pairs, interleaved, zb-h1, zb-v or dualpipe-v"
    which.add_argument("--kind", metavar="KIND", help=kinds)
    which.add_argument("--table", type=Path, metavar="FILE", help="your own, as --json prints it")
    p.add_argument("--ranks", type=_positive, metavar="N", help="pipeline ranks")
    p.add_argument(
        "--chunks", type=_positive, metavar="N", help="stages a rank (1, or 2 for the V kinds)"
    )
    p.add_argument("--microbatches", type=_positive, metavar="N", help="of one update")
    p.add_argument("--json", action="store_true", help="print the actions and figures as JSON")
    p.add_argument("--svg", type=Path, metavar="FILE", help="write a picture")
    p.add_argument("--trace", type=Path, metavar="FILE", help="write a trace for Perfetto")


def _add_loads(commands: Any, run: Command) -> None:
    p = _command(commands, "loads", run, "penteract loads demo/moe --svg loads.svg")
    p.add_argument("run", type=Path, metavar="RUN", help="a run's folder, or its metrics.jsonl")
    p.add_argument("--svg", type=Path, metavar="FILE", help="write a picture")
    p.add_argument("--layer", metavar="NAME", help="this layer alone, such as layers.1.moe")


def _add_data(commands: Any, runs: Mapping[str, Command]) -> None:
    about = "Make, describe and look into token files."
    group = commands.add_parser("data", help=about, description=about, allow_abbrev=False)
    data = group.add_subparsers(title="commands", required=True, metavar="COMMAND")
    example = "penteract data build --source stdlib --tokenizer bytes --output data/stdlib"
    p = _command(data, "build", runs["data build"], example)
    text = p.add_mutually_exclusive_group(required=True)
    text.add_argument(
        "--input", nargs="+", default=[], metavar="FILE", help=".txt and .jsonl files, or folders"
    )
    text.add_argument("--source", choices=["stdlib"], help="this Python's own library sources")
    p.add_argument("--tokenizer", default="bytes", help="bytes, or a tokenizer.json (bytes)")
    p.add_argument("--output", required=True, metavar="PREFIX", help="writes PREFIX.bin and .idx")
    p.add_argument("--workers", type=_positive, default=1, metavar="N", help="processes (1)")
    p.add_argument("--eod", metavar="TOKEN", help="the token that ends a document")
    p.add_argument("--key", default="text", help="the text's key in .jsonl (text)")
    p.add_argument("--limit", type=_positive, metavar="BYTES", help="stop after so much text")
    example = "penteract data chat --input chats.jsonl --tokenizer bytes --output data/chats"
    p = _command(data, "chat", runs["data chat"], example)
    p.add_argument(
        "--input", nargs="+", required=True, metavar="FILE", help=".jsonl files, or folders"
    )
    p.add_argument("--tokenizer", default="bytes", help="bytes, or a tokenizer.json (bytes)")
    p.add_argument("--output", required=True, metavar="PREFIX", help="writes PREFIX.bin and .mask")
    p.add_argument("--template", metavar="FILE", help="Jinja; else the tokenizer's own, or roles")
    p.add_argument("--eod", metavar="TOKEN", help="the token that ends a document")
    p = _command(data, "inspect", runs["data inspect"], "penteract data inspect data/stdlib")
    p.add_argument("prefix", metavar="PREFIX", help="a token file without .bin/.idx")
    p.add_argument("--tokenizer", help="to show the first tokens as text")
    p.add_argument("--eod", metavar="TOKEN", help="the tokenizer's token that ends a document")
    example = "penteract data show configs/demo.toml --step 1000"
    p = _command(data, "show", runs["data show"], example, usage=WITH_CONFIG)
    p.add_argument("--step", type=_positive, required=True, metavar="N", help="from 1")


def _add_checkpoint(commands: Any, runs: Mapping[str, Command]) -> None:
    about = "Look into checkpoints, compare them, write them in other files."
    group = commands.add_parser("checkpoint", help=about, description=about, allow_abbrev=False)
    checkpoint = group.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name in ("inspect", "verify"):
        example = f"penteract checkpoint {name} runs/default/checkpoints"
        p = _command(checkpoint, name, runs[f"checkpoint {name}"], example)
        p.add_argument("checkpoint", metavar="CHECKPOINT", help=CHECKPOINT)
    example = "penteract checkpoint reshard runs/default/checkpoints runs/weights --weights-only"
    p = _command(checkpoint, "reshard", runs["checkpoint reshard"], example)
    p.add_argument("checkpoint", metavar="CHECKPOINT", help=CHECKPOINT)
    p.add_argument("out", metavar="OUT", help="the folder of steps to write it in")
    size = p.add_mutually_exclusive_group()
    size.add_argument("--files", type=_positive, metavar="N", help="files of even size (1)")
    size.add_argument("--max-bytes", type=_positive, metavar="N", help="length of a file, at most")
    p.add_argument("--weights-only", action="store_true", help="leave masters and moments out")
    example = "penteract checkpoint diff runs/a/checkpoints runs/b/checkpoints/step-00000100"
    p = _command(checkpoint, "diff", runs["checkpoint diff"], example)
    for name in ("a", "b"):
        p.add_argument(name, metavar=name.upper(), help=CHECKPOINT)
    p.add_argument("--all", action="store_true", help="every difference, not the worst alone")
    p.add_argument("--json", action="store_true", help="print the differences as JSON")
    for name in ("pin", "unpin"):
        example = f"penteract checkpoint {name} runs/default/checkpoints/step-00001000"
        p = _command(checkpoint, name, runs[f"checkpoint {name}"], example)
        p.add_argument("checkpoint", metavar="STEP", help=CHECKPOINT)


def _add_generate(commands: Any, run: Command) -> None:
    example = 'penteract generate runs/default/checkpoints --prompt "def main("'
    p = _command(commands, "generate", run, example)
    p.add_argument("checkpoint", metavar="CHECKPOINT", help=CHECKPOINT)
    p.add_argument(
        "--nproc", type=_positive, metavar="N", help="one stage on each of N local ranks"
    )
    p.add_argument("--prompt", default="", help="text to go on from")
    p.add_argument("--chat", action="store_true", help="answer the prompt, as a user's message")
    p.add_argument("--template", metavar="FILE", help="with --chat: not the run's own template")
    p.add_argument("--max-tokens", type=_positive, default=256, metavar="N", help="at most (256)")
    p.add_argument("--temperature", type=float, default=0.8, help="0: the likeliest token (0.8)")
    p.add_argument("--top-k", type=_positive, metavar="K", help="draw from the K likeliest tokens")
    p.add_argument("--top-p", type=float, default=1.0, metavar="P", help="smallest set reaching P")
    p.add_argument("--seed", type=int, default=0, help="of the draws (0)")
    p.add_argument("--ignore-end", action="store_true", help="go on after the end of a document")
    p.add_argument("--tokenizer", help="where the run's tokenizer.json is now")
