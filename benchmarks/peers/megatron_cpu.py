"""Megatron-Core on a CPU: the model of a `Config` with given weights, trained over gloo.

Megatron-Core expects CUDA. Little of that is needed here: where it asks for a CUDA tensor it gets
one on the CPU, a CPU tensor says that it is one of CUDA where types are compared, and nothing is
compiled. Its layers, its data-parallel wrapper, its optimizer, its clipping and its reduction of
norm gradients under sequence parallelism are its own. Written for megatron-core 0.16.1.

Its state is global, so it is imported only inside functions, in a process that ends afterwards.
"""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from penteract.config import Config

INSTALL = "pip install megatron-core==0.16.1 einops triton"
Weights = Mapping[str, Tensor]
MicroBatches = Sequence[tuple[Tensor, Tensor]]  # tokens and labels, [b, s] each
Names = dict[str, tuple[tuple[str, ...], int | None]]

# Megatron's parameter, ours that make it up, and the dim that is split over tp (None: replicated).
OUTER: Names = {
    "embedding.word_embeddings.weight": (("embed.weight",), 0),
    "decoder.final_layernorm.weight": (("norm.weight",), None),
    "output_layer.weight": (("head.weight",), 0),
}
BLOCK: Names = {
    "input_layernorm.weight": (("attention_norm.weight",), None),
    "self_attention.linear_qkv.weight": (tuple(f"attention.{x}.weight" for x in "qkv"), 0),
    "self_attention.linear_proj.weight": (("attention.o.weight",), 1),
    "pre_mlp_layernorm.weight": (("mlp_norm.weight",), None),
    "mlp.linear_fc1.weight": (("mlp.gate.weight", "mlp.up.weight"), 0),
    "mlp.linear_fc2.weight": (("mlp.down.weight",), 1),
}


class _CpuForCuda(TorchFunctionMode):
    """Tensors asked for on CUDA are made on the CPU; `type()` of a tensor says CUDA."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is Tensor.cuda:
            return args[0]
        result = func(*args, **kwargs)
        if func is Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.")
        return result


def _current_device() -> torch.device:
    return torch.device("cpu")


def _as_it_is(function: Any) -> Any:
    return function


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Within, Megatron-Core can be imported and run where there is no GPU."""
    device = mock.patch.object(torch.cuda, "current_device", _current_device)
    uncompiled = mock.patch.object(torch, "compile", _as_it_is)
    with warnings.catch_warnings(), device, uncompiled, _CpuForCuda():
        warnings.simplefilter("ignore")  # that Apex and Transformer Engine are not there
        yield


def missing_module() -> str | None:
    """The module without which Megatron-Core cannot be imported, or None."""
    try:
        with on_cpu():
            from megatron.core.models.gpt import GPTModel  # noqa: F401
    except ModuleNotFoundError as error:
        return error.name
    return None


def train(
    config: Config, weights: Weights, steps: Sequence[MicroBatches]
) -> list[dict[str, float]]:
    """Train from logical `weights` as this rank of `parallel.tp` times `parallel.pp` ranks.

    The pipeline's schedule is 1F1B, its layers are cut evenly. Returns loss, grad_norm and step_ms
    of each step, named as in our metrics.
    """
    step, lines = stepping(config, weights), []
    for batches in steps:
        began = time.perf_counter()
        loss, norm = step(batches)
        ms = 1e3 * (time.perf_counter() - began)
        lines.append({"loss": loss, "grad_norm": norm, "step_ms": ms})
    return lines


def stepping(config: Config, weights: Weights) -> Callable[[MicroBatches], tuple[float, float]]:
    """A step from logical `weights` on: its mean loss on this rank's micro-batches, and its norm.

    Ranks are data ranks of `parallel.tp` tensor ranks each; `parallel.zero` 1 is its distributed
    optimizer. Reduction and gathering then overlap with computation, as ours do.
    """
    with on_cpu():
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import initialize_rng_tracker

        initialize_rng_tracker(inference_rng_tracker=True)  # the one without a CUDA generator
        tp = config.parallel.tp
        if not dist.is_initialized():
            alone = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group("gloo", store=alone, rank=0, world_size=1)
        parallel_state.initialize_model_parallel(tp, config.parallel.pp)
        model = _model(config)
        rank = parallel_state.get_tensor_model_parallel_rank()
        _copy_weights(model, config, weights, rank)
        step = _step(model, config)

    def call(batches: MicroBatches) -> tuple[float, float]:
        with on_cpu():
            return step(batches)

    return call


