"""Loss, logits and every gradient of whole models against the plain reference."""

import itertools
from typing import Any

import pytest
import torch
from parity.matrix import MODELS
from reference import bridge, plain
from reference.plain import Document

from penteract.config import resolve
from penteract.config_file import from_dict
from penteract.families import model_spec
from penteract.mesh import single
from penteract.nn.attention import Attention
from penteract.nn.model import ModelSpec, Stage
from penteract.nn.sequences import MicroBatch, Sequences
from penteract.parallel.buckets import Sharding
from penteract.parallel.buffers import Buffers
from penteract.parallel.parameters import materialise
from penteract.parallel.tensor import TensorParallel

F64 = torch.float64
CASES: dict[str, tuple[tuple[int, ...], str]] = {
    "ragged": ((5, 1, 3, 1), "mixed"),
    "equal": ((4, 4, 4), "mixed"),
    "one": ((7,), "ones"),
    "single tokens": ((1, 1, 1), "ones"),
    "one valid token": ((3, 4), "last"),
    "an empty document": ((3, 0, 2), "ones"),
}


def spec_of(name: str, **changes: Any) -> ModelSpec:
    model = {**MODELS[name], **changes}
    config = from_dict({"model": model, "data": {"seq": 8}, "train": {"steps": 1}})
    return model_spec(resolve(config))


def documents(lengths: tuple[int, ...], mask: str, vocab: int) -> list[Document]:
    """The vocabulary's last token too; weights of 1, mixed (0 to 1.5), or one 1 at the end."""
    total = sum(lengths)
    generator = torch.Generator().manual_seed(total)
    tokens, labels = torch.randint(vocab, (2, total), generator=generator).tolist()
    tokens[0], labels[-1] = vocab - 1, vocab - 1
    weights = {
        "ones": [1.0] * total,
        "mixed": [(i * 7 % 4) / 2 for i in range(total)],
        "last": [0.0] * (total - 1) + [1.0],
        "none": [0.0] * total,
    }[mask]
    rows = zip(itertools.accumulate(lengths, initial=0), lengths, strict=False)
    return [
        Document(tokens[a : a + n], labels[a : a + n], weights[a : a + n], first_row=a)
        for a, n in rows
    ]


def reference_gradients(
    docs: list[Document], weights: plain.Weights, spec: ModelSpec
) -> tuple[float, plain.Weights]:
    full = [doc for doc in docs if doc.tokens]
    return plain.gradients(full, weights, bridge.describe(spec))


def scale_of(batch: MicroBatch) -> torch.Tensor:
    return 1.0 / batch.sequences.weights.sum().clamp(min=1.0)


