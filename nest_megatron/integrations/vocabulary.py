"""Rows of vocabularies: of models on the Hugging Face hub, of tokenizers, of Megatron-LM's jobs.

A recipe that fine-tunes names the model that it starts from, or its tokenizer, and no number. A
command of Megatron-LM says the number, or names files: tokens are counted as Megatron-LM's
tokenizers count them. Files are read as JSON, as text, or as the pieces of a SentencePiece model;
neither transformers nor sentencepiece is needed. Sources: ``a`` core_v0.16.1
``training/tokenizer/tokenizer.py``, ``b`` 0.20 ``core/tokenizers``.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from nest_megatron.catalogue_files import catalogue_names, catalogue_root
from nest_megatron.documents import Limits, parse_json
from nest_megatron.errors import UserInputError
from nest_megatron.files import expanded, read_bytes, read_text
from nest_megatron.integrations.megatron_lm.layout_arguments import Values, flag_error, flag_of
from nest_megatron.layout.rulebook.facts import release_number
from nest_megatron.model.spec import ModelFamily

#: Rows of the embedding by ``config.json``, of models that recipes of NeMo 2.7.3 start from and the
#: catalogue lacks; of ``gpt-neox-20b``, whose tokenizer alone they name, those of the tokenizer.
_ROWS = {
    "deepseek-ai/DeepSeek-V3-Base": 129_280,
    "EleutherAI/gpt-neox-20b": 50_277,
    "intfloat/e5-large-v2": 30_522,
    "mgoin/Nemotron-4-340B-Base-hf": 256_000,
    "mistralai/Mistral-7B-v0.3": 32_768,
    "mistralai/Mistral-Small-3-24B-Instruct-2501": 131_072,
    "nvidia/Llama-3.1-Nemotron-70B-Instruct-HF": 128_256,
    "nvidia/Llama-3.1-Nemotron-Nano-8B-v1": 128_256,
    "nvidia/Llama-3_1-Nemotron-Ultra-253B-v1": 128_256,
    "nvidia/Llama-3_3-Nemotron-Super-49B-v1": 128_256,
    "nvidia/Minitron-4B-Base": 256_000,
    "thhaus/nemotron3-22b-hf": 256_000,
    "thhaus/nemotron3-8b": 256_000,
    "thhaus/nemotron4-15b-base-hf": 256_000,
}
_NAME = re.compile(r"(?:nemo://|hf://)?([\w.-]+/[\w.-]+)")
_SIZE = re.compile(r"^vocab_size: (\d+)", re.MULTILINE)
#: Files of which a tokenizer has at least one.
_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
#: Switches of the Hugging Face libraries that belong to the process.
_OFFLINE = (
    ("huggingface_hub.constants", "HF_HUB_OFFLINE"),
    ("transformers.utils.hub", "_is_offline_mode"),
)
_SWITCHING = threading.Lock()


def hub_name(text: object) -> str | None:
    """The name on the hub that a path of a recipe says, if it says one.

    >>> hub_name("nemo://meta-llama/Meta-Llama-3-8B"), hub_name("/checkpoints/mine")
    ('meta-llama/Meta-Llama-3-8B', None)
    """
    found = _NAME.fullmatch(text) if isinstance(text, str) else None
    return None if found is None else found[1]


def rows_of_model(name: str) -> int | None:
    """Rows of a model's vocabulary, where the catalogue or the table above has it.

    >>> rows_of_model("meta-llama/Meta-Llama-3-8B"), rows_of_model("mine/model")
    (128256, None)
    """
    if name in _ROWS:
        return _ROWS[name]
    said = re.compile(rf"(?<![\w./-]){re.escape(name)}(?![\w.-])")
    sizes: set[str] = set()
    for entry in catalogue_names("model"):
        text = catalogue_root().joinpath("model", f"{entry}.yaml").read_text(encoding="utf-8")
        if said.search(text) and (size := _SIZE.search(text)) is not None:
            sizes.add(size[1])
    return int(sizes.pop()) if len(sizes) == 1 else None


def is_cached(name: str) -> bool:
    """Whether files of a tokenizer lie in a folder of this name, or in the cache of the hub."""
    if Path(name).exists():
        return True
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return False
    return any(isinstance(try_to_load_from_cache(name, file), str) for file in _FILES)


@contextlib.contextmanager
def without_hub() -> Iterator[None]:
    """Keep the Hugging Face libraries from asking the hub about files that are here."""
    from unittest import mock  # which imports asyncio: not at the start of each command

    with _SWITCHING, contextlib.ExitStack() as stack:
        for module, name in _OFFLINE:
            with contextlib.suppress(ImportError):
                owner: Any = importlib.import_module(module)
                if hasattr(owner, name):
                    stack.enter_context(mock.patch.object(owner, name, True))
        yield


_MOST_BYTES = 512 << 20
_LIMITS = Limits(num_bytes=_MOST_BYTES, num_nodes=_MOST_BYTES // 8)
#: ``len`` of transformers' AutoTokenizer (a:167, sft_tokenizer.py:42; b huggingface_tokenizer:345).
_HUGGING_FACE = ("HuggingFaceTokenizer", "SFTTokenizer", "MultimodalTokenizer")
_SPECIAL = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_EXTRA = ("added_tokens_decoder", "additional_special_tokens", "extra_special_tokens")
#: Of the vocabulary that a tokenizer is published with.
_TOKENIZER_ROWS = {
    "GPT2BPETokenizer": 50_257,
    "Llama2Tokenizer": 32_000,
    "BertWordPieceLowerCase": 30_522,
    "BertWordPieceCase": 28_996,
}
_DEFAULT_TOKENIZERS = {
    ModelFamily.GPT: "GPT2BPETokenizer",
    ModelFamily.BERT: "BertWordPieceLowerCase",
    ModelFamily.T5: "BertWordPieceLowerCase",
}


def vocab_size_of(values: Values, family: ModelFamily, version: str, notes: list[str]) -> int:
    """Vocabulary rows before padding: of the tokenizer's files where they are on this host.

    Args:
        values: Megatron's arguments by destination.
        notes: what is assumed is added to them.

    Raises:
        UserInputError: if neither the arguments nor files on this host say it.
    """
    if values.get("padded_vocab_size"):
        return int(values["padded_vocab_size"])
    given = values.get("vocab_size")
    tokenizer = _tokenizer(values, family)
    if given is not None and tokenizer.startswith("Null"):  # an end of documents beside it
        return int(given) + (release_number(version) < (0, 18) or tokenizer != "NullTokenizer")
    if (counted := vocabulary_rows(values, tokenizer, version)) is not None:
        rows, source = counted
        notes.append(f"The vocabulary has {rows:,} tokens ({source}).")
        return rows
    if given is not None:
        return int(given)
    named = values.get("tokenizer_model") or values.get("vocab_file")
    files = f"the files of {tokenizer}, which are not on this host ({named or 'no file is named'})"
    if tokenizer in _TOKENIZER_ROWS:
        rows = _TOKENIZER_ROWS[tokenizer]
        if tokenizer.startswith("BertWordPiece"):  # [BOS], [EOS] and what T5 masks spans with
            rows += 2 + (values.get("vocab_extra_ids") or 0)
        file = f", and {named} is not read here" if named else ""
        notes.append(f"vocab_size is not given{file}; {rows} is assumed from {tokenizer}.")
        return rows
    raise flag_error(
        "vocab_size",
        None,
        f"it comes from {files}",
        "Add --vocab-size with the tokenizer's number of tokens (--set --vocab-size=N beside "
        "--from), or name its files here.",
    )


def is_assumed(values: Values, family: ModelFamily, version: str) -> bool:
    """Whether nothing here says the rows, and those of a published vocabulary stand for them."""
    stated = values.get("padded_vocab_size") or values.get("vocab_size")
    tokenizer = _tokenizer(values, family)
    return (
        not stated
        and tokenizer in _TOKENIZER_ROWS
        and vocabulary_rows(values, tokenizer, version) is None
    )


def _tokenizer(values: Values, family: ModelFamily) -> str:
    return str(values.get("tokenizer_type") or _DEFAULT_TOKENIZERS[family])


def vocabulary_rows(values: Values, tokenizer: str, version: str) -> tuple[int, str] | None:
    """Tokens before padding, and where the number is from.

    Args:
        values: Megatron's arguments by destination.
        tokenizer: ``--tokenizer-type``.

    Returns:
        ``None`` if no file is needed, named or on this host, or if a count needs the tokenizer's
        own program.

    Raises:
        UserInputError: for a file that is there and cannot be read.
    """
    # it cuts its file (a:CustomTikTokenizer; tiktoken_tokenizer.py)
    if tokenizer == "TikTokenizer":
        return values.get("vocab_size") or 1 << 17, "--vocab-size of TikTokenizer"
    is_new = release_number(version) >= (0, 17)  # without tokenizers of Megatron-LM's own
    is_bert = tokenizer.startswith("BertWordPiece") and not is_new
    name = "vocab_file" if is_bert or tokenizer == "GPT2BPETokenizer" else "tokenizer_model"
    path = expanded(Path(str(values.get(name) or "")), flag_of(name))
    if not values.get(name) or not path.exists():
        return None
    special = (values.get("special_tokens") or ()) if is_new else ()
    plain = ["GPTSentencePieceTokenizer", "Llama2Tokenizer", *(["SentencePieceTokenizer"] * is_new)]
    tokens: Collection[str] | None = None
    if tokenizer in _HUGGING_FACE:
        tokens = _hugging_face(path)
        if tokens is not None and tokenizer == "HuggingFaceTokenizer":
            tokens = {*tokens, *special}
    elif tokenizer == "GPT2BPETokenizer":
        tokens = {*_object(path), *special}
    elif is_bert:  # a:_BertWordPieceTokenizer
        lines = {line.strip() for line in read_text(path, "--vocab-file").splitlines()}
        extra = range(values.get("vocab_extra_ids") or 0)
        tokens = {*lines, "[BOS]", "[EOS]", *(f"<extra_id_{n}>" for n in extra)} - {""}
    elif tokenizer in plain and not special:
        legacy = is_new and values.get("tokenizer_sentencepiece_legacy")
        tokens = None if legacy else [*_pieces(path)]
    return None if tokens is None else (len(tokens), str(path))


def _hugging_face(path: Path) -> set[str] | None:
    """Tokens of a folder of transformers', or of its ``tokenizer.json``."""
    folder = path if path.is_dir() else path.parent
    file = folder / "tokenizer.json" if path.is_dir() else path
    if file.is_file() and file.suffix == ".json":
        whole = _object(file)
        vocab = whole["model"].get("vocab") if isinstance(whole.get("model"), dict) else None
        if not isinstance(vocab, dict | list):
            raise _file_error(file, "it has no model.vocab")
        names = set(_contents(whole.get("added_tokens")))
        # Unigram has pairs of a token and its score
        names.update(each if isinstance(each, str) else str(each[0]) for each in vocab)
    elif (folder / "vocab.json").is_file():
        names = set(_object(folder / "vocab.json"))
    elif (folder / "tokenizer.model").is_file():
        names = set(_pieces(folder / "tokenizer.model"))
    else:
        return None
    # files that add or name tokens, some of which may be in the vocabulary already
    if (folder / "added_tokens.json").is_file():
        names.update(_object(folder / "added_tokens.json"))
    for other in ("tokenizer_config.json", "special_tokens_map.json"):
        table = _object(folder / other) if (folder / other).is_file() else {}
        names.update(_contents([table.get(name) for name in _SPECIAL]))
        for name in _EXTRA:
            more = table.get(name)
            names.update(_contents(more.values() if isinstance(more, dict) else more))
    return names


