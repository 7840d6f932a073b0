"""GNMT: sizes counted by hand, values against packed sequences and loops, the loss, and the sentences."""

import math
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from sentencepiece import SentencePieceProcessor
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from bapipe.errors import BapipeError, InvalidModel
from bapipe.tracing.layers import trace
from bapipe.zoo import ZOO
from bapipe.zoo.data.gettext_corpus import catalogue_pairs
from bapipe.zoo.data.translation import Translations, translations
from bapipe.zoo.factory import build
from bapipe.zoo.gnmt import GNMT, Attention, smoothed_loss
from tests.models.small_zoo import build_on_meta

GNMT_FACTORY = "bapipe.zoo.gnmt:gnmt"
H, V = 1024, 32_320


def lstm(size: int) -> int:
    """Four gates of H units, each with a weight for every input and unit before, and two biases."""
    return 4 * (H * (size + H) + 2 * H)


BIDIRECTIONAL = 2 * lstm(H)
ATTENTION = 2 * H * H + H + 1 + H
"""Query and key without biases, the vector, its length, the bias."""
PAIRS_OF_4 = BIDIRECTIONAL + lstm(2 * H) + 2 * lstm(H) + lstm(H) + 3 * lstm(2 * H)
GNMT_8 = 2 * V * H + PAIRS_OF_4 + ATTENTION + V * H + V


@pytest.mark.parametrize(
    ("factory", "arguments", "count", "in_words"),
    [
        (ZOO["gnmt8"], {}, GNMT_8, 193_766_977),
        (ZOO["gnmt16"], {}, GNMT_8 + 4 * (lstm(H) + lstm(2 * H)), 277_718_593),
        (ZOO["gnmt"], {"num_pairs": 24}, GNMT_8 + 20 * (lstm(H) + lstm(2 * H)), 613_525_057),
    ],
)
def test_sizes(factory: str, arguments: dict[str, object], count: int, in_words: int) -> None:
    module = build_on_meta(factory, arguments).module
    assert sum(p.numel() for p in module.parameters()) == count == in_words
    assert len(list(module.parameters())) == len(list(module.named_parameters(remove_duplicate=False)))  # none is tied


def test_layers() -> None:
    example = build_on_meta(ZOO["gnmt8"], {})
    model = trace(example.module)
    kinds = [layer.kind for layer in model.layers]
    assert {kind: kinds.count(kind) for kind in kinds} == {"Embedding": 2, "Dropout": 8, "LSTM": 9, "Linear": 3}
    assert model.inputs == ("source", "source_lengths", "target")
    assert example.module(*example.inputs).shape == (1, 25, V)


