# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from dflash.ops.rejection_sample import METHODS, rejection_sample, rejection_sample_reference
from dflash.ops.sample_draft import sample_draft

from .support import DEVICES, DTYPES, check_op, guarded, to_device

LOSSLESS = ["match", "standard", "block"]


def make_case(
    num_reqs=6, num_drafts=4, vocab_size=37, dtype=torch.float32, draft_dtype=None, tied=False
):
    """A batch with ragged rows (0 too), drafts that are no tokens, a padded request, finished and
    nearly finished requests, stop ids, and temperature 0 beside others. tied: drafts that the
    target likes, so that whole blocks are accepted."""
    num_states = num_reqs + 2
    states = torch.randperm(num_states)[:num_reqs].to(torch.int32)
    states[-1] = -1
    rows = torch.randint(0, num_drafts + 2, (num_reqs,))
    start_loc = torch.zeros(num_reqs + 1, dtype=torch.int32)
    start_loc[1:] = rows.cumsum(0)
    num_rows = int(start_loc[-1])
    target_logits = (torch.randn(num_rows, vocab_size + 3) * 2).to(dtype)
    draft_tokens = torch.randint(-1, vocab_size, (num_states, num_drafts))
    if tied:
        for r, s in enumerate(states[:-1].tolist()):
            best = target_logits[start_loc[r] : start_loc[r + 1], :vocab_size].argmax(-1)
            draft_tokens[s, : len(best)] = best[:num_drafts]
    draft_logits = None
    if draft_dtype is not None:
        draft_logits = (torch.randn(num_states, num_drafts, vocab_size) * 2).to(draft_dtype)
    return {
        "target_logits": target_logits,
        "logits_start_loc": start_loc,
        "logits_positions": torch.randint(0, 10000, (num_rows,)),
        "idx_mapping": states,
        "draft_tokens": draft_tokens,
        "num_draft_tokens": torch.randint(0, num_drafts + 1, (num_states,), dtype=torch.int32),
        "temperatures": torch.tensor([0.0, 1.0, 0.7, 1.6])[torch.randperm(num_states) % 4],
        "seeds": torch.randint(-(2**62), 2**62, (num_states,)),
        "tokens_left": torch.randint(-1, num_drafts + 4, (num_states,), dtype=torch.int32),
        "draft_logits": draft_logits,
        "stop_token_ids": torch.randint(-1, vocab_size, (num_states, 3)),
        "vocab_size": vocab_size,
        "synthetic_rates": torch.rand(num_drafts),
    }


def make_plain(target_logits, drafts, position=10, temperature=0.0, seed=3, **changes):
    """One request whose rows are all of target_logits, without limits."""
    device = target_logits.device
    drafts = torch.tensor([drafts], dtype=torch.int64, device=device).view(1, -1)
    num_rows = len(target_logits)
    one = lambda value, dtype: torch.tensor([value], dtype=dtype, device=device)  # noqa: E731
    return {
        "target_logits": target_logits,
        "logits_start_loc": torch.tensor([0, num_rows], dtype=torch.int32, device=device),
        "logits_positions": torch.arange(position, position + num_rows, device=device),
        "idx_mapping": one(0, torch.int32),
        "draft_tokens": drafts,
        "num_draft_tokens": one(drafts.shape[1], torch.int32),
        "temperatures": one(temperature, torch.float32),
        "seeds": one(seed, torch.int64),
        "tokens_left": one(1000, torch.int32),
        **changes,
    }


def sampled(**case):
    tokens, num_sampled, num_rejected = rejection_sample(**case)
    return tokens[0].tolist(), num_sampled.item(), num_rejected.item()


