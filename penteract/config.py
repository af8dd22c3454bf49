"""The configuration: one tree of frozen dataclasses, and every rule that joins its keys.

Its sections are in `penteract/config_sections.py` and `penteract/config_output.py`, the rules of
the layout alone in `penteract/layout_rules.py`; `penteract/config_file.py` reads and writes TOML.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from pydantic.dataclasses import dataclass

from penteract.config_output import CheckpointConfig, LogConfig
from penteract.config_sections import (
    STRICT,
    ConfigError,
    DataConfig,
    InjectConfig,
    ModelConfig,
    MoEConfig,
    OptimConfig,
    ParallelConfig,
    RuleConfig,
    SourceConfig,
    TrainConfig,
)
from penteract.config_values import RECOMPUTE
from penteract.layout_rules import (
    check_experts,
    check_inner,
    check_layout,
    check_replicas,
    divisors,
)

__all__ = [
    "RECOMPUTE",
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "InjectConfig",
    "LogConfig",
    "MoEConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "RuleConfig",
    "SourceConfig",
    "TrainConfig",
    "check_world",
    "resolve",
]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Config:
    """The whole configuration of a run."""

    model: ModelConfig
    moe: MoEConfig | None = None
    parallel: ParallelConfig = ParallelConfig()
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()


def resolve(config: Config) -> Config:
    """Fill in defaults that depend on other keys; check every rule that needs no world size."""
    _check_weights(config.data.train)
    _check_validation(config)
    if config.data.predict_across and not config.data.packing:
        raise ConfigError(
            "data.predict_across = true needs data.packing = true: without packing every token "
            "predicts the next one"
        )
    ends = [until for until, _ in config.train.ramp]
    if ends != sorted(set(ends)):
        raise ConfigError(f"train.ramp: steps must rise, got {ends}")
    if "://" in config.log.dir:
        raise ConfigError(
            f"log.dir = {config.log.dir} is a URL: logs need a disk; checkpoint.dir can be a URL"
        )
    if 0 < config.log.slow <= 1:
        raise ConfigError(
            f"log.slow = {config.log.slow} times the median would name ranks that are not slow: it "
            "can be above 1, such as 1.5, or 0 to name none"
        )
    _check_rewinds(config.train, config.checkpoint)
    _check_start(config.checkpoint, config.moe)
    if config.checkpoint.keep_every and config.checkpoint.keep is None:
        raise ConfigError(
            f"checkpoint.keep_every = {config.checkpoint.keep_every}: all steps are kept: give "
            "checkpoint.keep, the number of newest ones to keep besides, or leave it out"
        )
    return dataclasses.replace(
        config,
        model=_resolve_model(config.model, config.data.seq),
        moe=_resolve_moe(config.moe, config.model, config.parallel),
        optim=_resolve_optim(config.optim, config.train.steps),
        parallel=dataclasses.replace(
            config.parallel, etp=config.parallel.etp or config.parallel.tp
        ),
        checkpoint=dataclasses.replace(
            config.checkpoint, dir=config.checkpoint.dir or f"{config.log.dir}/checkpoints"
        ),
    )


def _check_weights(sources: tuple[SourceConfig, ...]) -> None:
    without = [source.prefix for source in sources if source.weight is None]
    if 0 < len(without) < len(sources):
        raise ConfigError(
            f"data.train: give every source a weight or none; without one: {', '.join(without)}"
        )


def _check_rewinds(train: TrainConfig, checkpoint: CheckpointConfig) -> None:
    """Where a run goes back before a spike, a step that is old enough must be there."""
    if train.on_spike != "rewind":
        return
    if not checkpoint.every:
        raise ConfigError(
            'train.on_spike = "rewind" goes back to a saved step: give checkpoint.every, the steps '
            "between two of them"
        )
    needed = 1 + -(-(train.rewind_steps - 1) // checkpoint.every)
    if checkpoint.keep is not None and checkpoint.keep < needed:
        raise ConfigError(
            f"checkpoint.keep = {checkpoint.keep}: with checkpoint.every = {checkpoint.every} none "
            f"of the newest {checkpoint.keep} may be train.rewind_steps = {train.rewind_steps} "
            f"steps old when a loss spikes: keep at least {needed}"
        )


def _check_start(checkpoint: CheckpointConfig, moe: MoEConfig | None) -> None:
    """What a run is to start from."""
    for key in ("load_state", "upcycle", "load_only", "load_missing"):
        value = getattr(checkpoint, key)
        if value and checkpoint.load is None:
            said = "true" if value is True else list(value)
            raise ConfigError(f"checkpoint.{key} = {said} needs checkpoint.load")
    if checkpoint.load_state and (checkpoint.load_only or checkpoint.load_missing):
        key = "load_only" if checkpoint.load_only else "load_missing"
        raise ConfigError(
            f"checkpoint.load_state = true goes on with the whole of another run: leave it out, or "
            f"checkpoint.{key}"
        )
    if not checkpoint.upcycle:
        return
    if moe is None:
        raise ConfigError("checkpoint.upcycle = true makes experts: they need [moe]")
    if checkpoint.load_state:
        raise ConfigError(
            "checkpoint.upcycle = true starts from weights alone, as a dense model's moments are "
            "not those of experts: leave out checkpoint.load_state"
        )
    if moe.shared_ffn is not None:
        raise ConfigError(
            f"moe.shared_ffn = {moe.shared_ffn}: checkpoint.upcycle = true has no weights for "
            "shared experts, whose output would come on top of the dense model's: leave it out"
        )


def _check_validation(config: Config) -> None:
    """Losses are reported by the sources' names, over train.eval_steps global batches."""
    key, sources = "data.valid", config.data.valid
    if not sources and config.data.valid_fraction > 0:
        key, sources = "data.train", config.data.train
    names = [Path(source.prefix).name for source in sources]
    if len(set(names)) != len(names):
        raise ConfigError(f"{key}: names of validation sets must differ, got {names}")
    if sources and config.train.eval_steps == 0:
        raise ConfigError(
            "train.eval_steps = 0 evaluates nothing: it must be at least 1; to switch evaluation "
            "off, leave data.valid empty and data.valid_fraction 0"
        )


