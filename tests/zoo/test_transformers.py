"""GPT-2 and BERT: sizes counted by hand, values against Hugging Face's models, losses, and the texts."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bapipe.errors import BapipeError, InvalidModel
from bapipe.zoo import ZOO
from bapipe.zoo.bert import BERT, restored_loss
from bapipe.zoo.data.language_modeling import IGNORED, masked_texts, next_token_texts
from bapipe.zoo.factory import build
from bapipe.zoo.gpt2 import GPT2, next_word_loss
from bapipe.zoo.transformer import PreNormBlock
from tests.models.small_zoo import build_on_meta


def block(h: int) -> int:
    """Queries, keys, values, projection; up and down four times the width; two norms."""
    return 4 * (h * h + h) + (h * 4 * h + 4 * h) + (4 * h * h + h) + 2 * 2 * h


def bert(layers: int, h: int) -> int:
    """Words, positions, segments, norm; blocks; the head's dense layer, norm and biases, its weights being tied."""
    return (30_522 + 512 + 2 + 2) * h + layers * block(h) + (h * h + h) + 2 * h + 30_522


@pytest.mark.parametrize(
    ("name", "arguments", "count", "published"),
    [
        ("gpt2", {}, (50_257 + 1024) * 768 + 12 * block(768) + 2 * 768, 124_439_808),
        (
            "gpt2",
            {"num_layers": 24, "hidden_size": 1024, "num_heads": 16},
            (50_257 + 1024) * 1024 + 24 * block(1024) + 2 * 1024,
            354_823_168,
        ),
        ("bert_base", {}, bert(12, 768), 109_514_298),
        ("bert_large", {}, bert(24, 1024), 335_174_458),
    ],
)
def test_sizes(name: str, arguments: dict[str, object], count: int, published: int) -> None:
    example = build_on_meta(ZOO[name], arguments)
    assert sum(p.numel() for p in example.module.parameters()) == count == published
    assert isinstance(example.module, GPT2 | BERT)
    assert example.module.head.weight is example.module.word_embedding.weight


TINY: dict[str, object] = {
    "num_layers": 3, "hidden_size": 12, "num_heads": 3, "vocabulary_size": 31, "num_positions": 9, "length": 7,
}  # fmt: skip


def shaken(module: nn.Module) -> nn.Module:
    """The module with values unlike those it starts from, so that every parameter shows."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return module.double().eval()


def joined(path: str, parts: list[Tensor | None]) -> Tensor:
    """Their tensors laid out as ours; those of GPT-2's dense layers are stored transposed."""
    whole = torch.cat([part for part in parts if part is not None])
    return whole.T if ".c_" in path and whole.dim() == 2 else whole


def load(ours: nn.Module, theirs: nn.Module, names: dict[str, str]) -> None:
    """`names` maps our parameters to Hugging Face's, several joined by a plus."""
    assert set(names) == {name for name, _ in ours.named_parameters()}
    with torch.no_grad():
        for name, path in names.items():
            ours.get_parameter(name).copy_(joined(path, [theirs.get_parameter(part) for part in path.split("+")]))


def compare(ours: nn.Module, theirs: nn.Module, names: dict[str, str], own: Tensor, other: Tensor) -> None:
    """Both outputs and all gradients must agree."""
    torch.testing.assert_close(own, other, rtol=1e-10, atol=1e-10)
    weights = torch.randn_like(own)
    (own * weights).sum().backward()
    (other * weights).sum().backward()
    assert {part for path in names.values() for part in path.split("+")} == {n for n, _ in theirs.named_parameters()}
    for name, path in names.items():
        expected = joined(path, [theirs.get_parameter(part).grad for part in path.split("+")])
        torch.testing.assert_close(ours.get_parameter(name).grad, expected, rtol=1e-9, atol=1e-9, msg=name)


def test_gpt2_equals_hugging_face_s() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=3, n_embd=12, n_head=3, vocab_size=31, n_positions=9, bos_token_id=0, eos_token_id=0
    )
    theirs = shaken(transformers.GPT2LMHeadModel(config))
    names = {
        "word_embedding.weight": "transformer.wte.weight",
        "position_embedding.weight": "transformer.wpe.weight",
        "norm.weight": "transformer.ln_f.weight",
        "norm.bias": "transformer.ln_f.bias",
    }
    for i in range(3):
        for own, other in (
            ("attention_norm", "ln_1"),
            ("attention.qkv", "attn.c_attn"),
            ("attention.projection", "attn.c_proj"),
            ("dense_norm", "ln_2"),
            ("up", "mlp.c_fc"),
            ("down", "mlp.c_proj"),
        ):
            for kind in ("weight", "bias"):
                names[f"blocks.{i}.{own}.{kind}"] = f"transformer.h.{i}.{other}.{kind}"
    ours = build(ZOO["gpt2"], TINY).module.double().eval()
    load(ours, theirs, names)
    tokens = torch.randint(31, (2, 7))
    compare(ours, theirs, names, ours(tokens), theirs(tokens).logits)


