"""`penteract generate`: a checkpoint, a prompt, and the text that follows, token by token."""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
from collections.abc import Mapping
from typing import Any

import torch

from penteract.checkpoint.io import find_step
from penteract.checkpoint.model import load_model, load_pipelined
from penteract.checkpoint.remote import Place
from penteract.config import Config
from penteract.data.chat import question
from penteract.data.template import find_template
from penteract.data.tokenizers import Tokenizer, load_tokenizer
from penteract.errors import UserError
from penteract.grid import Grid
from penteract.launch import Launch, connect, environment
from penteract.mesh import create_mesh
from penteract.nn.generate import Sampling, generate


def write(arguments: argparse.Namespace) -> None:
    """Print the prompt and what the model makes of it; its checkpoint may be cut over ranks."""
    path, launch = find_step(arguments.checkpoint), environment()
    model, config, state, device = _loaded(path, launch)
    spec = arguments.tokenizer or config.data.tokenizer
    tokenizer = load_tokenizer(spec, config.data.end_of_document)
    if tokenizer.hash != state.get("tokenizer", tokenizer.hash):
        raise UserError(f"{path} was trained with another tokenizer: name it with --tokenizer")
    prompt, stop = _prompt(arguments, tokenizer, spec, state.get("chat"))
    prompts = torch.tensor([prompt], device=device)
    try:
        sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p, arguments.seed)
        tokens = generate(
            model, prompts, max_tokens=arguments.max_tokens, sampling=sampling, stop=stop
        )
        first = next(tokens)  # the lengths are checked here
    except ValueError as error:
        raise UserError(str(error)) from None
    stream = tokenizer.stream()
    with contextlib.ExitStack() as quiet:
        if launch.rank:  # all ranks draw the same tokens; one says them
            quiet.enter_context(contextlib.redirect_stdout(io.StringIO()))
        print("" if arguments.chat else arguments.prompt, end="", flush=True)
        for (token,) in itertools.chain([first], tokens):
            if token != stop:
                print(stream.push(token), end="", flush=True)
        print(stream.finish())


def _prompt(
    arguments: argparse.Namespace, tokenizer: Tokenizer, spec: str, kept: Mapping[str, str] | None
) -> tuple[list[int], int | None]:
    """The tokens to go on from, and the one that ends the text; `kept` is the run's template."""
    if arguments.template is not None and not arguments.chat:
        raise UserError("--template is for --chat")
    tokens, stop = tokenizer.encode(arguments.prompt).tolist(), tokenizer.end_of_document
    if arguments.chat:
        template = find_template(arguments.template, spec, tokenizer, kept=kept)
        tokens, stop = question(arguments.prompt, template, tokenizer)
    return tokens or [tokenizer.end_of_document], None if arguments.ignore_end else stop


def _loaded(path: Place, launch: Launch) -> tuple[Any, Config, dict[str, Any], torch.device]:
    """The model, whole or a stage of it, its configuration and saved state, and the device."""
    device = connect(launch)
    if launch.world == 1:
        return (*load_model(path, device=device), device)
    pp = create_mesh(Grid(launch.world, pp=launch.world), launch.rank).axis("pp")
    return (*load_pipelined(path, pp, device=device), device)
