# SPDX-License-Identifier: Apache-2.0
"""GGUF: tiny files against the tensors they were written from, the demo against transformers."""

import json

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from dflash.checkpoints import gguf as conversion
from dflash.checkpoints import load_target, resolve_target
from dflash.checkpoints.demo import _fetch
from dflash.checkpoints.read_configs import read_target_config
from dflash.errors import CheckpointError, DflashError
from tests.checkpoints.support import TARGET, target_tensors

NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = CONTROL + sorted(ByteLevel.alphabet()) + ["he", "ll", "hell"]
MERGES = ["h e", "l l", "he ll"]
CONFIG = {**TARGET, "vocab_size": len(TOKENS), "tie_word_embeddings": True}
TEXT = "hello 12  3\n\té 漢 <|im_end|>x"


@pytest.fixture(autouse=True)
def _cache(monkeypatch, tmp_path):
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "cache"))


def _gguf_name(name):
    stem, kind = name.rsplit(".", 1)
    parts = stem.split(".")
    if parts[:2] == ["model", "layers"]:
        return f"blk.{parts[2]}.{NAMES['.'.join(parts[3:])]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def _interleave(rows, heads):
    """Half-rotation rows to interleaved pairs: row 2i of a head is i, row 2i + 1 is i + D / 2."""
    head_dim = rows.shape[0] // heads
    half = head_dim // 2
    order = [i // 2 + (i % 2) * half for i in range(head_dim)]
    return torch.cat([rows[h * head_dim : (h + 1) * head_dim][order] for h in range(heads)])


def _write_gguf(path, architecture, tensors, pre="smollm", metadata=(), quantize=False):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(CONFIG["max_position_embeddings"])
    writer.add_embedding_length(CONFIG["hidden_size"])
    writer.add_feed_forward_length(CONFIG["intermediate_size"])
    writer.add_block_count(CONFIG["num_hidden_layers"])
    writer.add_head_count(CONFIG["num_attention_heads"])
    writer.add_head_count_kv(CONFIG["num_key_value_heads"])
    writer.add_key_length(CONFIG["head_dim"])
    writer.add_layer_norm_rms_eps(CONFIG["rms_norm_eps"])
    writer.add_rope_freq_base(CONFIG["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(CONTROL) + [1] * (len(TOKENS) - len(CONTROL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(0)
    writer.add_chat_template("{{ messages }}")
    for key, value in metadata:
        writer.add_float32(key, value) if isinstance(value, float) else writer.add_string(
            key, value
        )
    for name, tensor in tensors.items():
        values = tensor.float().numpy()
        if quantize and values.ndim == 2 and values.shape[1] % 32 == 0:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(architecture):
    config = {**CONFIG, "architectures": [architecture]}
    return config, target_tensors(config)


def _stored(architecture, tensors):
    stored = {}
    for name, tensor in tensors.items():
        if architecture == "llama" and "q_proj" in name:
            tensor = _interleave(tensor, CONFIG["num_attention_heads"])
        if architecture == "llama" and "k_proj" in name:
            tensor = _interleave(tensor, CONFIG["num_key_value_heads"])
        stored[_gguf_name(name)] = tensor
    return stored


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("llama", "LlamaForCausalLM"),
        ("qwen2", "Qwen2ForCausalLM"),
        ("qwen3", "Qwen3ForCausalLM"),
    ],
)
def test_a_tiny_file_becomes_its_tensors(tmp_path, architecture, name):
    _, tensors = _tensors(name)
    path = _write_gguf(tmp_path / "m.gguf", architecture, _stored(architecture, tensors))
    config, weights, folder = load_target(path)
    assert config.architecture == name and config.tie_word_embeddings
    assert config.dtype == torch.bfloat16 and set(config.eos_token_ids) == {0, 2}
    assert config.decoder.rms_norm_eps == 1e-6 and config.decoder.rope.theta == 10000.0
    stored = load_file(folder / "model.safetensors")
    assert stored.keys() == tensors.keys()
    assert all(torch.equal(stored[key], tensors[key]) for key in tensors)
    assert torch.equal(weights.embed_tokens, tensors["model.embed_tokens.weight"])
    assert resolve_target(tmp_path) == folder  # a directory that holds only a GGUF
    theirs = AutoConfig.from_pretrained(folder)
    assert theirs.rope_parameters["rope_theta"] == 10000.0 and theirs.head_dim == 16


def test_an_own_head_and_shards(tmp_path, monkeypatch):
    config = {**CONFIG, "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": False}
    tensors = target_tensors(config)
    path = _write_gguf(tmp_path / "m.gguf", "qwen3", _stored("qwen3", tensors))
    monkeypatch.setattr(conversion, "_SHARD_BYTES", 20_000)
    parsed, weights, folder = load_target(path)
    assert len(list(folder.glob("model-*.safetensors"))) > 2 and not parsed.tie_word_embeddings
    assert torch.equal(weights.lm_head, tensors["lm_head.weight"])
    assert torch.equal(weights.layers[2].down_proj, tensors["model.layers.2.mlp.down_proj.weight"])


def test_quantized_blocks_are_dequantised(tmp_path):
    _, tensors = _tensors("Qwen3ForCausalLM")
    path = _write_gguf(tmp_path / "m.gguf", "qwen3", _stored("qwen3", tensors), quantize=True)
    _, weights, _ = load_target(path, torch.float32)
    expected = tensors["model.embed_tokens.weight"].float()
    assert not torch.equal(weights.embed_tokens, expected)
    torch.testing.assert_close(weights.embed_tokens, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "default", "llama-bpe", "qwen2"])
