"""The sections of a configuration: every key with its type, its default and its help text.

The docstring below a key is its help text; its `examples` are what `penteract verify --fuzz` draws
from.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from penteract.config_values import (
    RECOMPUTE,
    Count,
    Fraction,
    MoELayers,
    Natural,
    Positive,
    Real,
    Recompute,
)
from penteract.errors import UserError


class ConfigError(UserError):
    """The user's configuration is wrong; the message says what, why, and what works."""


STRICT = ConfigDict(extra="forbid", use_attribute_docstrings=True)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ModelConfig:
    """Sizes and options of the model."""

    family: Literal["llama", "gpt2"] = Field(default="llama", examples=["llama", "gpt2"])
    """Whose structure: llama (RMSNorm, RoPE, SwiGLU) or gpt2 (LayerNorm, positions, GELU)."""
    layers: Count = Field(examples=[1, 2, 3])
    """Transformer blocks."""
    hidden: Count = Field(examples=[8, 12, 20])
    """Width of the residual stream."""
    ffn: Count = Field(examples=[7, 10, 16])
    """Width of the feed-forward layer."""
    heads: Count = Field(examples=[1, 2, 3, 4, 6])
    """Query heads."""
    kv_heads: Count | None = Field(default=None, examples=[None, 1, 2, 3])
    """Key/value heads; as many as heads unless given."""
    head_size: Count | None = Field(default=None, examples=[2, 4, 6, 8])
    """Width of a head; hidden / heads unless given."""
    vocab: Count | None = Field(default=None, examples=[11, 13, 32, 50])
    """Vocabulary; the tokenizer's unless given."""
    norm_eps: Positive = Field(default=1e-5, examples=[1e-2])
    """Added to the variance in every norm."""
    rope_theta: Positive = Field(default=10000.0, examples=[100.0, 10000.0])
    """Base of the rotary frequencies."""
    max_positions: Count | None = None
    """Learned positions (gpt2); data.seq unless given."""
    tied: bool = Field(default=False, examples=[False, True])
    """Embedding and head share one weight."""
    qk_norm: bool = Field(default=False, examples=[False, True])
    """RMSNorm over each query and key head."""
    bias: bool | None = Field(default=None, examples=[None, False, True])
    """Biases in linear layers; the family's habit unless given."""
    window: Count | None = Field(default=None, examples=[None, 1, 3])
    """Sliding window: a token attends to so many, itself included; to all before unless given."""
    sinks: bool = Field(default=False, examples=[False, True])
    """A learned score in each head that takes a share of the attention and gives nothing."""
    softcap: Positive | None = Field(default=None, examples=[None, 1.5])
    """Cap c of attention scores, c·tanh(score/c); needs attention = plain or flex."""
    attention: Literal["flash", "plain", "flex"] = Field(
        default="flash", examples=["flash", "plain"]
    )
    """What computes attention: torch's fused kernels, plain formulas, or FlexAttention."""
    dropout: Fraction = Field(default=0.0, examples=[0.0, 0.1])
    """Dropout on the embedding and on each block's two outputs."""
    attention_dropout: Fraction = Field(default=0.0, examples=[0.0, 0.1])
    """Dropout on attention's probabilities; needs attention = plain."""
    init_std: Positive = Field(default=0.02, examples=[0.02, 0.3])
    """Standard deviation of initial weights; output projections divide it by sqrt(2 layers)."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MoEConfig:
    """Experts in place of the feed-forward layer; without this section there are none."""

    experts: Count = Field(examples=[4, 6, 12])
    """Experts in a layer."""
    topk: Count = Field(default=2, examples=[1, 2, 3])
    """Experts that each token takes."""
    ffn: Count | None = Field(default=None, examples=[None, 5, 8])
    """Width of an expert; model.ffn unless given."""
    shared_ffn: Count | None = Field(default=None, examples=[None, 6])
    """Width of all shared experts together, which every token passes; none unless given."""
    shared_gate: bool = Field(default=False, examples=[False, True])
    """Each token decides by a sigmoid how much of the shared experts it takes."""
    layers: MoELayers = Field(default="all", examples=["all", 2, (0,)])
    """Which blocks have experts: all, n (every n-th, from number n-1 on), or a list of numbers."""
    score: Literal["softmax", "sigmoid"] = Field(default="softmax", examples=["softmax", "sigmoid"])
    """How the router's logits become weights."""
    normalise: bool = Field(default=True, examples=[True, False])
    """Weights of a token's experts add up to 1; softmax is then that of the chosen logits alone."""
    route_scale: Positive = Field(default=1.0, examples=[1.0, 2.5])
    """Factor of all weights."""
    groups: Count = Field(default=1, examples=[1, 2])
    """Groups that the experts are in; a token takes experts of the best groups only."""
    topk_groups: Count | None = Field(default=None, examples=[None, 1])
    """How many groups are the best ones; all unless given."""
    balance: Literal["none", "aux", "seq_aux", "global_aux", "bias", "sinkhorn"] = Field(
        default="aux", examples=["none", "aux", "seq_aux", "global_aux", "bias", "sinkhorn"]
    )
    """What keeps experts evenly loaded: a loss over each micro-batch, each sequence, or by the last
    step's loads; a bias on the choice; sinkhorn, which chooses as evenly as it can; or nothing."""
    balance_weight: Annotated[Real, Field(ge=0)] = Field(default=1e-2, examples=[1e-2, 0.5])
    """Weight of the balancing loss."""
    z_weight: Annotated[Real, Field(ge=0)] = Field(default=0.0, examples=[0.0, 1e-2])
    """Weight of the squared log-sum-exp of the router's logits."""
    bias_rate: Positive = Field(default=1e-3, examples=[0.05])
    """By how much an expert's bias moves in a step."""
    capacity: Positive | None = Field(default=None, examples=[None, 0.5, 1.0])
    """An expert takes at most capacity times its even share of a micro-batch; any unless given."""
    drop: Literal["score", "position"] = Field(default="score", examples=["score", "position"])
    """Whom a full expert drops: those of least score, or those that come last."""
    pad: bool = Field(default=False, examples=[False, True])
    """Give every expert as many rows as its capacity, so that shapes do not depend on routing."""
    dispatcher: Literal["all_to_all", "all_gather", "fused"] = Field(
        default="all_to_all", examples=["all_to_all", "all_gather"]
    )
    """How tokens reach experts: only where needed, everywhere, or by DeepEP (CUDA)."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ParallelConfig:
    """Sizes of the mesh; data parallelism takes what is left of the world."""

    tp: Count = Field(default=1, examples=[1, 2, 3, 4, 8])
    """Tensor-parallel size."""
    cp: Count = Field(default=1, examples=[1, 2, 3, 4])
    """Context-parallel size: over how many ranks each sequence is cut."""
    cp_comm: Literal["ring", "all_gather", "all_to_all", "hierarchical"] = Field(
        default="ring", examples=["ring", "all_gather", "all_to_all", "hierarchical"]
    )
    """How attention reaches other context ranks: keys and values go around a ring, or all are
    gathered, or heads are exchanged for rows, or hierarchical: heads in groups, a ring across."""
    cp_inner: Count | None = None
    """Ranks of a hierarchical group; the largest divisor of cp up to its root unless given."""
    cp_overlap: bool = Field(default=True, examples=[True, False])
    """Attend to what is there while keys and values travel."""
    pp: Count = Field(default=1, examples=[1, 2, 3, 4])
    """Pipeline-parallel size."""
    chunks: Count | None = Field(default=None, examples=[None, 2, 3])
    """Stages that each pipeline rank holds; what the schedule has unless given, mostly 1."""
    schedule: str | None = Field(
        default=None,
        examples=[
            None,
            "gpipe",
            "1f1b",
            "1f1b-pairs",
            "interleaved",
            "zb-h1",
            "zb-v",
            "dualpipe-v",
        ],
    )
    """Order of a pipeline's work: gpipe, 1f1b, 1f1b-pairs, interleaved, zb-h1, zb-v, dualpipe-v, or
    a table's .json file, relative to the TOML file; 1f1b unless given, with chunks interleaved."""
    stages: str = Field(default="even", examples=["even", "cost"])
    """How layers are cut into stages: even, cost, or "embed,3*layer | ... | 2*layer,norm,head"."""
    pp_backend: Literal["gloo", "nccl", "ucc"] | None = None
    """What carries messages between stages; what carries the others unless given."""
    pp_timeout_s: Positive = 600.0
    """Give up, naming what is missing, when a message between stages has not come for so long."""
    ep: Count = Field(default=1, examples=[1, 2, 3, 4])
    """Expert-parallel size."""
    etp: Count | None = Field(default=None, examples=[None, 1, 2])
    """Expert-tensor-parallel size; tp unless given."""
    order: str = "tp-cp-ep-dp-pp"
    """Axes, fastest-varying first."""
    sp: bool = Field(default=False, examples=[False, True])
    """Sequence parallelism: between matrices the stream is split by tokens over tp."""
    recompute: Recompute = Field(
        default=(), examples=[(), *((kind,) for kind in RECOMPUTE), ("layer/2",)]
    )
    """What backward computes again rather than keeps: layer, layer/N (every N-th), or some of
    attention, mlp, core (attention without its projections), experts (all that experts compute),
    expert_act (what they compute between their products)."""
    zero: Annotated[Natural, Field(le=3)] = Field(default=0, examples=[0, 1, 2, 3])
    """What the data ranks share out: 1 optimizer state, 2 gradients too, 3 parameters too."""
    replicas: Count = Field(default=1, examples=[1, 2])
    """Into how many groups the data ranks are split that each hold all that zero shares out."""
    dp_overlap: bool = Field(default=True, examples=[True, False])
    """Reduce gradients while backward goes on, and gather parameters while forward does."""
    ep_overlap: bool = Field(default=True, examples=[True, False])
    """Where a schedule pairs a forward with a backward (1f1b-pairs, dualpipe-v), compute one while
    tokens of the other travel to experts; not with zero = 3."""
    tp_overlap: bool = Field(default=True, examples=[True, False])
    """Send input gradients while weight gradients are computed."""
    vocab_multiple: Count = Field(default=1, examples=[1, 4])
    """Pad each tensor rank's rows of the vocabulary to a multiple of this."""
    allowed: tuple[dict[str, bool | int | str], ...] = ()
    """Layouts to choose from, [{tp = 2, pp = 2}, {tp = 2}, {}]: a run takes the first that fits the
    number of ranks it has. Sizes that one does not name are 1, other keys as in this section."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SourceConfig:
    """One token file of a blend."""

    prefix: str
    """Path without .bin/.idx, relative to the TOML file."""
    weight: Positive | None = None
    """Share of the samples, relative to the others' weights; by size where no source has one."""