def _resolve_model(model: ModelConfig, seq: int) -> ModelConfig:
    if model.head_size is None and model.hidden % model.heads:
        raise ConfigError(
            f"model.hidden = {model.hidden} is no multiple of model.heads = {model.heads}: give "
            f"model.head_size, or hidden = {_nearest_multiples(model.hidden, model.heads)}"
        )
    head_size = model.head_size or model.hidden // model.heads
    kv_heads = model.kv_heads or model.heads
    if model.heads % kv_heads:
        raise ConfigError(
            f"model.heads = {model.heads} is no multiple of model.kv_heads = {kv_heads}: each "
            f"key/value head serves equally many query heads; kv_heads that work: "
            f"{', '.join(map(str, divisors(model.heads)))}"
        )
    if model.family == "llama" and head_size % 2:
        raise ConfigError(
            f"model.head_size = {head_size}: rotary positions need an even size; nearest: "
            f"model.head_size = {_nearest_multiples(head_size, 2)}"
        )
    if model.softcap is not None and model.attention == "flash":
        raise ConfigError(
            f"model.softcap = {model.softcap}: the flash kernels have no soft cap; give "
            f'model.attention = "flex" or "plain"'
        )
    if model.attention_dropout and model.attention != "plain":
        raise ConfigError(
            f"model.attention_dropout = {model.attention_dropout}: the fused kernels' masks would "
            f'differ by layout; give model.attention = "plain", or use model.dropout'
        )
    max_positions = model.max_positions or seq
    if model.family == "gpt2" and seq > max_positions:
        raise ConfigError(
            f"data.seq = {seq} is longer than model.max_positions = {max_positions}: data.seq can "
            f"be at most {max_positions}, or model.max_positions at least {seq}"
        )
    return dataclasses.replace(
        model,
        head_size=head_size,
        kv_heads=kv_heads,
        bias=(model.family == "gpt2") if model.bias is None else model.bias,
        max_positions=max_positions,
    )


