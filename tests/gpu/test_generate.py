# SPDX-License-Identifier: Apache-2.0
"""The whole step on a GPU: the demo pair with real weights, a Qwen3-8B-shaped pair with random ones."""

import gc

import pytest
import torch
from benchmarks.shapes import RandomWeights, qwen3_8b, qwen3_8b_draft

pytestmark = pytest.mark.gpu

PROMPTS = [
    "Write a Python function that returns the n-th Fibonacci number.",
    "Explain what a hash table is.",
    "A train drives 60 km in 45 minutes. How fast is it?",
    "Complete this Python function: def is_prime(n):",
]


def _answers(dtype, draft, **engine_args):
    from dflash import LLM, SamplingParams

    gc.collect()
    llm = LLM(
        "demo",
        "demo" if draft else None,
        **{
            "dtype": dtype,
            "device": "cuda",
            "max_model_len": 1024,
            "kv_cache_memory_bytes": 1 << 30,
            **engine_args,
        },
    )
    prompts = [llm.chat_prompt([{"role": "user", "content": p}]) for p in PROMPTS]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=96))
    del llm
    torch.cuda.empty_cache()
    return outputs


def test_demo_pair_fp32_is_lossless():
    torch.backends.cuda.matmul.allow_tf32 = False
    with_draft, without = _answers("float32", True), _answers("float32", False)
    assert [o.outputs[0].token_ids for o in with_draft] == [o.outputs[0].token_ids for o in without]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_an_engine_on_a_gpu_that_is_not_current():
    torch.backends.cuda.matmul.allow_tf32 = False
    there, here = _answers("float32", True, device="cuda:1"), _answers("float32", True)
    assert torch.cuda.current_device() == 0
    assert [o.outputs[0].token_ids for o in there] == [o.outputs[0].token_ids for o in here]


def test_demo_pair_bf16_accepts_drafts():
    outputs = _answers("bfloat16", True)
    drafts = sum(o.statistics.num_drafts for o in outputs)
    accepted = sum(o.statistics.num_accepted_tokens for o in outputs)
    acceptance_length = 1 + accepted / drafts
    print(f"demo pair, bf16: AL {acceptance_length:.2f}")
    assert 2.5 < acceptance_length < 6.0


def test_demo_pair_with_fp8_drafts():
    """fp32 on the GPU takes the unpacked products, bf16 the streamed ones; neither changes an answer."""
    torch.backends.cuda.matmul.allow_tf32 = False
    fp8, plain = _answers("float32", True, draft_quantization="fp8"), _answers("float32", False)
    assert [o.outputs[0].token_ids for o in fp8] == [o.outputs[0].token_ids for o in plain]
    strict = {"strict": True, "num_speculative_tokens": 7}
    fp8 = _answers("bfloat16", True, draft_quantization="fp8", **strict)
    whole = _answers("bfloat16", True, **strict)
    assert [o.outputs[0].token_ids for o in fp8] == [o.outputs[0].token_ids for o in whole]
    lengths = []
    for outputs in (fp8, whole):
        drafts = sum(o.statistics.num_drafts for o in outputs)
        lengths.append(1 + sum(o.statistics.num_accepted_tokens for o in outputs) / drafts)
    print(f"demo pair, bf16: AL {lengths[0]:.2f} with fp8 drafts, {lengths[1]:.2f} without")
    assert abs(lengths[0] - lengths[1]) < 0.4


def test_native_equals_sdpa_backend():
    native = _answers("float32", True)
    sdpa = _answers("float32", True, attention_backend="sdpa", draft_attention_backend="sdpa")
    assert [o.outputs[0].token_ids for o in native] == [o.outputs[0].token_ids for o in sdpa]


@pytest.mark.parametrize("method", ["match", "synthetic"])
def test_qwen3_8b_shape_runs(method):
    from dflash.engine.args import EngineArgs
    from dflash.engine.build import assemble
    from dflash.engine.sampling_params import SamplingParams
    from dflash.models.decoder import DecoderSettings
    from dflash.models.drafter import Drafter
    from dflash.models.target import Target

    device, dtype, n = torch.device("cuda"), torch.bfloat16, 15
    rates = (0.9,) * n if method == "synthetic" else None
    args = EngineArgs(
        "random",
        "random",
        kv_cache_memory_bytes=4 << 30,
        max_num_seqs=4,
        rejection_sample_method=method,
        synthetic_acceptance_rates=rates,
    )
    settings = DecoderSettings(device, dtype, dtype, args.kv_block_size, 512)
    random = RandomWeights(dtype, device)
    target = Target(qwen3_8b(), random.target(qwen3_8b()), settings)
    draft_weights = random.draft(qwen3_8b_draft())
    drafter = Drafter(
        qwen3_8b_draft(), draft_weights, target.embed_tokens, target.lm_head, settings
    )
    core = assemble(args, target, drafter, n, settings).core
    params = SamplingParams(max_tokens=64, temperature=0.8, seed=1, ignore_eos=True)
    requests = [core.add_request(range(100 + i, 228 + i), params) for i in range(4)]
    while core.scheduler.has_work:
        core.step()
    for request in requests:
        assert len(request.output_token_ids) == 64
        assert all(0 <= token < 151936 for token in request.output_token_ids)
    if method == "synthetic":
        accepted = sum(r.statistics.num_accepted_tokens for r in requests)
        drafts = sum(r.statistics.num_drafts for r in requests)
        assert 1 + accepted / drafts > 4.0