def test_bert_equals_hugging_face_s() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        num_hidden_layers=3,
        hidden_size=12,
        num_attention_heads=3,
        intermediate_size=48,
        vocab_size=31,
        max_position_embeddings=9,
    )
    theirs = shaken(transformers.BertForMaskedLM(config))
    names = {
        "word_embedding.weight": "bert.embeddings.word_embeddings.weight",
        "position_embedding.weight": "bert.embeddings.position_embeddings.weight",
        "segment_embedding.weight": "bert.embeddings.token_type_embeddings.weight",
        "head.bias": "cls.predictions.bias",
    }
    for kind in ("weight", "bias"):
        names[f"norm.{kind}"] = f"bert.embeddings.LayerNorm.{kind}"
        names[f"transform.{kind}"] = f"cls.predictions.transform.dense.{kind}"
        names[f"transform_norm.{kind}"] = f"cls.predictions.transform.LayerNorm.{kind}"
        for i in range(3):
            layer = f"bert.encoder.layer.{i}"
            names[f"blocks.{i}.attention.qkv.{kind}"] = "+".join(
                f"{layer}.attention.self.{part}.{kind}" for part in ("query", "key", "value")
            )
            for own, other in (
                ("attention.projection", "attention.output.dense"),
                ("attention_norm", "attention.output.LayerNorm"),
                ("up", "intermediate.dense"),
                ("down", "output.dense"),
                ("dense_norm", "output.LayerNorm"),
            ):
                names[f"blocks.{i}.{own}.{kind}"] = f"{layer}.{other}.{kind}"
    ours = build(ZOO["bert_base"], TINY).module.double().eval()
    load(ours, theirs, names)
    tokens, segments = torch.randint(31, (2, 7)), torch.randint(2, (2, 7))
    is_word = torch.arange(7) < torch.tensor([[7], [4]])
    own = ours(tokens, segments, is_word)
    other = theirs(input_ids=tokens, token_type_ids=segments, attention_mask=is_word.long()).logits
    compare(ours, theirs, names, own, other)


def test_padding_is_not_attended_to() -> None:
    model = shaken(build(ZOO["bert_base"], TINY).module)
    tokens, segments = torch.randint(31, (1, 7)), torch.zeros(1, 7, dtype=torch.int64)
    is_word = torch.arange(7)[None] < 4
    other = torch.where(is_word, tokens, (tokens + 1) % 31)
    torch.testing.assert_close(model(tokens, segments, is_word)[:, :4], model(other, segments, is_word)[:, :4])


def test_gpt2_is_causal() -> None:
    model = shaken(build(ZOO["gpt2"], TINY).module)
    tokens = torch.randint(31, (1, 7))
    other = torch.cat((tokens[:, :4], (tokens[:, 4:] + 1) % 31), dim=1)
    torch.testing.assert_close(model(tokens)[:, :4], model(other)[:, :4])
    assert not torch.equal(model(tokens)[:, 4:], model(other)[:, 4:])


def test_starting_values() -> None:
    torch.manual_seed(0)
    sizes = {
        "num_layers": 8,
        "hidden_size": 64,
        "num_heads": 4,
        "vocabulary_size": 300,
        "num_positions": 40,
        "length": 9,
    }
    gpt = build(ZOO["gpt2"], sizes).module
    assert isinstance(gpt, GPT2)
    first = gpt.blocks[0]
    assert isinstance(first, PreNormBlock)
    for layer, std in (
        (first.attention.qkv, 0.02),
        (first.up, 0.02),
        (first.attention.projection, 0.005),  # 0.02 / sqrt(16 branches)
        (first.down, 0.005),
        (gpt.word_embedding, 0.02),
        (gpt.position_embedding, 0.02),
    ):
        assert layer.weight.std().item() == pytest.approx(std, rel=0.06)
    for name, parameter in gpt.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any()
    model = build(ZOO["bert_base"], sizes).module
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any()
        elif "norm" not in name:
            assert parameter.abs().max() <= 0.04
            assert parameter.std().item() == pytest.approx(0.02 * 0.8796, rel=0.1), name  # a normal cut at 2 deviations


