"""What `--layout "tp=2,sp=true"` means: a configuration and the number of ranks it needs. Pure.

Keys are those of [parallel], and `dp`; `section.key=value` reaches other keys, as long as they do
not change what is trained. Sizes that are not named are 1, `dp` the least that works.
"""

from __future__ import annotations

import dataclasses
import tomllib
from dataclasses import dataclass
from typing import Any

from penteract.config import Config, ConfigError, ParallelConfig, resolve
from penteract.config_file import did_you_mean, from_dict, keys, to_dict
from penteract.errors import UserError
from penteract.grid import Grid
from penteract.layout_rules import SIZES, least_dp
from penteract.train.pipeline import check

# With another value of these a layout would train something else than the reference does.
TRAINED = ("model.", "moe.", "data.", "optim.")
TRAINED_KEYS = tuple(
    f"train.{key}"
    for key in ("steps", "global_batch", "ramp", "dtype", "seed", "label_smoothing", "z_loss")
)
# But for these, which say how the same function is computed.
COMPUTED = ("model.attention", "moe.dispatcher", "moe.pad")
# These hold for the whole command.
COMMAND_KEYS = ("train.device", "train.max_minutes")
LARGEST_WORLD = 128  # of local processes


@dataclass(frozen=True)
class Layout:
    """One way to spread the training of a configuration over `world` ranks."""

    text: str  # as it was asked for
    config: Config
    world: int

    @property
    def grid(self) -> Grid:
        p = self.config.parallel
        return Grid(self.world, tp=p.tp, cp=p.cp, pp=p.pp, ep=p.ep, etp=p.etp, order=p.order)

    @property
    def values(self) -> dict[str, Any]:
        """What [parallel] says that is not its default, with `dp`; and other keys that were set."""
        ours, default = self.config.parallel, reference(self.config).parallel
        names = [field.name for field in dataclasses.fields(ParallelConfig)]
        found = {
            name: value
            for name in names
            if (value := getattr(ours, name)) != getattr(default, name)
        }
        if ours.etp == ours.tp:  # it follows tp
            found.pop("etp", None)
        others = {key: value for key, value in _items(self.text) if "." in key}
        others = {k: v for k, v in others.items() if not k.startswith("parallel.")}
        return {**found, "dp": self.grid.dp, **others}


def reference(config: Config) -> Config:
    """The same training with every key of [parallel] at its default, for one process."""
    return resolve(dataclasses.replace(config, parallel=ParallelConfig()))


def parse_layout(text: str, config: Config) -> Layout:
    """The layout that `text` asks of `config`, which is resolved.

    Raises UserError where a key or value is wrong, a key changes what is trained, or no world
    fits the sizes.
    """
    given: dict[str, Any] = {}
    for key, value in _items(text):
        key = key.removeprefix("parallel.")
        if key in given:
            raise ConfigError(f'--layout "{text}": {key} is given twice')
        given[key] = value
    _check_keys(text, given)
    dp = given.pop("dp", None)
    values = to_dict(config)
    parallel = {k: v for k, v in values["parallel"].items() if k not in SIZES}
    values["parallel"] = parallel
    for key, value in given.items():
        section, dot, name = key.rpartition(".")
        if dot:
            values[section][name] = value
        else:
            parallel[key] = _listed(key, value)
    try:
        made = resolve(from_dict(values))
        _check_micro_batch(made, config)
        world = _world(made.parallel, dp)
        check(made, world)
    except UserError as error:
        said = str(error).replace("saved configuration: ", "")
        raise ConfigError(f'--layout "{text}": {said}') from None
    return Layout(text, made, world)


def _items(text: str) -> list[tuple[str, Any]]:
    """The keys and values of "a=1,b='x,y'": commas in quotes or brackets do not separate."""
    parts, quote, depth = [""], "", 0
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        depth += (not quote) * ((letter == "[") - (letter == "]"))
        if letter == "," and not quote and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    found = []
    for part in parts if text.strip() else []:
        key, equals, value = part.partition("=")
        if not (key.strip() and equals and value.strip()):
            raise ConfigError(
                f'--layout "{text}": {part.strip()!r} is not KEY=VALUE; write layouts as '
                '"tp=2,sp=true"'
            )
        found.append((key.strip(), _value(value.strip())))
    return found


def _value(text: str) -> Any:
    """A value as TOML reads it; a bare word is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _listed(key: str, value: Any) -> Any:
    """A quoted list, "a,b", for a key that holds a list."""
    if isinstance(value, str) and isinstance(getattr(ParallelConfig(), key, None), tuple):
        return [part.strip() for part in value.split(",")]
    return value


def _check_keys(text: str, given: dict[str, Any]) -> None:
    parallel = [field.name for field in dataclasses.fields(ParallelConfig)]
    known = ["dp", *parallel, *(key for key in keys() if not key.startswith("parallel."))]
    for key in given:
        if key not in known:
            raise ConfigError(f'--layout "{text}": {key}: unknown key{did_you_mean(key, known)}')
        trained = key.startswith(TRAINED) and key not in COMPUTED
        if trained or key in TRAINED_KEYS or key in COMMAND_KEYS:
            raise ConfigError(
                f'--layout "{text}": {key} changes what is trained, not how it is spread; to set '
                f"it for the reference and every layout give --{key} beside --layout"
            )


def _check_micro_batch(made: Config, config: Config) -> None:
    """Refuse another micro-batch where a result depends on what is in one."""
    if made.train.micro_batch == config.train.micro_batch:
        return
    rates = {f"model.{key}": getattr(config.model, key) for key in ("dropout", "attention_dropout")}
    found = [
        (f"{key} = {rate}", f"--{key} 0", "masks are those of")
        for key, rate in rates.items()
        if rate
    ]
    if (moe := config.moe) is not None:
        if moe.balance in ("aux", "sinkhorn"):
            key = "moe.balance"
            found.append((f"{key} = {moe.balance}", f"--{key} none", "loads are balanced within"))
        if moe.capacity is not None:
            found.append(
                (f"moe.capacity = {moe.capacity}", "no capacity", "experts are full within")
            )
    for setting, instead, why in found:
        raise ConfigError(
            f"train.micro_batch = {made.train.micro_batch} with {setting}: {why} a micro-batch, so "
            f"another size trains something else; give {instead}, or --train.micro_batch for all "
            f"layouts"
        )


def _world(parallel: ParallelConfig, dp: Any) -> int:
    least = least_dp({name: getattr(parallel, name) for name in SIZES})
    dp = least if dp is None else dp
    if isinstance(dp, bool) or not isinstance(dp, int) or dp < 1:
        raise ConfigError(f"dp = {dp!r} is not a whole number of 1 or more")
    world = int(dp * parallel.tp * parallel.cp * parallel.pp)
    if world > LARGEST_WORLD:
        raise ConfigError(
            f"{world} ranks are {world} processes on this machine, and it starts at most "
            f"{LARGEST_WORLD}: verify the same axes with smaller sizes"
        )
    return world