class _Norm(nn.RMSNorm):
    """torch's, its weight marked so that Megatron sums its gradient over tp under sp.

    Megatron's fused norm carries the same mark; its wrapper of torch's norm refuses sp.
    """

    def __init__(self, *, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def _model(config: Config) -> Any:
    """This rank's stage of Megatron's GPTModel of a resolved configuration, its weights random."""
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    ours = config.model
    theirs = TransformerConfig(
        num_layers=ours.layers,
        hidden_size=ours.hidden,
        num_attention_heads=ours.heads,
        num_query_groups=ours.kv_heads,
        kv_channels=ours.head_size,
        ffn_hidden_size=ours.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=ours.norm_eps,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=config.parallel.tp,
        sequence_parallel=config.parallel.sp,
        pipeline_model_parallel_size=config.parallel.pp,
        pipeline_dtype=torch.float32,
        batch_p2p_comm=False,  # its messages in a batch are followed by a CUDA synchronization
        use_cpu_initialization=True,
        finalize_model_grads_func=finalize_model_grads,
    )
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = _Norm
    layers = [layer] * (ours.layers // config.parallel.pp)
    return GPTModel(
        theirs,
        TransformerBlockSubmodules(layer_specs=layers, layer_norm=_Norm),
        vocab_size=ours.vocab,
        max_sequence_length=config.data.seq,
        position_embedding_type="rope",
        rotary_base=ours.rope_theta,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=ours.tied,
    )


@torch.no_grad()
def _copy_weights(model: Any, config: Config, weights: Weights, rank: int) -> None:
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    used, before = set[str](), get_transformer_layer_offset(model.config)
    for name, parameter in model.named_parameters():
        if name.startswith("decoder.layers."):  # counted from the stage's first
            _, _, number, rest = name.split(".", 3)
            name = f"decoder.layers.{before + int(number)}.{rest}"
        sources, value = _local_values(name, config, weights, rank)
        assert value.shape == parameter.shape, f"{name}: {value.shape}, {parameter.shape}"
        parameter.copy_(value)
        used.update(sources)
    stages = config.parallel.pp
    assert stages > 1 or used == set(weights), f"not in Megatron's model: {set(weights) - used}"


def _local_values(
    name: str, config: Config, weights: Weights, rank: int
) -> tuple[tuple[str, ...], Tensor]:
    """Our names for one of Megatron's parameters, and its values on tensor rank `rank`.

    Where several of ours make up one of theirs, each is cut into groups and the cuts of one group
    stand together: a key/value head with its query heads, or a rank's part of gate and up.
    """
    prefix, table = "", OUTER
    if name.startswith("decoder.layers."):
        number, name = name.removeprefix("decoder.layers.").split(".", 1)
        prefix, table = f"layers.{number}.", BLOCK
    names, dim = table[name]
    sources = tuple(prefix + source for source in names)
    if dim is None:
        return sources, weights[sources[0]]
    tp = config.parallel.tp
    groups = config.model.kv_heads if "qkv" in name else tp
    assert groups
    cuts = zip(*(weights[source].chunk(groups, dim) for source in sources), strict=True)
    local = list(cuts)[rank * groups // tp : (rank + 1) * groups // tp]
    return sources, torch.cat([part for group in local for part in group], dim)


def _optimizer(model: Any, config: Config) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    optim, distributed = config.optim, config.parallel.zero == 1
    theirs = OptimizerConfig(
        optimizer="adam",
        lr=optim.lr,
        weight_decay=optim.weight_decay,
        adam_beta1=optim.betas[0],
        adam_beta2=optim.betas[1],
        adam_eps=optim.eps,
        clip_grad=optim.clip,
        use_distributed_optimizer=distributed,
        overlap_param_gather=distributed,
    )
    optimizer = get_megatron_optimizer(theirs, [model])
    # Its scheduler, which does this at each step, is not in use: the rate is constant.
    for group in optimizer.param_groups:
        group["weight_decay"] *= group["wd_mult"]  # 0 for norms
    return optimizer


def _step(model: Any, config: Config) -> Callable[[MicroBatches], tuple[float, float]]:
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.pipeline_parallel import get_forward_backward_func

    distributed = config.parallel.zero == 1
    how = DistributedDataParallelConfig(
        use_distributed_optimizer=distributed,
        overlap_grad_reduce=parallel_state.get_data_parallel_world_size() > 1,
        overlap_param_gather=distributed,
    )
    model = DistributedDataParallel(model.config, how, model)
    model.config.no_sync_func = model.no_sync  # reduced once, after the last micro-batch
    optimizer, run = _optimizer(model, config), get_forward_backward_func()
    seq, size = config.data.seq, config.train.micro_batch
    hidden = torch.ones(seq, seq, dtype=torch.bool).triu(1)[None, None]  # true: not attended to
    positions = torch.arange(seq).expand(size, seq)

    def loss(out: Tensor) -> tuple[Tensor, Tensor]:
        mean = out.mean()  # of [b, s]; Megatron divides it in place by the number of micro-batches
        return mean, mean.detach().clone()

    def forward(batches: Iterator[tuple[Tensor, Tensor]], model: nn.Module) -> Any:
        tokens, labels = next(batches)
        return model(tokens, positions, hidden, labels=labels), loss

    def step(batches: MicroBatches) -> tuple[float, float]:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = run(
            forward_step_func=forward,
            data_iterator=iter(batches),
            model=model,
            num_microbatches=len(batches),
            seq_length=seq,
            micro_batch_size=size,
            forward_only=False,
        )
        _, norm, _ = optimizer.step()
        mean = torch.tensor(math.fsum(map(float, losses)) / len(batches), dtype=torch.float64)
        if config.parallel.pp > 1:  # only the last stage has losses
            dist.all_reduce(mean, group=parallel_state.get_pipeline_model_parallel_group())
        return mean.item(), float(norm)

    return step