def _source(value: object) -> object:
    return {"prefix": value} if isinstance(value, str) else value


Source = Annotated[SourceConfig, BeforeValidator(_source)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DataConfig:
    """Token files and how samples are cut from them."""

    train: tuple[Source, ...] = ()
    """Token-file prefixes to train on, each a string or {prefix, weight}."""
    valid: tuple[Source, ...] = ()
    """Token-file prefixes to evaluate on; each is a validation set of its own."""
    valid_fraction: Fraction = 0.0
    """Held-out tail of each training file, used where data.valid is empty."""
    seq: Count = Field(default=1024, examples=[1, 5, 8])
    """Tokens in a sequence."""
    packing: bool = Field(default=False, examples=[False, True])
    """Cut each sequence where a document starts: positions restart, attention stays inside."""
    predict_across: bool = False
    """With packing: a document's last token is to predict the next document's first. No
    conversation predicts another."""
    balance: bool = Field(default=False, examples=[False, True])
    """Order the samples of each step so that attention costs alike in all micro-batches; without
    packing all samples cost the same, and nothing changes."""
    tokenizer: str = "bytes"
    """bytes, or the path of a Hugging Face tokenizer.json, relative to the TOML file."""
    end_of_document: str | None = None
    """Token of a tokenizer.json that ends a document, as --eod of `penteract data build`."""
    seed: Natural = 0
    """Seed of the sample order."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RuleConfig:
    """How some tensors are trained unlike the others; of several rules the first that matches."""

    match: str
    """Shell pattern over logical names, such as layers.*.attention.*; * crosses dots."""
    lr: Positive = 1.0
    """Factor of the learning rate."""
    weight_decay: Annotated[Real, Field(ge=0)] | None = None
    """Instead of optim.weight_decay, whatever the tensor is."""
    freeze: bool = False
    """Never change them; they have no gradient and no optimizer state."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OptimConfig:
    """Optimizer and learning-rate schedule."""

    name: Literal["adamw", "sgd", "lion", "muon"] = Field(
        default="adamw", examples=["adamw", "sgd", "lion", "muon"]
    )
    """The optimizer; muon is for the matrices of blocks, with adamw for everything else."""
    lr: Positive = 3e-4
    """Peak learning rate."""
    min_lr: Annotated[Real, Field(ge=0)] = 0.0
    """Learning rate after decay."""
    warmup: Natural = 0
    """Steps of linear warm-up."""
    decay: Count | None = None
    """The step at which decay ends; train.steps, or the end of a longer warm-up, unless given."""
    schedule: Literal["cosine", "linear", "inverse_sqrt", "constant", "wsd"] = "cosine"
    """Shape after warm-up; wsd is warm-up, stable, then a linear cool-down."""
    cooldown: Count | None = None
    """Steps of the cool-down of wsd; a tenth of decay (of train.steps) unless given."""
    weight_decay: Annotated[Real, Field(ge=0)] = 0.1
    """Decay of weight matrices and embeddings; norms and biases never decay."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """Averaging factors of adamw and lion."""
    momentum: Fraction | None = None
    """Averaging factor of sgd (0.9 unless given) and of muon (0.95)."""
    eps: Positive = 1e-8
    """Adam's epsilon; muon adds it to the norm it divides by, lion's sign is a slope below it."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """What the moments are kept in: float32 or wider, or bfloat16, rounded up or down at random."""
    offload: bool = Field(default=False, examples=[False, True])
    """Keep masters and moments in host memory and update them there."""
    clip: Annotated[Real, Field(ge=0)] = Field(default=1.0, examples=[0.0, 0.01])
    """Largest global gradient norm; 0 switches clipping off."""
    clip_norm: Literal["2", "inf"] = Field(default="2", examples=["2", "inf"])
    """Which norm clip limits and the log shows: 2, or inf for the largest magnitude."""
    loss_scale: Positive = 65536.0
    """The first scale of the loss in float16; it falls and rises by itself."""
    loss_scale_every: Count = 1000
    """Good steps in a row before the loss scale doubles."""
    rules: tuple[RuleConfig, ...] = ()
    """Tables [[optim.rules]]: what is frozen, or has a learning rate or decay of its own."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class InjectConfig:
    """A fault to be planted, to see what a run does about it."""

    step: Count
    """In which step; where a run passes data over, with the data of which step."""
    rank: Natural = 0
    """On which rank."""
    kind: Literal["nan", "inf", "spike", "weight", "slow"] = "nan"
    """What the rank's forwards are multiplied by: a NaN, infinity, or 1000 (spike). Or weight: a
    bit of one of its weights is flipped after the step; slow: it sleeps a second in the step."""
    times: Natural = 1
    """How often, reruns counted: 1 looks like hardware; 0 is always, like bad data."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TrainConfig:
    """Length, batch, precision."""

    steps: Natural
    """Updates in the whole run."""
    global_batch: Count = Field(default=8, examples=[1, 2, 3, 4, 5, 6])
    """Sequences an update, over all ranks."""
    micro_batch: Count = Field(default=1, examples=[1, 2, 3])
    """Sequences a data rank and forward."""
    ramp: tuple[tuple[Count, Count], ...] = ()
    """Smaller batches at the start: [[100, 8], [300, 16]] is 8 through step 100, 16 through 300."""
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = "float32"
    """Of weights and activations; 16-bit types keep float32 masters, float16 scales the loss."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """After a NaN or an infinity in loss or gradient: stop, or skip the update and go on."""
    rerun: Literal["off", "nonfinite", "outliers"] = "nonfinite"
    """Run a step again before anything is kept of it: where it is not finite, or an outlier too.
    The same again is data or model, something else hardware: exit code 4 on a CPU or where torch is
    deterministic."""
    outlier: Positive = 8.0
    """With rerun = outliers or on_spike = rewind: how many standard deviations of the last 32 steps
    above their mean are too many, of the loss or of the gradient norm."""
    on_spike: Literal["keep", "rewind"] = "keep"
    """After a step whose loss or gradient norm is an outlier: keep it, or go back to a saved step
    and on from there with the data that follows the spike's."""
    rewind_steps: Count = 100
    """With on_spike = rewind: go back to the newest saved step that is so many steps before."""
    check_replicas: Natural = 0
    """Every so many steps, and before a save, compare the bits of what several ranks hold a copy
    of; where they differ end with exit code 4, the odd rank named. 0 never does; 100 is cheap."""
    inject: tuple[InjectConfig, ...] = ()
    """Tables [[train.inject]]: faults to be planted, to see what a run does about them."""
    max_skips: Natural = 20
    """Stop after so many skipped updates in a row."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto takes CUDA where it is."""
    seed: Natural = 0
    """Seed of initial weights, dropout, and moments that are rounded at random."""
    eval_every: Natural = 0
    """Steps between evaluations; 0: only after the last step."""
    eval_steps: Natural = 8
    """Global batches an evaluation takes from each validation set."""
    label_smoothing: Fraction = Field(default=0.0, examples=[0.0, 0.1])
    """Share of the training loss that is spread evenly over the vocabulary."""
    z_loss: Annotated[Real, Field(ge=0)] = Field(default=0.0, examples=[0.0, 1e-3])
    """Weight of the squared log-sum-exp of the logits in training; not part of the logged loss."""
    hang_minutes: Annotated[Real, Field(ge=0)] = 10.0
    """End a rank, with exit code 3 and its stacks, that has got no further for so many minutes: no
    action, message or phase (such as a save) has begun. 0 never does."""
    max_minutes: Positive | None = None
    """Save and stop, with exit code 0, after so many minutes."""
