# SPDX-License-Identifier: Apache-2.0
"""Offsets past 2^31 elements on the CPU: rows far apart in memory that is reserved and hardly touched."""

import torch

from dflash.ops.sample_draft import sample_draft


def test_a_row_behind_2_to_the_31_elements():
    stride = 2**31 + 64
    logits = torch.empty(stride + 8, dtype=torch.float16).as_strided((2, 8), (stride, 1))
    logits.zero_()
    logits[0, 3] = logits[1, 5] = 1.0
    draft_tokens = torch.zeros(2, 1, dtype=torch.int64)
    sample_draft(
        logits,
        torch.tensor([4, 9]),
        torch.tensor([0, 1], dtype=torch.int32),
        temperatures=None,
        seeds=None,
        vocab_size=8,
        logit_scale=1.0,
        d2t=None,
        draft_tokens=draft_tokens,
        draft_logits=None,
    )
    assert draft_tokens.flatten().tolist() == [3, 5]