def sentences(batch: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    lengths = torch.tensor([5, 2, 7])[:batch]
    source = torch.randint(4, 30, (batch, 7)) * (torch.arange(7) < lengths[:, None])
    return source, lengths, torch.randint(1, 30, (batch, 6))


@pytest.fixture
def model() -> GNMT:
    torch.manual_seed(0)
    module = build(GNMT_FACTORY, {"num_pairs": 4, "hidden_size": 8, "vocabulary_size": 30}).module
    assert isinstance(module, GNMT)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.3 * torch.randn_like(parameter)  # saturates more gates than ±0.1 would
    return module.double().eval()


def read_packed(model: GNMT, source: Tensor, lengths: Tensor) -> Tensor:
    """The encoder with one bidirectional LSTM and packed sequences all the way up; padding gives 0."""
    encoder = model.encoder
    both = nn.LSTM(8, 8, batch_first=True, bidirectional=True)
    weights = dict(encoder.first.ahead.named_parameters())
    weights |= {f"{name}_reverse": tensor for name, tensor in encoder.first.back.named_parameters()}
    packed = pack_padded_sequence(encoder.embedding(source), lengths, batch_first=True, enforce_sorted=False)
    packed, _ = torch.func.functional_call(both, dict[str, Tensor](weights), (packed,))
    packed, _ = encoder.second.lstm(packed)
    for layer in encoder.later:
        assert isinstance(layer.lstm, nn.LSTM)
        packed = packed._replace(data=packed.data + layer.lstm(packed)[0].data)
    return pad_packed_sequence(packed, batch_first=True, total_length=source.shape[1])[0]


def attend(attention: Attention, query: Tensor, words: Tensor) -> Tensor:
    """One query [size] over the words [length, size] of one sentence."""
    v = attention.direction * attention.scale / attention.direction.square().sum().sqrt()
    scores = [v @ torch.tanh(attention.query.weight @ query + attention.key.weight @ w + attention.bias) for w in words]
    e = torch.stack(scores).exp()
    return (e[:, None] * words).sum(0) / e.sum()


def cell(layer: Any, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """One step of one LSTM on one vector."""
    h, c = state
    gates = layer.weight_ih_l0 @ x + layer.bias_ih_l0 + layer.weight_hh_l0 @ h + layer.bias_hh_l0
    i, f, g, o = gates.chunk(4)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def write_in_a_loop(model: GNMT, words: Tensor, target: Tensor) -> Tensor:
    """The decoder for one sentence, word by word."""
    decoder = model.decoder
    layers = [decoder.first.lstm, decoder.second.lstm, *(layer.lstm for layer in decoder.later)]
    states = [(torch.zeros(8).double(), torch.zeros(8).double()) for _ in layers]
    scores = []
    for word in target:
        states[0] = cell(layers[0], decoder.embedding.weight[word], states[0])
        attended = attend(decoder.attention, states[0][0], words)
        x = states[0][0]
        for number, layer in enumerate(layers[1:], start=1):
            states[number] = cell(layer, torch.cat((x, attended)), states[number])
            x = states[number][0] + (x if number > 1 else 0)
        scores.append(decoder.classifier.weight @ x + decoder.classifier.bias)
    return torch.stack(scores)


def test_the_encoder_equals_packed_sequences(model: GNMT) -> None:
    source, lengths, _ = sentences()
    ours, packed = model.encoder(source, lengths), read_packed(model, source, lengths)
    words = torch.arange(7) < lengths[:, None]
    torch.testing.assert_close(ours[words], packed[words], rtol=1e-12, atol=1e-12)
    assert not packed[~words].any()


def test_the_model_and_its_gradients_equal_loops(model: GNMT) -> None:
    source, lengths, target = sentences()
    packed = read_packed(model, source, lengths)
    expected = torch.stack([write_in_a_loop(model, packed[i, : lengths[i]], target[i]) for i in range(3)])
    scores = model(source, lengths, target)
    torch.testing.assert_close(scores, expected, rtol=1e-11, atol=1e-12)
    weights = torch.randn_like(scores)
    own = torch.autograd.grad((scores * weights).sum(), list(model.parameters()))
    theirs = torch.autograd.grad((expected * weights).sum(), list(model.parameters()))
    for (name, _), a, b in zip(model.named_parameters(), own, theirs, strict=True):
        if name.endswith("embedding.weight"):  # no gradient for the padding word
            assert not a[0].any()
            a, b = a[1:], b[1:]
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")


def test_padding_changes_nothing(model: GNMT) -> None:
    source, lengths, target = sentences()
    longer = torch.cat((source, torch.zeros(3, 4, dtype=torch.int64)), dim=1)
    torch.testing.assert_close(model(longer, lengths, target), model(source, lengths, target), rtol=1e-12, atol=1e-12)


def test_dropout_acts_on_what_enters_each_lstm(model: GNMT) -> None:
    drops = [module for module in model.modules() if isinstance(module, nn.Dropout)]
    assert [drop.p for drop in drops] == [0.2] * 8
    seen = []
    for drop in drops:
        drop.register_forward_hook(lambda module, args, out: seen.append(args[0].shape[-1]))
    model(*sentences())
    assert seen == [8, 16, 8, 8, 8, 16, 16, 16]


def test_starting_values() -> None:
    torch.manual_seed(0)
    module = build(GNMT_FACTORY, {"num_pairs": 2, "hidden_size": 64, "vocabulary_size": 100}).module
    for name, parameter in module.named_parameters():
        if name.endswith(("bias_hh_l0", "attention.bias")):
            assert not parameter.any(), name
        elif name.endswith("scale"):
            assert parameter.item() == 0.125
        else:
            assert parameter.abs().max() <= 0.1, name
            assert parameter.std().item() == pytest.approx(0.1 / 3**0.5, rel=0.2), name


def test_loss_in_closed_form() -> None:
    scores = torch.tensor([[[2.0, 0.0, 1.0], [5.0, 5.0, 5.0]], [[0.0, 1.0, 3.0], [1.0, 1.0, 0.0]]])
    target = torch.tensor([[2, 0], [1, 1]])
    logs = scores.log_softmax(2)
    words = [(0, 0, 2), (1, 0, 1), (1, 1, 1)]
    expected = sum(-0.9 * logs[b, t, w] - 0.1 * logs[b, t].mean() for b, t, w in words) / 2
    torch.testing.assert_close(smoothed_loss(scores, target), expected)
    uniform = smoothed_loss(torch.zeros(4, 5, 7), torch.ones(4, 5, dtype=torch.int64))
    assert uniform.item() == pytest.approx(5 * math.log(7))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_pairs": 1}, "num_pairs is 1; the first two layers of each side are special, so want at least 2"),
        ({"hidden_size": 0}, "hidden_size is 0; want an integer of at least 1"),
        ({"vocabulary_size": 4}, "vocabulary_size is 4; 4 words are marks, so want at least 5"),
        ({"target_length": 1}, "target_length is 1; every target ends with a mark, so want at least 2"),
    ],
)
def test_errors(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidModel) as error:
        build(GNMT_FACTORY, arguments)
    assert str(error.value) == f"factory '{GNMT_FACTORY}' failed: ValueError: {message}"


