"""Configurations from TOML files and command lines, and back.

`load(path, overrides)` reads a file, applies dotted overrides (`--train.steps 10`), and checks
everything that needs no world size. pydantic does files, types, overrides and help.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import tomli_w
from pydantic import TypeAdapter, ValidationError, create_model
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from penteract.config import (
    CheckpointConfig,
    Config,
    ConfigError,
    DataConfig,
    LogConfig,
    ModelConfig,
    MoEConfig,
    OptimConfig,
    ParallelConfig,
    SourceConfig,
    TrainConfig,
    resolve,
)

LARGEST_FILE_BYTES = 1 << 18


def keys() -> list[str]:
    """Every dotted key, in the order of the dataclasses."""
    return [f"{name}.{f.name}" for name, kind in SECTIONS.items() for f in dataclasses.fields(kind)]


SECTIONS = {
    "model": ModelConfig,
    "moe": MoEConfig,
    "parallel": ParallelConfig,
    "data": DataConfig,
    "optim": OptimConfig,
    "train": TrainConfig,
    "checkpoint": CheckpointConfig,
    "log": LogConfig,
}


def did_you_mean(word: str, known: Sequence[str], *, prefix: str = "") -> str:
    """` (did you mean X?)`, or nothing where no known word is close; a key's last part is close."""
    close = [name for name in known if name.endswith(f".{word}")]
    close = close or difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f" (did you mean {prefix}{close[0]}?)" if close else ""


class _Parser(argparse.ArgumentParser):
    """Reports an unknown option as a ConfigError with the nearest key."""

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown == message:
            raise ConfigError(f"command line: {message}")
        name = unknown.split()[0].split("=")[0]
        if not name.startswith("--"):
            raise ConfigError(f"command line: {name!r} is no option; they are --section.key VALUE")
        hint = did_you_mean(name[2:], keys(), prefix="--")
        raise ConfigError(f"command line: {name}: unknown key{hint}")


def split_config(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The configuration file of a command line, and its other words, the overrides.

    The file is the first word that ends in .toml and is not the value of an option, else the first
    word of all, else None.
    """
    options = {f"--{key}" for key in keys()}
    values = {i + 1 for i, word in enumerate(words) if word in options}
    files = (i for i, word in enumerate(words) if i not in values and word.endswith(".toml"))
    place = next(files, 0)
    if not words or words[place].startswith("-"):
        return None, list(words)
    return words[place], [*words[:place], *words[place + 1 :]]


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file, apply `--section.key value` overrides, and check what needs no world.

    Paths of token files and of the tokenizer are made absolute, relative to the file. Raises
    ConfigError.
    """
    path = Path(path)
    _check_file(path)
    try:
        settings = _settings(path, list(overrides), _Parser(prog="", allow_abbrev=False))()
    except ValidationError as error:
        raise ConfigError(_explain(error, path)) from None
    except SettingsError as error:  # an option's list or table that cannot be parsed
        raise ConfigError(f"command line: {error}") from None
    config = Config(**{f.name: getattr(settings, f.name) for f in dataclasses.fields(Config)})
    return resolve(_absolute_paths(config, path.parent))


def from_dict(values: dict[str, Any]) -> Config:
    """The configuration that `to_dict` made `values` from. Raises ConfigError."""
    try:
        return TypeAdapter(Config).validate_python(values)
    except ValidationError as error:
        raise ConfigError(_explain(error, "saved configuration")) from None


def help_text() -> str:
    """Every key as an option, with its type, default and meaning."""
    parser = _Parser(prog="", add_help=False, usage=argparse.SUPPRESS)
    with contextlib.suppress(ValidationError):
        _settings(None, [], parser)()
    return parser.format_help()


def _settings(
    path: Path | None, overrides: list[str], parser: argparse.ArgumentParser
) -> type[BaseSettings]:
    """The settings class that reads the command line, then the file."""
    fields: dict[str, Any] = {}
    for f in dataclasses.fields(Config):
        kind: Any = SECTIONS[f.name]
        absent = f.default is None  # the section may be
        default = ... if f.default is dataclasses.MISSING else f.default
        fields[f.name] = (kind | None if absent else kind, default)

    class Base(BaseSettings):
        model_config = SettingsConfigDict(extra="forbid")

        @classmethod
        def settings_customise_sources(
            cls, settings_cls: type[BaseSettings], *_: object, **__: object
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            cli: CliSettingsSource[Any] = CliSettingsSource(
                settings_cls,
                cli_parse_args=overrides,
                root_parser=parser,
                cli_hide_none_type=True,
                cli_implicit_flags=False,
            )
            return cli, TomlConfigSettingsSource(settings_cls, path)

    return create_model("Settings", __base__=Base, **fields)


def _check_file(path: Path) -> None:
    try:
        size = path.stat().st_size
        if size > LARGEST_FILE_BYTES:
            raise ConfigError(f"{path}: {size} bytes; a config holds at most {LARGEST_FILE_BYTES}")
        tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text at byte {error.start}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply") from None


def _explain(error: ValidationError, path: Path | str) -> str:
    lines = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"])
        if item["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
            known = keys() if "." in key else [f.name for f in dataclasses.fields(Config)]
            lines.append(f"{key}: unknown key{did_you_mean(key, known)}")
        elif item["type"] == "missing":
            lines.append(f"{key}: required, and not given")
        else:
            lines.append(f"{key} = {item['input']!r}: {item['msg'].removeprefix('Value error, ')}")
    return "\n".join(f"{path}: {line}" for line in lines)


def _absolute_paths(config: Config, folder: Path) -> Config:
    def absolute(source: SourceConfig) -> SourceConfig:
        return dataclasses.replace(source, prefix=str((folder / source.prefix).absolute()))

    data = config.data
    tokenizer = data.tokenizer
    if tokenizer != "bytes":
        tokenizer = str((folder / tokenizer).absolute())
    train, valid = (tuple(absolute(s) for s in x) for x in (data.train, data.valid))
    data = dataclasses.replace(data, train=train, valid=valid, tokenizer=tokenizer)
    parallel = config.parallel
    if (table := parallel.schedule or "").endswith(".json"):
        table = str((folder / table).absolute())
        parallel = dataclasses.replace(parallel, schedule=table)
    return dataclasses.replace(config, data=data, parallel=parallel)


def to_dict(config: Config) -> dict[str, Any]:
    """Plain nested dictionaries; keys whose value is None are left out."""

    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: strip(v) for k, v in value.items() if v is not None}
        return [strip(v) for v in value] if isinstance(value, (list, tuple)) else value

    return strip(dataclasses.asdict(config))


def to_toml(config: Config) -> str:
    """The configuration as TOML that `load` reads back to an equal one."""
    return tomli_w.dumps(to_dict(config))