def _resolve_moe(
    moe: MoEConfig | None, model: ModelConfig, parallel: ParallelConfig
) -> MoEConfig | None:
    if moe is None:
        of_experts = {"experts", "expert_act"} & set(parallel.recompute)
        if parallel.ep > 1 or of_experts:
            key = f"ep = {parallel.ep}" if parallel.ep > 1 else f'recompute: "{min(of_experts)}"'
            raise ConfigError(f"parallel.{key}: the model has no experts; they need [moe]")
        return None
    check_experts(moe.experts, ep=parallel.ep)
    if moe.experts % moe.groups:
        raise ConfigError(
            f"moe.groups = {moe.groups} does not divide moe.experts = {moe.experts}: it can be "
            f"{', '.join(map(str, divisors(moe.experts)))}"
        )
    topk_groups = moe.topk_groups or moe.groups
    if topk_groups > moe.groups:
        raise ConfigError(
            f"moe.topk_groups = {topk_groups} of moe.groups = {moe.groups}: it can be at most that"
        )
    reach = moe.experts // moe.groups * topk_groups
    if moe.topk > reach:
        raise ConfigError(
            f"moe.topk = {moe.topk} experts for a token that can choose among {reach}: moe.topk "
            f"can be at most {reach}"
        )
    if moe.shared_gate and moe.shared_ffn is None:
        raise ConfigError("moe.shared_gate = true needs shared experts: give moe.shared_ffn")
    if moe.pad and moe.capacity is None:
        raise ConfigError("moe.pad = true needs moe.capacity, to which experts are padded")
    if moe.balance == "sinkhorn" and moe.groups > 1:
        raise ConfigError('moe.balance = "sinkhorn" chooses among all experts: use moe.groups = 1')
    beyond = [i for i in moe_layers(moe, model.layers) if i >= model.layers]
    if beyond or not moe_layers(moe, model.layers):
        raise ConfigError(
            f"moe.layers = {moe.layers!r}: blocks are 0 to {model.layers - 1}, and at least one "
            f"has experts"
        )
    return dataclasses.replace(moe, ffn=moe.ffn or model.ffn, topk_groups=topk_groups)


def moe_layers(moe: MoEConfig, layers: int) -> tuple[int, ...]:
    """The numbers of the blocks that have experts."""
    if isinstance(moe.layers, tuple):
        return moe.layers
    every = 1 if moe.layers == "all" else moe.layers
    return tuple(range(every - 1, layers, every))


def _resolve_optim(optim: OptimConfig, steps: int) -> OptimConfig:
    if optim.min_lr > optim.lr:
        raise ConfigError(
            f"optim.min_lr = {optim.min_lr} is above optim.lr = {optim.lr}: optim.min_lr can be "
            f"at most {optim.lr}, or optim.lr at least {optim.min_lr}"
        )
    cooldown = optim.cooldown or max(1, (optim.decay or steps) // 10)
    rise, needed = "optim.warmup", optim.warmup
    if optim.schedule == "wsd":
        rise, needed = f"{rise} + optim.cooldown", needed + cooldown
    decay = optim.decay or max(steps, needed, 1)
    if optim.schedule in ("cosine", "linear", "wsd") and needed > decay:
        raise ConfigError(
            f"{rise} = {needed} is longer than optim.decay = {decay}: it can be at most {decay}, "
            f"or optim.decay at least {needed}"
        )
    momentum = optim.momentum
    if optim.name in ("sgd", "muon"):
        momentum = {"sgd": 0.9, "muon": 0.95}[optim.name] if momentum is None else momentum
    elif momentum is not None:
        raise ConfigError(
            f"optim.momentum = {momentum} is for sgd and muon; {optim.name} has optim.betas"
        )
    return dataclasses.replace(optim, decay=decay, cooldown=cooldown, momentum=momentum)


def _nearest_multiples(n: int, of: int) -> str:
    """The multiples of `of` below and above `n`, which is none: "60 or 65"."""
    below = n // of * of
    return " or ".join(str(multiple) for multiple in (below, below + of) if multiple)


def check_world(parallel: ParallelConfig, world: int) -> None:
    """Every rule that joins the layout with the number of ranks. Raises UserError."""
    sizes = {name: getattr(parallel, name) for name in ("tp", "cp", "pp", "ep", "etp")}
    check_layout(world, sizes, parallel.order)
    check_replicas(parallel.replicas, dp=world // (parallel.tp * parallel.cp * parallel.pp))
    grouped = parallel.cp_comm == "hierarchical" and parallel.cp > 1
    if grouped and parallel.cp_inner is not None:
        check_inner(parallel.cp_inner, cp=parallel.cp)
    etp = parallel.etp or parallel.tp
    if parallel.ep > 1 or etp != parallel.tp:
        edp = world // (etp * parallel.ep * parallel.pp)
        check_replicas(parallel.replicas, dp=edp, axis="edp")
