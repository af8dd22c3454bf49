"""Cached generation equals a whole forward; sampling draws what it says."""

import pytest
import torch
from parity.matrix import MODELS, SPLIT_MODELS
from reference import bridge

from penteract.config import resolve
from penteract.config_file import from_dict
from penteract.families import model_spec
from penteract.mesh import single
from penteract.nn.attention import Attention
from penteract.nn.generate import Sampling, generate
from penteract.nn.model import Stage
from penteract.nn.sequences import Sequences
from penteract.parallel.context.kernels import Backend, kernel_of
from penteract.parallel.parameters import materialise
from penteract.parallel.tensor import TensorParallel

F64 = torch.float64


def model_of(name: str, window: int | None = None) -> Stage:
    model = {**SPLIT_MODELS[name], "window": window}
    config = from_dict({"model": model, "data": {"seq": 8}, "train": {"steps": 1}})
    model = Stage(model_spec(resolve(config)), TensorParallel(single("tp")), dtype=F64)
    materialise(model, seed=0)
    bridge.write(bridge.parameters(model), bridge.random_weights(bridge.parameters(model)))
    return model


CASES = [
    *((name, None, backend) for name in [*MODELS, "sinks"] for backend in ("flash", "plain")),
    ("sinks", 3, "flash"),
    ("sinks", 1, "plain"),
    ("capped", 2, "plain"),
]


@pytest.mark.parametrize(("name", "window", "backend"), CASES)
@torch.no_grad()
def test_cached_logits_equal_those_of_a_whole_forward(
    name: str, window: int | None, backend: Backend
) -> None:
    model, n, s, more = model_of(name, window), 2, 3, 4
    for module in model.modules():
        if isinstance(module, Attention):
            module.kernel = kernel_of(backend, module.spec.softcap)
    tokens = torch.randint(7, (n, s + more), generator=torch.Generator().manual_seed(0))
    caches = model.new_caches(n, s + more)
    for length in range(s, s + more):
        new = tokens[:, :s] if length == s else tokens[:, length - 1 : length]
        past = 0 if length == s else length - 1
        cached = model.logits(new.flatten(), Sequences.of((new.shape[1],) * n, past=past), caches)
        whole = model.logits(tokens[:, :length].flatten(), Sequences.of((length,) * n))
        last = whole.unflatten(0, (n, length))[:, -1]
        torch.testing.assert_close(cached, last, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_greedy_text_equals_repeated_whole_forwards(name: str) -> None:
    model = model_of(name)
    prompts = torch.tensor([[1, 2, 3], [6, 5, 4]])
    found = list(generate(model, prompts, max_tokens=5, sampling=Sampling(temperature=0)))
    tokens = prompts
    with torch.no_grad():
        for step in found:
            n, length = tokens.shape
            logits = model.logits(tokens.flatten(), Sequences.of((length,) * n))
            chosen = logits.unflatten(0, (n, length))[:, -1].argmax(-1)
            assert step == chosen.tolist()
            tokens = torch.cat([tokens, chosen[:, None]], 1)


def test_a_text_does_not_depend_on_its_neighbours() -> None:
    model, sampling = model_of("llama"), Sampling(seed=4)
    prompts = torch.tensor([[1, 2, 3], [6, 5, 4]])
    both = list(generate(model, prompts, max_tokens=4, sampling=sampling))
    first = list(generate(model, prompts[:1], max_tokens=4, sampling=sampling))
    assert [step[0] for step in both] == [step[0] for step in first]


def test_a_sequence_that_has_stopped_repeats_the_stop() -> None:
    model, prompts = model_of("llama"), torch.tensor([[1, 2], [6, 5]])
    free = list(generate(model, prompts, max_tokens=6, sampling=Sampling(temperature=0)))
    stop = free[0][0]
    steps = list(
        generate(model, prompts, max_tokens=6, sampling=Sampling(temperature=0), stop=stop)
    )
    assert [step[0] for step in steps] == [stop] * len(steps)
    ended = [step[1] for step in steps]
    assert len(steps) == 6 or ended[-1] == stop


def test_prompts_that_cannot_be_continued_are_refused() -> None:
    model = model_of("gpt2")
    with pytest.raises(ValueError, match="empty"):
        next(generate(model, torch.zeros(1, 0).long(), max_tokens=1, sampling=Sampling()))
    prompt = torch.zeros(1, 10).long()
    with pytest.raises(ValueError, match="17, but the model has 16 positions: ask for at most 6"):
        next(generate(model, prompt, max_tokens=7, sampling=Sampling()))
