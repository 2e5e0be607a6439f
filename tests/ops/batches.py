# SPDX-License-Identifier: Apache-2.0
"""What the tests of the ops over a batch's integers share."""

import torch

from .support import guarded


def int32(values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


def int64(values, device="cpu"):
    return torch.tensor(values, dtype=torch.int64, device=device)


def integers(rng, low, high, *shape):
    """int64 in [low, high)."""
    return torch.randint(low, high, shape, generator=rng)


def random_idx_mapping(rng, num_reqs, num_live, num_states):
    """[num_reqs] int32: num_live different state rows, then padding."""
    idx_mapping = torch.full((num_reqs,), -1, dtype=torch.int32)
    idx_mapping[:num_live] = torch.randperm(num_states, generator=rng)[:num_live].int()
    return idx_mapping


def random_block_table(rng, num_reqs, num_columns):
    """[num_reqs, num_columns] int32, one block in ten the null block."""
    return (integers(rng, -10, 90, num_reqs, num_columns)).clamp(min=0).int()


def on(device, batch):
    """The same arguments with their tensors, in lists too, on a device."""

    def move(value):
        if isinstance(value, list):
            return [move(item) for item in value]
        return value.to(device) if isinstance(value, torch.Tensor) else value

    return {name: move(value) for name, value in batch.items()}


def assert_fields_equal(actual, expected):
    """Named tuples of integer tensors, of lists of them or of None, equal in dtype, shape and value."""
    for name, a, e in zip(expected._fields, actual, expected, strict=True):
        if e is None:
            assert a is None, name
            continue
        pairs = zip(a, e, strict=True) if isinstance(e, list) else [(a, e)]
        for i, (x, y) in enumerate(pairs):
            assert x.dtype == y.dtype, f"{name}[{i}]: {x.dtype} != {y.dtype}"
            assert x.tolist() == y.tolist(), f"{name}[{i}]"


def poisoned_like(fields, device):
    """Buffers like the fields of a named tuple, full of a value that no output has."""

    def buffer(tensor):
        return torch.full_like(tensor, -77, device=device)

    return type(fields)(
        *([buffer(t) for t in f] if isinstance(f, list) else buffer(f) for f in fields)
    )


def guarded_like(fields, device):
    """Poisoned buffers like the fields of a named tuple, and one check of all their guards."""
    checks = []

    def buffer(tensor):
        view, check = guarded(tensor.shape, tensor.dtype, device)
        checks.append(check)
        return view

    buffers = type(fields)(
        *([buffer(t) for t in f] if isinstance(f, list) else buffer(f) for f in fields)
    )

    def check_guards():
        for check in checks:
            check()

    return buffers, check_guards