def test_tokenizer_files(tmp_path, pre):
    _, tensors = _tensors("Qwen3ForCausalLM")
    path = _write_gguf(tmp_path / "m.gguf", "qwen3", _stored("qwen3", tensors), pre=pre)
    tokenizer = AutoTokenizer.from_pretrained(resolve_target(path))
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == TEXT
    assert ids[:2] == [TOKENS.index("hell"), TOKENS.index("o")]
    assert 2 in ids and tokenizer.decode(ids, skip_special_tokens=True).endswith(" x")
    assert [tokenizer.convert_tokens_to_ids(token) for token in CONTROL] == [0, 1, 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.chat_template == "{{ messages }}"


def test_tokenizer_bos_and_whole_tokens(tmp_path):
    _, tensors = _tensors("Qwen3ForCausalLM")
    stored = _stored("qwen3", tensors)
    for pre, bos in (("llama-bpe", [1]), ("qwen2", [])):
        path = _write_gguf(tmp_path / f"{pre}.gguf", "qwen3", stored, pre=pre)
        tokenizer = AutoTokenizer.from_pretrained(resolve_target(path))
        assert tokenizer.encode("hello") == [*bos, TOKENS.index("hell"), TOKENS.index("o")]


def test_converted_once(tmp_path, monkeypatch):
    _, tensors = _tensors("Qwen3ForCausalLM")
    path = _write_gguf(tmp_path / "m.gguf", "qwen3", _stored("qwen3", tensors))
    folder = resolve_target(path)
    assert folder.name == conversion.sha256_of(path)
    monkeypatch.setattr(conversion, "_open", None)
    assert resolve_target(path) == folder
    copy = tmp_path / "elsewhere.gguf"
    copy.write_bytes(path.read_bytes())
    assert resolve_target(copy) == folder


def test_the_config_alone_is_read_without_converting(tmp_path, monkeypatch):
    _, tensors = _tensors("Qwen3ForCausalLM")
    path = _write_gguf(tmp_path / "m.gguf", "qwen3", _stored("qwen3", tensors))
    config = read_target_config(path)
    assert not (tmp_path / "cache").exists()
    assert config.decoder == load_target(path)[0].decoder


def test_rope_scaling(tmp_path):
    _, tensors = _tensors("Qwen3ForCausalLM")
    scaling = [("qwen3.rope.scaling.type", "yarn"), ("qwen3.rope.scaling.factor", 4.0)]
    path = _write_gguf(tmp_path / "m.gguf", "qwen3", _stored("qwen3", tensors), metadata=scaling)
    rope = load_target(path)[0].decoder.rope
    assert rope.rope_type == "yarn" and rope.scaling["factor"] == 4.0


@pytest.mark.parametrize(
    ("architecture", "change", "keys", "message"),
    [
        ("gemma", {}, {}, "GGUF architecture 'gemma' is not supported"),
        ("llama", {"rope_freqs.weight": torch.ones(8)}, {}, "rope_freqs.weight"),
        ("llama", {"blk.0.surprise.weight": torch.ones(8)}, {}, "blk.0.surprise.weight"),
        ("llama", {}, {"pre": "jais"}, "of kind 'jais'"),
        (
            "llama",
            {},
            {"metadata": [("llama.rope.scaling.type", "longrope")]},
            "RoPE scaling 'longrope'",
        ),
    ],
)
def test_refused_by_name(tmp_path, architecture, change, keys, message):
    _, tensors = _tensors("LlamaForCausalLM")
    stored = _stored("llama", tensors) | change
    path = _write_gguf(tmp_path / "m.gguf", architecture, stored, **keys)
    with pytest.raises(CheckpointError, match=message):
        resolve_target(path)
    cache = tmp_path / "cache" / "gguf"
    assert not cache.exists() or list(cache.iterdir()) == []


def test_damaged_files(tmp_path):
    _, tensors = _tensors("LlamaForCausalLM")
    path = _write_gguf(tmp_path / "m.gguf", "llama", _stored("llama", tensors))
    data = path.read_bytes()
    for size in (0, 3, 100, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(DflashError, match="truncated or not a GGUF file"):
            resolve_target(path)


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    _, tensors = _tensors("LlamaForCausalLM")
    path = _write_gguf(tmp_path / "m.gguf", "llama", _stored("llama", tensors))
    monkeypatch.setattr(conversion, "save_file", full)
    with pytest.raises(DflashError, match="is full"):
        resolve_target(path)
    assert list((tmp_path / "cache" / "gguf").iterdir()) == []


def test_demo_tokenizer_is_smollm2s(demo_dir):
    tokenizer = AutoTokenizer.from_pretrained(demo_dir)
    assert tokenizer.tokenize("a  12 don't") == ["a", "ĠĠ", "1", "2", "Ġdon", "'t"]
    assert tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n") == [1, 4093, 198, 6004, 2, 198]
    assert tokenizer.decode([1, 16, 2], skip_special_tokens=True) == ""
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.slow
def test_demo_weights_are_transformers_own(demo_dir, tmp_path):
    """Bit for bit after rounding to bf16, and in logits against transformers' own loading."""
    path = _fetch(tmp_path)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(demo_dir))
    theirs = load_gguf_checkpoint(path, return_tensors=True, model_to_load=empty)["tensors"]
    ours = load_file(demo_dir / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name].to(torch.bfloat16)) for name in ours)

    kwargs = {"dtype": torch.float32}
    model = AutoModelForCausalLM.from_pretrained(demo_dir, **kwargs).eval()
    reference = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, **kwargs
    ).eval()
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 49152, (1, 40)))
    with torch.no_grad():
        logits, expected = model(ids).logits, reference(ids).logits
    assert (logits - expected).norm() / expected.norm() < 1e-2  # one side is rounded to bf16


def test_demo_config(demo_dir):
    config = json.loads((demo_dir / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5 and config["rope_theta"] == 100000.0
    parsed, weights, _ = load_target(demo_dir)
    assert parsed.eos_token_ids == (2,) and parsed.tie_word_embeddings
    assert weights.embed_tokens.shape == (49152, 576)