def opened(spec: Path | str, vocabulary_size: int = 9, length: int = 5) -> Translations:
    return translations(str(spec), vocabulary_size=vocabulary_size, source_length=length, target_length=length)


def test_synthetic_sentences() -> None:
    data = opened("synthetic", vocabulary_size=100, length=9)
    assert len(data) == 10_000
    words = []
    for index in range(300):
        (source, length, before), after = data[index]
        n = int(length)
        assert 4 <= n <= 8
        assert not source[n:].any()
        assert before[0] == 2
        assert after[n] == 3
        assert torch.equal(before[1 : n + 1], after[:n])
        assert not before[n + 1 :].any()
        assert not after[n + 1 :].any()
        assert torch.equal(after[:n], 4 + (source[:n] - 4 + 1) % 96)
        words += source[:n].tolist()
    counts = torch.bincount(torch.tensor(words), minlength=100)
    assert counts[:4].tolist() == [0] * 4
    assert counts[4] / len(words) == pytest.approx(math.log(2) / math.log(97), rel=0.2)
    assert counts[5] / counts[4] == pytest.approx(math.log(1.5) / math.log(2), rel=0.25)
    assert data.reference(7) == data.text(data[7][1].tolist()) == " ".join(str(w) for w in data[7][1].tolist() if w > 3)
    with pytest.raises(IndexError):
        data[10_000]


def written(folder: Path, pairs: dict[str, str]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "source.txt").write_text("".join(f"{source}\n" for source in pairs))
    (folder / "target.txt").write_text("".join(f"{target}\n" for target in pairs.values()))
    return folder


PAIRS = {
    "the cat": "die Katze",
    "the dog sees\u2028the cat": "der Hund",
    "": "nichts",
    "the very very big old dog": "Hund",
}