def test_losses_in_closed_form() -> None:
    torch.manual_seed(0)
    scores = torch.randn(2, 3, 5)
    logs = scores.log_softmax(2)
    target = torch.tensor([[1, 2, 3], [4, 0, 1]])
    expected = -sum(logs[b, t, target[b, t]] for b in range(2) for t in range(3)) / 6
    torch.testing.assert_close(next_word_loss(scores, target), expected)
    hidden = torch.tensor([[1, IGNORED, 3], [IGNORED, 0, IGNORED]])
    expected = (-(logs[0, 0, 1] + logs[0, 2, 3]) / 2 - logs[1, 1, 0]) / 2
    torch.testing.assert_close(restored_loss(scores, hidden), expected)
    assert restored_loss(scores, torch.full_like(target, IGNORED)).item() == 0
    assert next_word_loss(torch.zeros(2, 3, 5), target).item() == pytest.approx(math.log(5))


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("gpt2", {"num_heads": 5}, "hidden_size 768 does not divide into 5 heads; want a multiple of it"),
        ("gpt2", {"length": 2000}, "length is 2000; there are 1024 positions, so want at most that"),
        ("gpt2", {"num_layers": 0}, "num_layers is 0; want an integer of at least 1"),
        ("bert_base", {"length": 600}, "length is 600; there are 512 positions, so want at most that"),
        ("bert_base", {"vocabulary_size": 2}, "vocabulary_size is 2; 2 words are marks, so want at least 3"),
        ("bert_large", {"num_heads": 3}, "hidden_size 1024 does not divide into 3 heads; want a multiple of it"),
    ],
)
def test_errors(name: str, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidModel) as error:
        build_on_meta(ZOO[name], arguments)
    assert str(error.value) == f"factory '{ZOO[name]}' failed: ValueError: {message}"


def test_synthetic_texts() -> None:
    data = next_token_texts("synthetic", vocabulary_size=50, length=400)
    assert len(data) == 10_000  # type: ignore[arg-type]
    tokens, target = data[5]
    assert tokens.shape == target.shape == (400,)
    assert torch.equal(tokens[1:], target[:-1])
    assert 0 <= tokens.min() <= tokens.max() < 50
    share = ((tokens + 1) % 50 == target).double().mean().item()
    assert 0.7 < share < 0.85  # three in four, and now and then by chance
    with pytest.raises(IndexError):
        data[10_000]


def test_masked_texts() -> None:
    data = masked_texts("synthetic", vocabulary_size=50, length=100)
    fates = {"marked": 0, "kept": 0, "other": 0}
    for index in range(200):
        (tokens, segments, is_word), target = data[index]
        n = int(is_word.sum())
        assert 50 <= n <= 100
        assert torch.equal(is_word, torch.arange(100) < n)
        assert not tokens[n:].any()
        assert segments.tolist() == [0] * (n // 2) + [1] * (n - n // 2) + [0] * (100 - n)
        chosen = target != IGNORED
        assert int(chosen.sum()) == round(0.15 * n)
        assert (target[chosen] >= 2).all()
        assert not (chosen & ~is_word).any()
        assert (tokens[is_word] >= 1).all()
        fates["marked"] += int((tokens[chosen] == 1).sum())
        fates["kept"] += int((tokens[chosen] == target[chosen]).sum())
        fates["other"] += int(((tokens[chosen] != target[chosen]) & (tokens[chosen] != 1)).sum())
    total = sum(fates.values())
    assert fates["marked"] / total == pytest.approx(0.8, abs=0.03)
    assert fates["other"] / total == pytest.approx(0.1, abs=0.03)


def test_texts_of_files(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"fgh")
    (tmp_path / "a.txt").write_bytes(b"abcde")
    data = next_token_texts(str(tmp_path), vocabulary_size=256, length=3)
    assert len(data) == 2  # type: ignore[arg-type]
    assert [data[1][0].tolist(), data[1][1].tolist()] == [list(b"efg"), list(b"fgh")]
    (tokens, _, is_word), target = masked_texts(str(tmp_path / "a.txt"), vocabulary_size=258, length=5)[0]
    restored = torch.where(target == IGNORED, tokens, target)[is_word]
    assert restored.tolist() == [2 + byte for byte in b"abcde"][: len(restored)]
    manual = next_token_texts("pydoc", vocabulary_size=256, length=128)
    assert len(manual) > 3000  # type: ignore[arg-type]
    assert b"Python" in b"".join(bytes(manual[i][0].tolist()) for i in range(100))


def test_text_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def message(spec: str, vocabulary_size: int = 300) -> str:
        with pytest.raises(BapipeError) as error:
            masked_texts(spec, vocabulary_size=vocabulary_size, length=5)
        return str(error.value)

    assert message("pydoc", 257) == (
        "data 'pydoc' is read byte by byte, and the model knows 257 words: build it with vocabulary_size=258 or more"
    )
    assert message(str(tmp_path)) == f"data '{tmp_path}' holds no .txt files: want a folder with some"
    gone = str(tmp_path / "gone")
    assert message(gone) == (
        f"data '{gone}' cannot be read: No such file or directory; want synthetic, pydoc, a file, or a folder of "
        ".txt files"
    )
    (tmp_path / "a.txt").write_bytes(b"abcd")
    assert message(str(tmp_path)) == f"data '{tmp_path}' has 4 bytes, and one text takes 5: give more"
    monkeypatch.setattr("bapipe.zoo.data.language_modeling.find_spec", lambda name: None)
    assert message("pydoc") == "data 'pydoc': this Python comes without its manual; give a file or folder of text"
