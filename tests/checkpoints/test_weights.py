# SPDX-License-Identifier: Apache-2.0
"""Loading: what is mapped and fused, and one readable error for each broken checkpoint."""

import errno
import os
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash.checkpoints import load_draft, load_target, reader
from dflash.errors import CheckpointError, DflashError
from tests.checkpoints.support import (
    DRAFT,
    SPECULATORS,
    TARGET,
    draft_tensors,
    target_tensors,
    with_dflash,
    without,
    write,
)


@pytest.fixture
def target_dir(tmp_path):
    return write(tmp_path / "target", TARGET, target_tensors(TARGET))


@pytest.fixture
def draft_dir(tmp_path):
    return write(tmp_path / "draft", DRAFT, draft_tensors(DRAFT))


def _is_mapped(tensor, path):
    """Whether a tensor's memory is a mapping of that file."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, *_, name = line.split()
            start, end = (int(part, 16) for part in span.split("-"))
            if start <= tensor.data_ptr() < end:
                return name == str(path)
    return False


def _edit(folder, change):
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="needs Linux")
def test_the_vocabulary_is_the_mapped_file(target_dir):
    _, weights, _ = load_target(target_dir)
    file = target_dir / "model.safetensors"
    assert _is_mapped(weights.embed_tokens, file) and _is_mapped(weights.lm_head, file)
    _, same, _ = load_target(target_dir, dtype=torch.bfloat16)
    assert _is_mapped(same.embed_tokens, file)
    _, other, _ = load_target(target_dir, dtype=torch.float32)
    assert not _is_mapped(other.embed_tokens, file)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16, torch.float32])
def test_dtype_is_served_and_reported(target_dir, draft_dir, dtype):
    for load in (load_target, load_draft):
        config, weights, _ = load(target_dir if load is load_target else draft_dir, dtype)
        assert config.dtype == (dtype or torch.bfloat16)
        layer = weights.layers[0]
        for tensor in (weights.norm, layer.qkv_proj, layer.gate_up_proj, layer.down_proj):
            assert tensor.dtype == config.dtype


def test_shards_hold_what_one_file_holds(tmp_path, target_dir):
    tensors = load_file(target_dir / "model.safetensors")
    sharded = write(tmp_path / "sharded", TARGET, tensors, shards=3)
    _, one, _ = load_target(target_dir)
    _, many, _ = load_target(sharded)
    assert torch.equal(one.lm_head, many.lm_head)
    for a, b in zip(one.layers, many.layers, strict=True):
        assert torch.equal(a.qkv_proj, b.qkv_proj) and torch.equal(a.down_proj, b.down_proj)


def test_fused_rows_are_in_order(target_dir):
    tensors = load_file(target_dir / "model.safetensors")
    _, weights, _ = load_target(target_dir)
    for i, layer in enumerate(weights.layers):
        attention, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        parts = [tensors[f"{attention}{part}_proj.weight"] for part in "qkv"]
        assert torch.equal(layer.qkv_proj, torch.cat(parts))
        parts = [tensors[f"{mlp}{part}_proj.weight"] for part in ("gate", "up")]
        assert torch.equal(layer.gate_up_proj, torch.cat(parts))
        assert torch.equal(layer.q_norm, tensors[f"{attention}q_norm.weight"])
        assert torch.equal(layer.k_norm, tensors[f"{attention}k_norm.weight"])
        assert layer.qkv_bias is None and layer.o_bias is None and layer.sinks is None


def test_a_tied_checkpoint_may_repeat_its_head(tmp_path):
    config = {**TARGET, "tie_word_embeddings": True}
    tensors = target_tensors(TARGET)
    _, weights, _ = load_target(write(tmp_path, config, tensors))
    assert weights.lm_head is weights.embed_tokens


def test_buffers_that_are_no_weights_are_ignored(tmp_path):
    tensors = target_tensors(TARGET)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    load_target(write(tmp_path, TARGET, tensors))


def test_drafter_alone(draft_dir):
    tensors = load_file(draft_dir / "model.safetensors")
    config, weights, _ = load_draft(draft_dir)
    assert torch.equal(weights.fc, tensors["fc.weight"])
    assert torch.equal(weights.hidden_norm, tensors["hidden_norm.weight"])
    assert len(weights.layers) == 2 and config.target_hidden_size == 32
    nothing = (weights.embed_tokens, weights.lm_head, weights.d2t, weights.mask_embedding)
    assert nothing == (None,) * 4


def test_fc_tells_the_targets_width(tmp_path):
    tensors = draft_tensors(DRAFT, target_hidden=48)
    assert load_draft(write(tmp_path, DRAFT, tensors))[0].target_hidden_size == 48
    named = write(tmp_path / "named", {**DRAFT, "target_hidden_size": 32}, tensors)
    with pytest.raises(CheckpointError, match=r"fc.weight is \[32, 96\], expected \[32, 64\]"):
        load_draft(named)
    taps = write(tmp_path / "taps", with_dflash(target_layer_ids=[0, 1, 2, 3, 4]), tensors)
    with pytest.raises(CheckpointError, match="trained with other taps"):
        load_draft(taps)


def test_aliases(tmp_path):
    config = {**DRAFT, "num_hidden_layers": 1}
    tensors = draft_tensors(config)
    alias = {"layers.0.": "midlayer.", "fc.": "encoder.fc."}
    alias["hidden_norm."] = "encoder.output_norm_enc."
    renamed = {}
    for name, tensor in tensors.items():
        for plain, other in alias.items():
            name = other + name.removeprefix(plain) if name.startswith(plain) else name
        renamed["model." + name] = tensor
    _, plain, _ = load_draft(write(tmp_path / "plain", config, tensors))
    _, other, _ = load_draft(write(tmp_path / "other", config, renamed))
    assert torch.equal(plain.fc, other.fc) and torch.equal(plain.hidden_norm, other.hidden_norm)
    assert torch.equal(plain.layers[0].qkv_proj, other.layers[0].qkv_proj)


def test_sinks_and_biases(tmp_path):
    config = {**with_dflash(attention_sink_bias=True), "attention_bias": True}
    tensors = draft_tensors(config, sinks=True)
    _, weights, _ = load_draft(write(tmp_path, config, tensors))
    for i, layer in enumerate(weights.layers):
        name = f"layers.{i}.self_attn."
        assert torch.equal(layer.sinks, tensors[f"{name}attention_sink_bias"])
        assert torch.equal(layer.o_bias, tensors[f"{name}o_proj.bias"])
        bias = torch.cat([tensors[f"{name}{part}_proj.bias"] for part in "qkv"])
        assert torch.equal(layer.qkv_bias, bias)


def test_reduced_vocabulary(tmp_path):
    config = {**SPECULATORS, "draft_vocab_size": 24}
    tensors = draft_tensors(config)
    with pytest.raises(CheckpointError, match=r"missing tensors \(2\): d2t, lm_head.weight"):
        load_draft(write(tmp_path, config, tensors))
    d2t = torch.arange(24, dtype=torch.int64)
    tensors |= {"lm_head.weight": torch.randn(24, 32), "d2t": d2t, "t2d": torch.ones(64).bool()}
    _, weights, _ = load_draft(write(tmp_path, config, tensors))
    assert torch.equal(weights.d2t, d2t) and weights.lm_head.shape == (24, 32)


def test_an_identity_map_is_no_map(tmp_path):
    tensors = draft_tensors(SPECULATORS) | {"d2t": torch.zeros(64, dtype=torch.int64)}
    assert load_draft(write(tmp_path, SPECULATORS, tensors))[1].d2t is None


def test_every_wrong_tensor_is_named_in_one_error(target_dir):
    def change(tensors):
        del tensors["model.layers.0.self_attn.k_proj.weight"], tensors["model.norm.weight"]
        tensors["model.layers.3.extra.weight"] = torch.zeros(1)
        tensors["another"] = torch.zeros(1)
        tensors["lm_head.weight"] = torch.zeros(63, 32)

    _edit(target_dir, change)
    with pytest.raises(CheckpointError) as error:
        load_target(target_dir)
    message = str(error.value)
    assert "missing tensors (2): layers.0.self_attn.k_proj.weight, norm.weight" in message
    assert "unexpected tensors (2): another, model.layers.3.extra.weight" in message
    assert "lm_head.weight is [63, 32], expected [64, 32]" in message


def test_every_tensor_of_a_drafter_is_required(tmp_path):
    tensors = draft_tensors(DRAFT)
    for name in tensors:
        with pytest.raises(CheckpointError, match=name):
            load_draft(write(tmp_path, DRAFT, without(tensors, name)))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"mask_hidden": (32,)}, "mask_hidden"),
        ({"layers.0.attention_conv.base_kernel": (2, 2, 32)}, "attention_conv"),
        ({"model.fc.weight": (32, 64)}, "are the same weight"),
    ],
)
def test_tensors_a_drafter_may_not_have(tmp_path, extra, message):
    tensors = draft_tensors(DRAFT) | {name: torch.ones(size) for name, size in extra.items()}
    with pytest.raises(CheckpointError, match=message):
        load_draft(write(tmp_path, DRAFT, tensors))


def test_has_own_lm_head_needs_one(tmp_path):
    config = {**DRAFT, "has_own_lm_head": True}
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        load_draft(write(tmp_path, config, draft_tensors(DRAFT)))


def test_quantized_weights_are_refused(target_dir):
    def change(tensors):
        name = "model.layers.0.mlp.down_proj.weight"
        tensors[name] = torch.zeros(32, 48, dtype=torch.int8)

    _edit(target_dir, change)
    with pytest.raises(CheckpointError, match=r"down_proj\.weight is I8"):
        load_target(target_dir)


@pytest.mark.parametrize("size", [0, 7, 100, -1, -1000])
def test_a_truncated_file(target_dir, size):
    path = target_dir / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(DflashError, match="truncated or not a safetensors file"):
        load_target(target_dir)


def test_a_git_lfs_pointer(target_dir):
    (target_dir / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(DflashError, match="not a safetensors file"):
        load_target(target_dir)


def test_an_unreadable_file(target_dir, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(reader, "safe_open", refuse)
    with pytest.raises(DflashError, match=r"cannot read .*Permission denied"):
        load_target(target_dir)


def test_missing_and_damaged_json(target_dir):
    (target_dir / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid json"):
        load_target(target_dir)
    (target_dir / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="json object"):
        load_target(target_dir)
    (target_dir / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config.json is missing"):
        load_target(target_dir)


def test_a_refused_config_names_its_directory(tmp_path):
    write(tmp_path, {**TARGET, "architectures": ["FooForCausalLM"]}, {})
    with pytest.raises(CheckpointError, match=f"{tmp_path}: target architecture FooForCausalLM"):
        load_target(tmp_path)


def test_a_missing_shard_is_named(tmp_path):
    sharded = write(tmp_path, TARGET, target_tensors(TARGET), shards=2)
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors"):
        load_target(sharded)


def test_pickled_weights_are_never_loaded(target_dir):
    (target_dir / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"holds no \*.safetensors"):
        load_target(target_dir)
    (target_dir / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="only pickled weights"):
        load_target(target_dir)


@pytest.mark.parametrize("wrap", ["tensor", "row", "dict", "dict without id"])
def test_mask_embedding(draft_dir, wrap):
    row = torch.randn(32)
    states = {"tensor": row, "row": row[None], "dict": {"embedding": row, "mask_token_id": 5}}
    torch.save(states.get(wrap, {"embedding": row}), draft_dir / "mask_embedding.pt")
    _, weights, _ = load_draft(draft_dir, torch.float32)
    assert torch.equal(weights.mask_embedding, row)


class _Evil:
    def __reduce__(self):
        return (os.mkdir, ("/tmp/dflash-was-run",))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (torch.zeros(31), "one embedding of 32 numbers"),
        ({"mask_token_id": 5}, "one embedding of 32 numbers"),
        ({"embedding": torch.zeros(32), "mask_token_id": 6}, "is for mask token 6"),
        (_Evil(), "never loaded"),
    ],
)
def test_mask_embedding_refused(draft_dir, state, message):
    torch.save(state, draft_dir / "mask_embedding.pt")
    with pytest.raises(CheckpointError, match=message):
        load_draft(draft_dir)
    assert not os.path.exists("/tmp/dflash-was-run")


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04", pickle.dumps(_Evil())])
def test_mask_embedding_damaged(draft_dir, data):
    (draft_dir / "mask_embedding.pt").write_bytes(data)
    with pytest.raises(CheckpointError, match="damaged or holds more than tensors"):
        load_draft(draft_dir)
    assert not os.path.exists("/tmp/dflash-was-run")


def test_a_progress_bar_only_on_a_terminal(target_dir, capsys, monkeypatch):
    load_target(target_dir)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    load_target(target_dir)
    captured = capsys.readouterr()
    assert "Loading the model" in captured.err and captured.out == ""