def test_words_of_a_list(tmp_path: Path) -> None:
    written(tmp_path, PAIRS | {"rare cat": "die Katze rare"})
    (tmp_path / "vocabulary.txt").write_text("the\ncat 7\n\nHund\nKatze\ndie\nrare\n")
    data = opened(tmp_path)
    number = {"the": 4, "cat": 5, "Hund": 6, "Katze": 7, "die": 8}  # five words fit
    assert len(data) == 3
    (source, length, before), after = data[0]
    assert source.tolist() == [number["the"], number["cat"], 0, 0, 0]
    assert (length.item(), length.dtype) == (2, torch.int64)
    assert before.tolist() == [2, number["die"], number["Katze"], 0, 0]
    assert after.tolist() == [number["die"], number["Katze"], 3, 0, 0]
    assert data[2][0][0].tolist() == [1, number["cat"], 0, 0, 0]
    assert [data.part(0, place).tolist() for place in range(4)] == [x.tolist() for x in (source, length, before, after)]
    assert data.text(after.tolist()) == "die Katze" == data.reference(0)
    assert (data.text([8, 1, 99, 3, 7]), data.reference(2)) == ("die ? ?", "die Katze rare")


def test_a_byte_order_mark_is_no_part_of_the_first_word(tmp_path: Path) -> None:
    written(tmp_path, PAIRS)
    (tmp_path / "vocabulary.txt").write_text("the\ncat\n", encoding="utf-8-sig")
    (tmp_path / "source.txt").write_text("the\ncat\n")
    (tmp_path / "target.txt").write_text("cat\nthe\n")
    data = opened(tmp_path)
    assert [data[place][0][0].tolist()[0] for place in range(2)] == [4, 5]


def test_subwords_are_trained_once_on_both_languages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    caplog.set_level("INFO", "bapipe.zoo")
    written(tmp_path, PAIRS)
    data = opened(tmp_path, vocabulary_size=60, length=9)
    kept = list((tmp_path / "cache" / "bapipe").iterdir())
    assert [path.name.partition(".")[2] for path in kept] == ["subwords.model"]
    assert caplog.messages == [
        "training 60 subwords on 7 sentences",
        f"data '{tmp_path}': 1 of 4 pairs are left out, empty or longer than 9 and 8 words",
    ]
    processor = SentencePieceProcessor(model_file=str(kept[0]))
    assert [processor.id_to_piece(i) for i in range(4)] == ["<pad>", "<unk>", "<s>", "</s>"]
    (source, length, before), after = data[0]
    assert source[:length].tolist() == processor.encode("the cat")
    assert (
        after.tolist()[: after.tolist().index(3)]
        == processor.encode("die Katze")
        == before[1:].tolist()[: before.tolist().index(0) - 1]
    )
    assert data.text(after.tolist()) == data.reference(0) == "die Katze"
    assert data.text([1, 10**6, 3]) == " \u2047  \u2047 "
    model = kept[0].read_bytes()
    again = pickle.loads(pickle.dumps(opened(tmp_path, vocabulary_size=60, length=9)))
    assert torch.equal(again[0][1], after)
    assert len(caplog.messages) == 3  # not trained again
    kept[0].unlink()
    opened(tmp_path, vocabulary_size=60, length=9)
    assert kept[0].read_bytes() == model
    more = PAIRS | {"other text": "anderer Text"}
    written(tmp_path, more)
    letters = len({letter for pair in more.items() for text in pair for letter in text if not letter.isspace()})
    opened(tmp_path, vocabulary_size=60, length=9)
    assert len(list((tmp_path / "cache" / "bapipe").iterdir())) == 2
    with pytest.raises(BapipeError) as error:
        opened(tmp_path, vocabulary_size=9)
    assert str(error.value) == (
        f"no 9 subwords can be trained: Vocabulary size is smaller than required_chars. 9 vs {letters + 5}. Increase vocab_size or "
        "decrease character_coverage with --character_coverage option. Build the model with a larger vocabulary_size"
    )