def one_hot_logits(tokens, vocab_size, device):
    logits = torch.zeros(len(tokens), vocab_size, device=device)
    logits[torch.arange(len(tokens)), tokens] = 5.0
    return logits


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("draft_dtype", [None, *DTYPES])
@pytest.mark.parametrize("vocab_size,num_drafts,num_reqs", [(5, 4, 24), (4099, 3, 9), (8200, 0, 4)])
@pytest.mark.parametrize("tied", [False, True])
def test_equals_reference(
    device, method, dtype, draft_dtype, vocab_size, num_drafts, num_reqs, tied
):
    case = make_case(num_reqs, num_drafts, vocab_size, dtype, draft_dtype, tied)
    outputs, checks = zip(
        guarded((num_reqs, num_drafts + 1), torch.int64, device),
        guarded((num_reqs,), torch.int32, device),
        guarded((num_reqs,), torch.int32, device),
        strict=True,
    )
    names = ("sampled_token_ids", "num_sampled", "num_rejected")
    written = dict(zip(names, outputs, strict=True))
    rejection_sample(method=method, **to_device(device, case), **written)
    for check in checks:
        check()
    for output, expected in zip(
        outputs, rejection_sample_reference(method=method, **case), strict=True
    ):
        assert torch.equal(output.cpu(), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", ["match", "synthetic"])
@pytest.mark.parametrize("vocab_size,num_drafts,num_reqs", [(5, 4, 24), (4099, 3, 9), (50, 0, 4)])
@pytest.mark.parametrize("tied", [False, True])
def test_from_tokens_it_is_what_it_is_from_their_logits(
    device, method, vocab_size, num_drafts, num_reqs, tied
):
    """At temperature 0 a row's token is its first maximum."""
    case = make_case(num_reqs, num_drafts, vocab_size, tied=tied)
    case["temperatures"].zero_()
    logits = case.pop("target_logits")
    expected = rejection_sample_reference(logits, method=method, **case)
    outputs, checks = zip(
        guarded((num_reqs, num_drafts + 1), torch.int64, device),
        guarded((num_reqs,), torch.int32, device),
        guarded((num_reqs,), torch.int32, device),
        strict=True,
    )
    names = ("sampled_token_ids", "num_sampled", "num_rejected")
    case["target_tokens"] = logits[:, :vocab_size].argmax(-1)
    written = dict(zip(names, outputs, strict=True))
    rejection_sample(None, method=method, **to_device(device, case), **written)
    for check in checks:
        check()
    for output, e in zip(outputs, expected, strict=True):
        assert torch.equal(output.cpu(), e)


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("draft_dtype", [None, torch.bfloat16])
def test_gpu_equals_cpu_at_a_large_vocabulary(method, draft_dtype):
    case = make_case(16, 15, 151936, torch.bfloat16, draft_dtype, tied=True)
    expected = rejection_sample(method=method, **case)
    actual = rejection_sample(method=method, **to_device("cuda", case))
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a.cpu(), e)


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_gpu_repeats_bitwise_over_poisoned_scratch(method):
    case = to_device("cuda", make_case(16, 7, 50000, torch.bfloat16, torch.bfloat16, tied=True))
    expected = rejection_sample(method=method, **case)
    for value in range(50):
        poison = torch.full((1 << 22,), value * 5, dtype=torch.uint8, device="cuda")
        del poison
        for a, e in zip(rejection_sample(method=method, **case), expected, strict=True):
            assert torch.equal(a, e)


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_replayed_from_a_graph(method):
    case = to_device("cuda", make_case(5, 7, 50000, torch.bfloat16, torch.bfloat16, tied=True))
    rejection_sample(method=method, **case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = rejection_sample(method=method, **case)
    for _ in range(3):
        case["target_logits"].normal_()
        case["logits_positions"] += 1
        case["tokens_left"].fill_(100)
        graph.replay()
        for a, e in zip(outputs, rejection_sample(method=method, **case), strict=True):
            assert torch.equal(a, e)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", METHODS)
def test_greedy_accepts_while_the_draft_is_the_argmax(device, method):
    logits = one_hot_logits([4, 5, 6, 7], 9, device)
    rates = torch.ones(3, device=device)
    run = lambda drafts: sampled(  # noqa: E731
        **make_plain(logits, drafts), method=method, synthetic_rates=rates
    )
    assert run([4, 5, 6]) == ([4, 5, 6, 7], 4, 0)
    if method == "synthetic":
        return
    assert run([4, 5, 0]) == ([4, 5, 6, -1], 3, 1)
    assert run([0, 5, 6]) == ([4, -1, -1, -1], 1, 3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", LOSSLESS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_id_that_is_no_token_is_rejected(device, method, temperature):
    """And the token in its place is what a request without drafts would sample there."""
    logits = torch.randn(3, 50, device=device) * 3
    plain = sampled(**make_plain(logits[:1], [], temperature=temperature))
    for bad in (-1, 50, 2**40):
        case = make_plain(logits, [bad, 7], temperature=temperature)
        assert sampled(**case, method=method) == ([plain[0][0], -1, -1], 1, 2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rate,accepted", [(0.0, 0), (1.0, 3)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_synthetic_emits_the_targets_own_choice(device, rate, accepted, temperature):
    logits = torch.randn(4, 50, device=device)
    drafts = [3, 1, 2]
    rates = torch.full((3,), rate, device=device)
    case = make_plain(logits, drafts, temperature=temperature)
    tokens, count, _ = sampled(**case, method="synthetic", synthetic_rates=rates)
    row = make_plain(logits[accepted:], [], position=10 + accepted, temperature=temperature)
    row["logits_start_loc"] = torch.tensor([0, 1], dtype=torch.int32, device=device)
    assert tokens[: accepted + 1] == [*drafts[:accepted], sampled(**row)[0][0]]
    assert count == accepted + 1


@pytest.mark.parametrize("device", DEVICES)
def test_synthetic_acceptance_follows_the_rates(device):
    trials, rates = 20000, torch.tensor([0.9, 0.5, 0.2], device=device)
    case = make_chain(device, trials)
    _, num_sampled, _ = rejection_sample(**case, method="synthetic", synthetic_rates=rates)
    accepted = [(num_sampled > i).double().mean().item() for i in (1, 2, 3)]
    for actual, expected in zip(accepted, rates.double().cumprod(0).tolist(), strict=True):
        assert abs(actual - expected) < 0.02


@pytest.mark.parametrize("device", DEVICES)
def test_stop_ids_and_tokens_left_cut_what_is_committed(device):
    logits = one_hot_logits([4, 5, 6, 7], 9, device)
    case = make_plain(logits, [4, 5, 6])

    def run(**changes):
        return sampled(**{**case, **changes})

    def ids(values):
        return torch.tensor(values, dtype=torch.int64, device=device)

    def left(value):
        return torch.tensor([value], dtype=torch.int32, device=device)

    assert run(stop_token_ids=ids([[-1, 5]])) == ([4, 5, -1, -1], 2, 2)
    assert run(stop_token_ids=ids([5])) == ([4, 5, -1, -1], 2, 2)
    assert run(stop_token_ids=ids([[7, 8]])) == ([4, 5, 6, 7], 4, 0)
    assert run(stop_token_ids=ids([[-1, -1]])) == ([4, 5, 6, 7], 4, 0)
    assert run(tokens_left=left(2)) == ([4, 5, -1, -1], 2, 2)
    assert run(tokens_left=left(2), stop_token_ids=ids([[6]])) == ([4, 5, -1, -1], 2, 2)
    for finished in (0, -3):
        assert run(tokens_left=left(finished)) == ([-1, -1, -1, -1], 0, 4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", METHODS)
def test_padded_and_unfinished_requests_sample_nothing(device, method):
    case = make_plain(torch.randn(3, 9, device=device), [1, 2])
    rates = torch.ones(2, device=device)
    padded = {"idx_mapping": torch.tensor([-1], dtype=torch.int32, device=device)}
    no_rows = {"logits_start_loc": torch.tensor([0, 0], dtype=torch.int32, device=device)}
    for changes in (padded, no_rows):
        outcome = sampled(**{**case, **changes}, method=method, synthetic_rates=rates)
        assert outcome == ([-1, -1, -1], 0, 0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", LOSSLESS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_logits_give_token_0_or_the_only_number(device, method, temperature):
    logits = torch.full((2, 5000), float("nan"), device=device)
    case = make_plain(logits, [77], temperature=temperature)
    draft_logits = torch.full((1, 1, 5000), float("nan"), device=device)
    for q in (None, draft_logits):
        assert sampled(**case, method=method, draft_logits=q)[0] == [0, -1]
    logits[:, 4444] = -3.0
    for q in (None, draft_logits):
        assert sampled(**case, method=method, draft_logits=q)[0] == [4444, -1]


@pytest.mark.parametrize("device", DEVICES)
def test_a_deterministic_drafter_changes_no_token(device):
    """Token for token the output without drafter: a chain of 200 tokens, temperature 0 and 1."""
    vocab_size, length, num_drafts = 12, 200, 4
    table = torch.randn(vocab_size, vocab_size, device=device) * 2
    for temperature in (0.0, 1.0):
        plain, drafted = [3], [3]
        while len(plain) < length:
            row = make_plain(table[plain[-1:]], [], len(plain), temperature)
            plain.append(sampled(**row)[0][0])
        while len(drafted) < length:
            path = [drafted[-1]]
            for _ in range(num_drafts):
                path.append(int(table[path[-1]].argmax()))
            case = make_plain(table[path], path[1:], len(drafted), temperature)
            tokens, count, _ = sampled(**case)
            drafted += tokens[:count]
        assert drafted[:length] == plain


@pytest.mark.parametrize("device", DEVICES)
def test_strided_tensors_and_empty_input(device):
    case = to_device(device, make_case(draft_dtype=torch.float32))
    expected = rejection_sample(**case, method="block")
    strided = dict(case)
    for name in ("target_logits", "draft_tokens", "draft_logits", "stop_token_ids"):
        tensor = case[name]
        shape = [*tensor.shape[:-1], tensor.shape[-1] + 5]
        wide = torch.zeros(shape, dtype=tensor.dtype, device=device)
        strided[name] = wide[..., 3 : 3 + tensor.shape[-1]]
        strided[name].copy_(tensor)
    for a, e in zip(rejection_sample(**strided, method="block"), expected, strict=True):
        assert torch.equal(a, e)
    none = {
        "target_logits": case["target_logits"][:0],
        "logits_positions": case["logits_positions"][:0],
        "logits_start_loc": case["logits_start_loc"][:1],
        "idx_mapping": case["idx_mapping"][:0],
    }
    assert rejection_sample(**{**case, **none})[0].shape == (0, 5)


def make_chain(device, trials, num_drafts=3, vocab_size=4):
    """trials requests at their first step; see make_step."""
    torch.manual_seed(1)
    chain = Chain(device, trials, num_drafts, vocab_size)
    return chain.make_step(torch.arange(trials, device=device), recorded=False)


class Chain:
    """Many runs of a small Markov target with a drafter that knows the anchor and the offset only,
    as a DFlash drafter does. Its own distribution is unlike the target's."""

    def __init__(self, device, trials, num_drafts, vocab_size):
        self.device, self.num_drafts, self.vocab_size = device, num_drafts, vocab_size
        self.target = torch.randn(vocab_size, vocab_size).to(device)
        self.draft = torch.randn(num_drafts, vocab_size, vocab_size).to(device)
        self.tokens = torch.full((trials, 3 * num_drafts + 8), -1, device=device)
        self.tokens[:, 0] = 2
        self.lengths = torch.ones(trials, dtype=torch.int64, device=device)
        self.temperatures = torch.full((trials,), 0.8, device=device)
        self.seeds = torch.arange(trials, device=device)

    def make_step(self, runs, recorded):
        """Drafts of the runs' next blocks, drawn by sample_draft with the target's own seeds."""
        n, v = self.num_drafts, self.vocab_size
        count, trials = len(runs), len(self.lengths)
        anchors = self.lengths[runs] - 1
        anchor_tokens = self.tokens[runs, anchors]
        offsets = torch.arange(n, device=self.device)
        drafts = torch.full((trials, n), -1, device=self.device)
        record = torch.zeros(trials, n, v, device=self.device) if recorded else None
        rows = self.draft[offsets[None], anchor_tokens[:, None]].view(count * n, v)
        sample_draft(
            rows,
            (anchors[:, None] + 1 + offsets).flatten(),
            runs.to(torch.int32).repeat_interleave(n),
            drafts,
            temperatures=self.temperatures if recorded else None,
            seeds=self.seeds if recorded else None,
            draft_logits=record,
        )
        inputs = torch.cat([anchor_tokens[:, None], drafts[runs]], dim=1)
        steps = torch.arange(n + 1, device=self.device)
        return {
            "target_logits": (self.target[inputs] / 0.8).view(-1, v),
            "logits_start_loc": torch.arange(count + 1, device=self.device).int() * (n + 1),
            "logits_positions": (anchors[:, None] + steps).flatten(),
            "idx_mapping": runs.to(torch.int32),
            "draft_tokens": drafts,
            "num_draft_tokens": torch.full((trials,), n, device=self.device, dtype=torch.int32),
            "temperatures": self.temperatures,
            "seeds": self.seeds,
            "tokens_left": torch.full((trials,), 100, device=self.device, dtype=torch.int32),
            "draft_logits": record,
        }

    def run(self, method, recorded, length):
        """Extends every run to 1 + length tokens; returns the accepted drafts a block."""
        accepted = []
        while (self.lengths <= length).any():
            runs = (self.lengths <= length).nonzero()[:, 0]
            case = self.make_step(runs, recorded)
            tokens, num_sampled, _ = rejection_sample(**case, method=method)
            for i in range(tokens.shape[1]):
                at = num_sampled > i
                self.tokens[runs[at], self.lengths[runs[at]] + i] = tokens[at, i]
            self.lengths[runs] += num_sampled
            accepted.append(num_sampled.double() - 1)
        return torch.cat(accepted).mean().item()

    def chi_square(self, length):
        """Of tokens 1..length, jointly, and its degrees of freedom; rare cells are pooled."""
        v = self.vocab_size
        p = (self.target.double() / 0.8).softmax(-1).cpu()
        joint, index = p[2], torch.zeros(len(self.tokens), dtype=torch.int64)
        for _ in range(length - 1):
            joint = (joint.view(-1, v)[:, :, None] * p).flatten()
        for i in range(1, length + 1):
            index = index * v + self.tokens[:, i].cpu()
        expected = joint * len(self.tokens)
        observed = torch.bincount(index, minlength=v**length).double()
        rare = expected < 5
        if rare.any():
            observed = torch.cat([observed[~rare], observed[rare].sum()[None]])
            expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
        return ((observed - expected) ** 2 / expected).sum().item(), len(expected) - 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", LOSSLESS)
@pytest.mark.parametrize("recorded", [False, True])
def test_committed_tokens_are_distributed_as_the_target(device, method, recorded):
    """Jointly over 4 tokens, so over block ends, with one seed for draft and target."""
    torch.manual_seed(1)
    chain = Chain(device, trials=60000, num_drafts=3, vocab_size=4)
    accepted = chain.run(method, recorded, length=4)
    chi_square, freedom = chain.chi_square(4)
    assert chi_square < freedom + 10 * (2 * freedom) ** 0.5
    assert 0.2 < accepted < 2.8


def test_the_chi_square_notices_a_lossy_method():
    torch.manual_seed(1)
    chain = Chain("cpu", trials=60000, num_drafts=3, vocab_size=4)
    while (chain.lengths <= 4).any():
        runs = (chain.lengths <= 4).nonzero()[:, 0]
        case = chain.make_step(runs, recorded=False)
        rates = torch.full((3,), 0.5)
        tokens, num_sampled, _ = rejection_sample(**case, method="synthetic", synthetic_rates=rates)
        for i in range(4):
            at = num_sampled > i
            chain.tokens[runs[at], chain.lengths[runs[at]] + i] = tokens[at, i]
        chain.lengths[runs] += num_sampled
    chi_square, freedom = chain.chi_square(4)
    assert chi_square > freedom + 100 * (2 * freedom) ** 0.5


def test_block_verification_accepts_no_less_than_standard_rejection():
    accepted = {}
    for method in ("standard", "block"):
        torch.manual_seed(1)
        accepted[method] = Chain("cpu", 60000, 3, 4).run(method, True, 4)
    assert accepted["block"] > accepted["standard"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", LOSSLESS)
def test_draft_and_target_share_no_noise(device, method):
    """Draft and target with one distribution, one seed and one position: match accepts as two
    independent draws agree, the others always accept."""
    trials, v = 20000, 4
    torch.manual_seed(2)
    chain = Chain(device, trials, 1, v)
    chain.draft[0] = chain.target
    _, num_sampled, _ = rejection_sample(
        **chain.make_step(chain.seeds, recorded=True), method=method
    )
    rate = (num_sampled > 1).double().mean().item()
    p = (chain.target[2].double() / 0.8).softmax(-1)
    expected = (p * p).sum().item() if method == "match" else 1.0
    assert abs(rate - expected) < 0.02


@pytest.mark.parametrize("device", DEVICES)
def test_a_position_redrawn_after_a_rejection_gets_fresh_noise(device):
    """Residuals under two anchors are independent draws."""
    trials, v = 20000, 8
    logits = torch.zeros(trials * 2, v, device=device)
    seeds = torch.arange(trials, device=device)

    def redraw(anchor):
        case = {
            "target_logits": logits,
            "logits_start_loc": torch.arange(trials + 1, device=device).int() * 2,
            "logits_positions": torch.tensor([anchor, anchor + 1], device=device).repeat(trials),
            "idx_mapping": seeds.int(),
            "draft_tokens": torch.zeros(trials, 1, dtype=torch.int64, device=device),
            "num_draft_tokens": torch.ones(trials, dtype=torch.int32, device=device),
            "temperatures": torch.ones(trials, device=device),
            "seeds": seeds,
            "tokens_left": torch.full((trials,), 9, dtype=torch.int32, device=device),
        }
        tokens, num_sampled, _ = rejection_sample(**case, method="standard")
        return tokens[:, 0], num_sampled == 1

    first, first_rejected = redraw(40)
    second, second_rejected = redraw(41)
    both = first_rejected & second_rejected
    agreement = (first == second)[both].double().mean().item()
    assert abs(agreement - 1 / 7) < 0.015
    assert abs(both.double().mean().item() - (7 / 8) ** 2) < 0.015


def test_bad_input_is_named():
    case = make_case(draft_dtype=torch.float32)

    def call(**changes):
        return rejection_sample(**{**case, **changes})

    num_rows = len(case["target_logits"])
    with pytest.raises(ValueError, match=r"method: expected one of match, .*, got greedy"):
        call(method="greedy")
    with pytest.raises(ValueError, match="synthetic_rates: required by method synthetic"):
        call(method="synthetic", synthetic_rates=None)
    with pytest.raises(ValueError, match=r"vocab_size: expected 1 to 40 .*, got 0"):
        call(vocab_size=0)
    with pytest.raises(RuntimeError, match="synthetic_rates: expected at least 4 rates"):
        call(method="synthetic", synthetic_rates=torch.ones(3))
    with pytest.raises(RuntimeError, match=r"logits_start_loc: expected shape \[7\], got \[6\]"):
        call(logits_start_loc=case["logits_start_loc"][1:])
    with pytest.raises(RuntimeError, match=rf"logits_positions: expected shape \[{num_rows}\]"):
        call(logits_positions=case["logits_positions"][1:])
    with pytest.raises(RuntimeError, match="idx_mapping: expected int32, got int64"):
        call(idx_mapping=case["idx_mapping"].long())
    with pytest.raises(RuntimeError, match="seeds: expected int64, got int32"):
        call(seeds=case["seeds"].int())
    with pytest.raises(RuntimeError, match=r"num_draft_tokens: expected shape \[8\], got \[7\]"):
        call(num_draft_tokens=case["num_draft_tokens"][1:])
    with pytest.raises(RuntimeError, match=r"draft_logits: expected shape \[8, 4, \*\]"):
        call(draft_logits=torch.zeros(8, 3, 37))
    with pytest.raises(RuntimeError, match="draft_logits: expected at least vocab_size = 37"):
        call(draft_logits=torch.zeros(8, 4, 36))
    with pytest.raises(RuntimeError, match=r"stop_token_ids: expected shape \[8, \*\]"):
        call(stop_token_ids=case["stop_token_ids"][1:])
    with pytest.raises(RuntimeError, match=r"sampled_token_ids: expected shape \[6, 5\]"):
        call(sampled_token_ids=torch.zeros(6, 4, dtype=torch.int64))


def test_tokens_in_place_of_logits_are_checked():
    case = make_case()
    tokens = torch.zeros(len(case["target_logits"]), dtype=torch.int64)
    with pytest.raises(ValueError, match="target_logits, target_tokens: expected one of the two"):
        rejection_sample(target_tokens=tokens, **case)
    del case["target_logits"]
    with pytest.raises(ValueError, match="target_logits, target_tokens: expected one of the two"):
        rejection_sample(None, **case)
    with pytest.raises(RuntimeError, match="target_tokens: for methods match and synthetic"):
        rejection_sample(None, target_tokens=tokens, method="block", **case)
    with pytest.raises(RuntimeError, match="target_tokens: expected int64, got int32"):
        rejection_sample(None, target_tokens=tokens.int(), **case)
    del case["vocab_size"]
    with pytest.raises(ValueError, match="vocab_size: required with target_tokens"):
        rejection_sample(None, target_tokens=tokens, **case)


def test_opcheck():
    case = make_case(draft_dtype=torch.float32)
    names = (
        "target_logits logits_start_loc logits_positions idx_mapping draft_tokens "
        "num_draft_tokens draft_logits temperatures seeds tokens_left stop_token_ids"
    )
    outputs = (
        torch.zeros(6, 5, dtype=torch.int64),
        torch.zeros(6, dtype=torch.int32),
        torch.zeros(6, dtype=torch.int32),
    )
    logits, *inputs = (case[name] for name in names.split())
    op = torch.ops.dflash.rejection_sample.default
    check_op(op, (logits, None, *inputs, "block", 37, None, *outputs))
    check_op(op, (logits, None, *inputs, "synthetic", 37, case["synthetic_rates"], *outputs))
    tokens = torch.zeros(len(logits), dtype=torch.int64)
    check_op(op, (None, tokens, *inputs, "match", 37, None, *outputs))


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_rows_times_vocabulary_past_2_to_the_31(method):
    """4.3 GB of target logits: the rows and recorded drafts of the last request lie past 2^31."""
    device, vocab_size, n = "cuda", 131072, 1
    num_reqs = 2**30 // vocab_size + 8
    winners = (torch.arange(2 * num_reqs, device=device) * 7919) % vocab_size
    logits = torch.full((2 * num_reqs, vocab_size), -9.0, dtype=torch.bfloat16, device=device)
    logits[torch.arange(2 * num_reqs, device=device), winners] = 60.0
    # Rows of a record of two drafts a state, only the first of which is verified.
    record = logits.view(num_reqs, 2, vocab_size)
    fill = lambda value, dtype: torch.full((num_reqs,), value, dtype=dtype, device=device)  # noqa: E731
    drafts = torch.stack([winners[::2], fill(-1, torch.int64)], dim=1)
    tokens, num_sampled, _ = rejection_sample(
        logits,
        torch.arange(num_reqs + 1, dtype=torch.int32, device=device) * 2,
        torch.arange(2 * num_reqs, device=device),
        torch.arange(num_reqs, dtype=torch.int32, device=device),
        drafts,
        fill(n, torch.int32),
        fill(1.0, torch.float32),
        fill(5, torch.int64),
        fill(9, torch.int32),
        method=method,
        draft_logits=record,
        synthetic_rates=torch.ones(2, device=device),
    )
    assert torch.equal(tokens[:, :2], winners.view(num_reqs, 2))
    assert num_sampled.eq(2).all()