def _contents(tokens: Any) -> Iterator[str]:
    for each in tokens or ():
        content = each.get("content") if isinstance(each, dict) else each
        if isinstance(content, str) and content:
            yield content


def _object(path: Path) -> dict[str, Any]:
    found = parse_json(read_text(path, str(path), most=_MOST_BYTES), str(path), limits=_LIMITS)
    if not isinstance(found, dict):
        raise _file_error(path, "it is no JSON object")
    return found


def _pieces(path: Path) -> Iterator[str]:
    """The pieces of a SentencePiece model: field 1 of its protobuf message, one after another."""
    if path.is_dir():
        raise _file_error(path, "it is a folder, and this tokenizer reads a SentencePiece model")
    content = read_bytes(path, str(path), most=_MOST_BYTES)
    if not content:
        raise _file_error(path, "it is empty")
    try:
        for number, value in _fields(content):
            if number == 1:
                yield dict(_fields(value)).get(1, b"").decode("utf-8", errors="replace")
    except IndexError as error:
        raise _file_error(path, "it is no SentencePiece model, or cut short") from error


def _fields(content: bytes) -> Iterator[tuple[int, bytes]]:
    """The fields of a protobuf message; of numbers, nothing but that they are there.

    Raises:
        IndexError: for another message, or one that is cut short.
    """
    at = 0
    while at < len(content):
        key, at = _varint(content, at)
        kind = key & 7
        size = {1: 8, 5: 4}.get(kind, 0)
        if kind in (0, 2):
            number, at = _varint(content, at)
            if kind:
                size = number
        if kind not in (0, 1, 2, 5) or at + size > len(content):
            raise IndexError
        yield key >> 3, content[at : at + size]
        at += size


def _varint(content: bytes, at: int) -> tuple[int, int]:
    value = 0
    for place in range(10):
        byte = content[at + place]
        value |= (byte & 127) << 7 * place
        if byte < 128:
            return value, at + place + 1
    raise IndexError


def _file_error(path: Path, limit: str) -> UserInputError:
    return UserInputError(
        "the tokenizer's file",
        str(path),
        limit,
        "Correct the tokenizer's flags, or give --padded-vocab-size.",
    )