def test_a_folder_may_hold_sentences_to_evaluate_on(tmp_path: Path) -> None:
    written(tmp_path / "train", PAIRS)
    written(tmp_path / "val", {"the dog": "der Hund"})
    (tmp_path / "vocabulary.txt").write_text("the\ncat\ndog\n")
    data = opened(tmp_path)
    assert data.held_out is not None
    assert (len(data), len(data.held_out), data.held_out.held_out) == (2, 1, None)
    assert data.held_out[0][0][0].tolist() == [4, 6, 0, 0, 0]
    assert data.held_out.reference(0) == "der Hund"


def catalogue(messages: dict[str, str], order: str) -> bytes:
    """A catalogue as gettext's manual describes it."""
    sources = [text.encode() for text in messages]
    targets = [text.encode() for text in messages.values()]
    header, table = 7 * 4, 8 * len(messages)
    content = struct.pack(f"{order}7I", 0x950412DE, 0, len(messages), header, header + table, 0, 0)
    start = header + 2 * table
    for text in (*sources, *targets):
        content += struct.pack(f"{order}2I", len(text), start)
        start += len(text) + 1
    return content + b"".join(text + b"\0" for text in (*sources, *targets))


def test_sentences_of_catalogues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "de" / "LC_MESSAGES"
    folder.mkdir(parents=True)
    said = {
        "": "Content-Type: text/plain; charset=UTF-8",
        "no such file in folder '%s'": "keine solche Datei im Ordner »%s«",
        "too short": "zu kurz",
        "menu\4cannot open the file twice": "Datei lässt sich nicht zweimal öffnen",
        "%d file is in there\0%d files are in there": "%d Datei\0%d Dateien",
    }
    (folder / "a.mo").write_bytes(catalogue(said, "<"))
    (folder / "b.mo").write_bytes(
        catalogue({"no such file in folder '%s'": "again", "he is here and well": "gut"}, ">")
    )
    (folder / "c.mo").write_bytes(b"damaged")
    (folder / "d.mo").write_bytes(catalogue({"one two three four five": "x"}, "<").replace(b"x", b"\xe4"))
    assert list(catalogue_pairs("de", tmp_path)) == [
        ("no such file in folder '%s'", "keine solche Datei im Ordner »%s«"),
        ("cannot open the file twice", "Datei lässt sich nicht zweimal öffnen"),
        ("he is here and well", "gut"),
    ]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(
        "bapipe.zoo.data.translation.catalogue_pairs", lambda language: catalogue_pairs(language, tmp_path)
    )
    data = opened("locale:de", vocabulary_size=60, length=40)
    assert [data.text(data[i][0][0].tolist()) for i in range(len(data))] == [
        "no such file in folder '%s'", "cannot open the file twice", "he is here and well",
    ]  # fmt: skip


def test_folder_errors(tmp_path: Path) -> None:
    def message(spec: Path | str) -> str:
        with pytest.raises(BapipeError) as error:
            opened(spec)
        return str(error.value)

    gone = tmp_path / "gone"
    assert message(gone) == (
        f"data '{gone}' is not a folder: want synthetic, locale:de, or a folder with source.txt and target.txt"
    )
    assert message("locale:xx") == (
        "data 'locale:xx': this machine's programs have no messages in language 'xx' under /usr/share/locale: want the "
        "name of a folder there, such as de, or a folder with source.txt and target.txt"
    )
    assert message(tmp_path) == (
        f"{tmp_path / 'source.txt'}: cannot be read: [Errno 2] No such file or directory: "
        f"'{tmp_path / 'source.txt'}'; want UTF-8 text, a sentence per line"
    )
    (tmp_path / "source.txt").write_text("one two three four five six\n")
    (tmp_path / "target.txt").write_text("eins\nzwei\n")
    assert message(tmp_path) == (
        f"data '{tmp_path}' has 1 lines in source.txt and 2 in target.txt: want a translation per line"
    )
    (tmp_path / "target.txt").write_text("eins\n")
    (tmp_path / "vocabulary.txt").write_text("one\n")
    assert message(tmp_path) == (
        f"data '{tmp_path}' has no pair of up to 5 and 4 words: build the model with a larger source_length and "
        "target_length"
    )