def new_model(spec: ModelSpec, **arguments: Any) -> tuple[Stage, plain.Weights]:
    model = Stage(spec, TensorParallel(single("tp")), dtype=F64, **arguments)
    materialise(model, seed=0)
    weights = bridge.random_weights(bridge.parameters(model))
    bridge.write(bridge.parameters(model), weights)
    return model, weights


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", MODELS)
def test_loss_logits_and_gradients_equal_the_reference(name: str, case: str) -> None:
    spec = spec_of(name)
    model, weights = new_model(spec)
    docs = documents(*CASES[case], spec.vocab)
    batch = bridge.micro_batch(docs)
    loss = model(batch, scale=scale_of(batch)).terms["loss"]
    loss.backward()
    wanted_loss, wanted = reference_gradients(docs, weights, spec)
    assert loss.item() == pytest.approx(wanted_loss, rel=1e-9)
    bridge.assert_close(
        bridge.logical(bridge.fragments(bridge.plain_gradients(model))), wanted, 1e-9
    )
    found = model.logits(batch.tokens, batch.sequences)
    described = bridge.describe(spec)
    rows = torch.cat([plain.logits(doc, weights, described) for doc in docs if doc.tokens])
    torch.testing.assert_close(found, rows, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("backend", ["flash", "plain"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_in_the_buffers_equal_the_reference(name: str, backend: str) -> None:
    """Two micro-batches add up; nothing is left on the parameters themselves."""
    spec = spec_of(name)
    model = Stage(spec, TensorParallel(single("tp")), dtype=F64)
    for module in model.modules():
        if isinstance(module, Attention):
            module.backend = backend
    buffers = Buffers(model, Sharding.whole(single("dp-cp")), seed=0, more_axes=[single("tp")])
    weights = bridge.random_weights(bridge.placements(buffers))
    bridge.set_owned(buffers, "master", weights)
    docs = documents((5, 1, 3, 4), "mixed", spec.vocab)
    parts = [bridge.micro_batch(docs[:2]), bridge.micro_batch(docs[2:])]
    scale = 1.0 / sum(part.sequences.weights.sum() for part in parts)
    buffers.begin()
    for i, part in enumerate(parts):
        loss = model(part, scale=scale).terms["loss"]
        buffers.begin_backward(last=i == len(parts) - 1)
        loss.backward()
        buffers.end_backward()
    assert buffers.finish() == []
    assert all(p.grad is None for p in model.parameters())
    _, wanted = reference_gradients(docs, weights, spec)
    found = bridge.logical(bridge.owned(buffers, "own_gradient"))
    bridge.assert_close(found, wanted, 1e-9)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_all_masked_is_exactly_zero(name: str) -> None:
    spec = spec_of(name)
    model, _ = new_model(spec)
    batch = bridge.micro_batch(documents((3, 2), "none", spec.vocab))
    loss = model(batch, scale=scale_of(batch)).terms["loss"]
    loss.backward()
    assert loss.item() == 0.0
    assert all(bool((p.grad == 0).all()) for p in model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_no_token_gives_every_weight_a_zero_gradient(name: str) -> None:
    spec = spec_of(name)
    model, _ = new_model(spec)
    batch = bridge.micro_batch([])
    loss = model(batch, scale=torch.ones((), dtype=F64)).terms["loss"]
    loss.backward()
    assert loss.item() == 0.0
    assert all(bool((p.grad == 0).all()) for p in model.parameters())


def test_a_document_does_not_see_another() -> None:
    spec = spec_of("llama")
    model, _ = new_model(spec)
    docs = documents((4, 3, 5), "ones", spec.vocab)
    together = bridge.micro_batch(docs)
    alone = [bridge.micro_batch([doc]) for doc in docs]
    parts = [model.logits(x.tokens, x.sequences) for x in alone]
    found = model.logits(together.tokens, together.sequences)
    torch.testing.assert_close(found, torch.cat(parts), rtol=1e-12, atol=1e-12)


def test_later_tokens_do_not_change_earlier_logits() -> None:
    spec = spec_of("gpt2")
    model, _ = new_model(spec)
    tokens = torch.arange(8) % spec.vocab
    changed = tokens.clone()
    changed[5:] = 0
    sequences = Sequences.of((8,))
    before, after = model.logits(tokens, sequences), model.logits(changed, sequences)
    assert torch.equal(before[:5], after[:5])
    assert not torch.equal(before[5:], after[5:])


@pytest.mark.parametrize("positions", [16, 4096, 10**6])
def test_large_positions_equal_the_reference(positions: int) -> None:
    """Rotary angles far from 0, where an angle in float32 would be off by hundredths."""
    spec = spec_of("llama", rope_theta=10000.0)
    model, weights = new_model(spec)
    doc = documents((4,), "ones", spec.vocab)[0]
    doc = Document(doc.tokens, doc.labels, doc.weights, first_position=positions)
    found = model.logits(torch.tensor(doc.tokens), Sequences.of((4,), past=positions))
    wanted = plain.logits(doc, weights, bridge.describe(spec))
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


def test_stages_piped_by_hand_equal_the_whole() -> None:
    spec = spec_of("llama", layers=3)
    whole, weights = new_model(spec)
    cut = spec.layer_names.index("layers.2")
    stages = [
        new_model(spec, names=spec.layer_names[:cut])[0],
        new_model(spec, names=spec.layer_names[cut:])[0],
    ]
    for stage in stages:
        bridge.write(bridge.parameters(stage), weights)
    batch = bridge.micro_batch(documents((5, 2), "mixed", spec.vocab))
    scale = scale_of(batch)
    loss = whole(batch, scale=scale).terms["loss"]
    loss.backward()
    sent = stages[0](batch, scale=scale)
    assert sent.terms == {}
    received = sent.stream.detach().requires_grad_()
    staged = stages[1](batch, received, scale=scale)
    assert staged.stream is None
    staged.terms["loss"].backward()
    sent.stream.backward(received.grad)
    assert torch.equal(staged.terms["loss"], loss)
    found = [part for stage in stages for part in bridge.plain_gradients(stage)]
    wanted = bridge.logical(bridge.fragments(bridge.plain_gradients(whole)))
    bridge.assert_close(bridge.logical(bridge.fragments(found)), wanted, 1e-12)


def test_stages_start_from_the_weights_of_the_whole() -> None:
    spec = spec_of("gpt2", tied=False)
    whole = Stage(spec, TensorParallel(single("tp")), dtype=F64)
    materialise(whole, seed=3)
    wanted = bridge.logical(bridge.fragments(bridge.parameters(whole)))
    for name in spec.layer_names:
        stage = Stage(spec, TensorParallel(single("tp")), dtype=F64, names=[name])
        materialise(stage, seed=3)
        for tensor, values in bridge.logical(bridge.fragments(bridge.parameters(stage))).items():
            assert torch.equal(values, wanted[tensor])


def test_a_stage_without_layers_passes_the_stream_through() -> None:
    stage = Stage(spec_of("llama"), TensorParallel(single("tp")), dtype=F64, names=())
    stream = torch.randn(3, 12, dtype=F64)
    batch = bridge.micro_batch(documents((3,), "ones", 13))
    assert stage(batch, stream, scale=scale_of(batch)).stream is stream


def test_names_must_be_a_slice_of_the_layers() -> None:
    with pytest.raises(AssertionError, match="not a slice"):
        Stage(
            spec_of("llama"), TensorParallel(single("tp")), dtype=F64, names=("embed", "layers.1")
        )


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_is_near_the_reference(name: str) -> None:
    spec = spec_of(name)
    wide, weights = new_model(spec)
    model = Stage(spec, TensorParallel(single("tp")), dtype=torch.bfloat16)
    materialise(model, seed=0)
    bridge.write(bridge.parameters(model), weights)
    batch = bridge.micro_batch(documents((5, 1, 3), "ones", spec.vocab))
    narrow = model(batch, scale=scale_of(batch)).terms["loss"]
    assert narrow.dtype == torch.float32
    narrow.backward()
    loss = wide(batch, scale=scale_of(batch)).terms["loss"]
    assert narrow.item() == pytest.approx(loss.item(), rel=3e-2)
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters())
