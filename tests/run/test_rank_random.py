"""Random state of ranks: rank threads draw what rank processes draw, from a default generator of their own."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from weft.run.rank_random import _operators_that_draw, own_generator
from weft.testing import run_ranks


def gradient_through_dropout():
    """With a checkpoint, which stores the random state and draws again in the backward."""
    x = torch.ones(32, requires_grad=True)
    y = checkpoint(lambda x: F.dropout(x * torch.rand(32)), x, use_reentrant=False)
    (y * F.rrelu(-x, training=True)).sum().backward()
    return x.grad


def forked():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        inside = torch.rand(2)
    return torch.cat((inside, torch.rand(2)))


def restored():
    state = torch.get_rng_state()
    first = torch.rand(3)
    torch.set_rng_state(state)
    assert torch.equal(first, torch.rand(3))
    return torch.tensor([torch.initial_seed()])


def attention():
    x = torch.ones(1, 2, 8, 4)
    return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)


DRAW_NOTHING = ("_cudnn", "miopen", "_nested_tensor_softmax", "_fused_sdp_choice")
"""Names of operators that are tagged as drawing, and draw nothing on the CPU."""

DRAWS = {
    "linear": lambda: nn.Linear(3, 3).weight,
    "transformer": lambda: nn.TransformerEncoderLayer(8, 2)(torch.ones(2, 3, 8)),
    "lstm": lambda: nn.LSTM(2, 3, 2, dropout=0.5)(torch.ones(4, 1, 2))[0],
    "init": lambda: nn.init.trunc_normal_(nn.init.orthogonal_(torch.empty(3, 3))),
    "rand": lambda: torch.rand(3, generator=None),
    "randn": lambda: torch.randn(3, dtype=torch.float64),
    "rand_like": lambda: torch.rand_like(torch.ones(3)),
    "randint": lambda: torch.randint(1000, (3,)),
    "randperm": lambda: torch.randperm(9),
    "random_": lambda: torch.empty(3, dtype=torch.int64).random_(),
    "normal_": lambda: torch.empty(33).normal_(1, 2),
    "normal": lambda: torch.normal(torch.zeros(3), torch.ones(3)),
    "normal of numbers": lambda: torch.normal(0.0, 1.0, (3,)),
    "exponential_": lambda: torch.empty(3).exponential_(),
    "bernoulli": lambda: torch.bernoulli(torch.full((9,), 0.5)),
    "multinomial": lambda: torch.multinomial(torch.ones(9), 4),
    "poisson": lambda: torch.poisson(torch.full((3,), 5.0)),
    "gamma": lambda: torch.distributions.Dirichlet(torch.ones(3)).sample(),
    "dropout": lambda: F.dropout(torch.ones(32)),
    "alpha dropout": lambda: F.alpha_dropout(torch.ones(32), training=True),
    "attention": attention,
    "backward": gradient_through_dropout,
    "fork_rng": forked,
    "get and set": restored,
    "random_split": lambda: torch.tensor(
        torch.utils.data.random_split(range(9), [4, 5])[0].indices
    ),
    "shuffled loader": lambda: torch.stack(
        list(torch.utils.data.DataLoader(torch.arange(6), batch_size=1, shuffle=True))
    ),
    "default generator": lambda: torch.rand(2, generator=torch.default_generator),
    "inference": torch.inference_mode(lambda: torch.randn(3)),
    "vmap": lambda: torch.vmap(F.dropout, randomness="different")(torch.ones(4, 8)),
}


def draw_all(comm):
    """Every draw after a seed of this rank, while the other ranks draw, too."""
    found = {}
    for name, draw in DRAWS.items():
        torch.manual_seed(100 + comm.rank)
        found[name] = draw().detach().clone(), torch.rand(())
    return found


def draw_unseeded(comm):
    return torch.rand(2), torch.initial_seed()


def assert_equal(some, others):
    for one, other in zip(some, others, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_rank_threads_draw_what_rank_processes_draw():
    threads = run_ranks("dp3", draw_all)
    processes = run_ranks("dp3", draw_all, transport="processes")
    assert_equal(threads, processes)
    for name in DRAWS:
        assert not torch.equal(threads[0][name][1], threads[1][name][1]), name


def test_ranks_begin_in_the_state_of_the_caller_and_leave_it_as_it_is():
    torch.manual_seed(7)
    before = torch.get_rng_state()
    threads = run_ranks("dp2", draw_unseeded)
    assert_equal(threads, run_ranks("dp2", draw_unseeded, transport="processes"))
    assert torch.equal(before, torch.get_rng_state())
    assert_equal(threads, [(torch.rand(2), 7), *threads[1:]])


@pytest.mark.parametrize("takes_turns", [False, True])
def test_a_seed_in_the_function_acts_on_its_rank_alone(takes_turns):
    """Where all ranks shared a generator, 6 of 20 such runs gave one rank other weights."""

    def weights(comm):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))[1].weight.detach()

    expected = weights(None)
    for _ in range(5):
        for found in run_ranks("dp4", weights, takes_turns=takes_turns):
            assert torch.equal(found, expected)


def test_a_thread_that_is_no_rank_draws_from_the_default_generator():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    drawn = []
    with own_generator(torch.get_rng_state()):
        torch.rand(7)
        thread = threading.Thread(target=lambda: drawn.append(torch.rand(3)))
        thread.start()
        thread.join()
    assert torch.equal(drawn[0], expected)


def test_a_generator_that_is_passed_is_used():
    def draw(comm):
        return torch.rand(2, generator=torch.Generator().manual_seed(4))

    expected = torch.rand(2, generator=torch.Generator().manual_seed(4))
    for found in run_ranks("dp2", draw):
        assert torch.equal(found, expected)


def test_meta_tensors_draw_nothing():
    def draw(comm):
        torch.manual_seed(1)
        nn.Linear(2, 2, device="meta")
        return torch.equal(torch.rand(1), torch.rand(1, generator=torch.Generator().manual_seed(1)))

    assert run_ranks("dp2", draw) == [True, True]


def test_a_compiled_function_draws_from_the_generator_of_its_rank():
    compiled = torch.compile(lambda x: F.dropout(x) + torch.rand(8), backend="aot_eager")

    def draw(comm):
        torch.manual_seed(comm.rank)
        return compiled(torch.ones(8))

    for rank, found in enumerate(run_ranks("dp2", draw)):
        torch.manual_seed(rank)
        assert torch.equal(found, compiled(torch.ones(8)))


def test_every_operator_that_draws_is_redirected():
    redirected = set(map(str, _operators_that_draw()))
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, op = name.partition("::")
        packet, _, overload = op.partition(".")
        if namespace == "aten" and not op.startswith(DRAW_NOTHING):
            found = getattr(getattr(torch.ops.aten, packet), overload or "default")
            if torch.Tag.nondeterministic_seeded in found.tags:
                assert str(found) in redirected


def draw_under_a_mode(comm):
    torch.manual_seed(comm.rank)
    with FlopCounterMode(display=False):
        found = [torch.rand(3), F.dropout(torch.ones(9)), torch.ones(3).uniform_(), torch.randn(2)]
        with torch.inference_mode():
            found.append(F.dropout(torch.ones(9)))
    drawn = torch.bernoulli(TwoTensor(torch.ones(9), torch.ones(9)), 0.5)
    return [*found, drawn.a, drawn.b, torch.rand(2)]


def test_draws_under_a_dispatch_mode_and_of_subclasses_are_those_of_processes():
    before = torch.get_rng_state()
    threads = run_ranks("dp3", draw_under_a_mode)
    assert_equal(threads, run_ranks("dp3", draw_under_a_mode, transport="processes"))
    assert torch.equal(before, torch.get_rng_state())
