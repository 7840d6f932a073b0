"""The kinds of files that hold training data: sentences, vocabularies, message catalogues, texts, archives."""

import gzip
import struct
from pathlib import Path

from bapipe.zoo.data.archives import digits, volume
from bapipe.zoo.data.gettext_corpus import catalogue_pairs
from bapipe.zoo.data.language_modeling import next_token_texts
from bapipe.zoo.data.translation import translations
from benchmarks.fuzz.kinds import Kind, WrongSuccess

_ENGLISH = b"the cat sat on the mat\nno cat is on the chair\nwho saw the small cat ?\n"
_GERMAN = "die Katze saß auf der Matte\nkeine Katze ist auf dem Stuhl\nwer sah die kleine Katze ?\n".encode()
_WORDS = "the\ncat\nsat\non\nmat\ndie\nKatze\nsaß\nauf\nder\nMatte\n".encode()
_WORDS_KNOWN, _LENGTH, _NUM_BYTES = 60, 12, 260
_GZIP = b"\x1f\x8b"


def data_kinds() -> tuple[Kind, ...]:
    """Returns the kinds."""
    return (
        Kind(name="sentences", seeds=(_ENGLISH,), use=_use_sentences),
        Kind(name="vocabulary", seeds=(_WORDS,), use=_use_vocabulary),
        Kind(name="subwords", seeds=(_ENGLISH,), use=_use_subwords),
        Kind(name="catalogue", seeds=(_catalogue(),), use=_use_catalogue),
        Kind(name="text", seeds=(_ENGLISH,), use=_use_text),
        Kind(name="digits", seeds=_packed_and_not(_digits()), use=_use_digits),
        Kind(name="volume", seeds=_packed_and_not(_volume()), use=_use_volume),
    )


def _use_sentences(path: Path) -> None:
    _use_folder(path, {"source.txt": path.read_bytes(), "target.txt": _GERMAN, "vocabulary.txt": _WORDS})


def _use_vocabulary(path: Path) -> None:
    _use_folder(path, {"source.txt": _ENGLISH, "target.txt": _GERMAN, "vocabulary.txt": path.read_bytes()})


def _use_subwords(path: Path) -> None:
    _use_folder(path, {"source.txt": path.read_bytes(), "target.txt": _GERMAN})


def _use_folder(path: Path, files: dict[str, bytes]) -> None:
    """Reads a folder of sentences."""
    folder = path.with_name("sentences")
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    found = translations(str(folder), vocabulary_size=_WORDS_KNOWN, source_length=_LENGTH, target_length=_LENGTH)
    if len(found) > files["source.txt"].count(b"\n") + 1:
        raise WrongSuccess(f"{len(found)} pairs")
    for index in range(len(found)):
        (source, _, before), after = found[index]
        if not all(int(words.min()) >= 0 and int(words.max()) < _WORDS_KNOWN for words in (source, before, after)):
            raise WrongSuccess(f"a word that is not in the vocabulary, in pair {index}")
        found.text(after.tolist())


def _use_catalogue(path: Path) -> None:
    place = path.with_name("locale") / "xx" / "LC_MESSAGES" / "a.mo"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(path.read_bytes())
    for english, other in catalogue_pairs("xx", path.with_name("locale")):
        if len(english.split()) < 5 or "\n" in english + other:
            raise WrongSuccess(f"the message {english!r:.60}")


def _use_text(path: Path) -> None:
    words, after = next_token_texts(str(path), vocabulary_size=_NUM_BYTES, length=_LENGTH)[0]
    content = path.read_bytes()
    if bytes(words.tolist()) != content[:_LENGTH] or bytes(after.tolist()) != content[1 : _LENGTH + 1]:
        raise WrongSuccess("the first text is not the file's")


def _use_digits(path: Path) -> None:
    pixels, classes = digits(_packed(path))
    if pixels.shape != (len(classes), 28, 28) or int(classes.max()) > 9:
        raise WrongSuccess(f"digits of shape {tuple(pixels.shape)}")


def _use_volume(path: Path) -> None:
    found = volume(_packed(path))
    if found.numel() + 112 > len(gzip.decompress(_packed(path).read_bytes())):
        raise WrongSuccess(f"a volume of shape {tuple(found.shape)}")


def _packed(path: Path) -> Path:
    """Returns the path of an archive: of the file itself if it is one, damaged or not, else of one that holds it."""
    content = path.read_bytes()
    archive = path.with_name("archive.gz")
    archive.write_bytes(content if content.startswith(_GZIP) else gzip.compress(content))
    return archive


def _packed_and_not(content: bytes) -> tuple[bytes, ...]:
    return gzip.compress(content), content


def _digits() -> bytes:
    return b"".join(b",".join(str((i * k) % 256).encode() for k in range(784)) + b",%d\n" % i for i in range(1, 4))


def _volume() -> bytes:
    header = bytearray(352)
    struct.pack_into("<3h", header, 42, 5, 4, 3)
    struct.pack_into("<f", header, 108, 352)
    return bytes(header) + bytes(range(60))


def _catalogue() -> bytes:
    """Returns a message catalogue of gettext: the offsets of the messages and of their translations, and the texts."""
    pairs = [
        (b"", b"Content-Type: text/plain; charset=UTF-8\nPlural-Forms: nplurals=2; plural=(n != 1);\n"),
        (b"no cat is on the chair", b"keine Katze ist auf dem Stuhl"),
        (b"verb\x04the cat sat on the mat", "die Katze saß auf der Matte".encode()),
        (b"%d cat\x00%d cats", b"%d Katze\x00%d Katzen"),
    ]
    begin, texts, tables = 28 + 16 * len(pairs), b"", [b"", b""]
    for place in (0, 1):
        for pair in pairs:
            tables[place] += struct.pack("<2I", len(pair[place]), begin + len(texts))
            texts += pair[place] + b"\0"
    head = struct.pack("<7I", 0x950412DE, 0, len(pairs), 28, 28 + 8 * len(pairs), 0, 0)
    return head + tables[0] + tables[1] + texts
