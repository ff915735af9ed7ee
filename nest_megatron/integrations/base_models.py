"""Rows of the vocabularies of models on the Hugging Face hub, and of tokenizers that are here.

A recipe that fine-tunes names the model that it starts from, or its tokenizer, and no number.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

from nest_megatron.catalogue_files import catalogue_names, catalogue_root

Built = TypeVar("Built")

#: Longest wait for a tokenizer whose files are not here: without a network, retries take minutes.
FETCH_S = 20.0
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


def known_rows(name: str) -> int | None:
    """Rows of a model's vocabulary, where the catalogue or the table above has it.

    >>> known_rows("meta-llama/Meta-Llama-3-8B"), known_rows("mine/model")
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


def is_here(name: str) -> bool:
    """Whether files of a tokenizer lie in a folder of this name, or in the cache of the hub."""
    if Path(name).exists():
        return True
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return False
    return any(isinstance(try_to_load_from_cache(name, file), str) for file in _FILES)


def build_within(build: Callable[[], Built], seconds: float = FETCH_S) -> Built:
    """Build what may come over a network.

    Raises:
        TimeoutError: if it takes longer; the thread that waits ends with the process.
    """
    found: list[Built] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            found.append(build())
        except Exception as error:  # noqa: BLE001 - raised again below
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if failed:
        raise failed[0]
    if not found:
        raise TimeoutError(f"not within {seconds:g} s")
    return found[0]


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Keep the Hugging Face libraries from asking the hub about files that are here."""
    with _SWITCHING, contextlib.ExitStack() as stack:
        for module, name in _OFFLINE:
            with contextlib.suppress(ImportError):
                owner: Any = importlib.import_module(module)
                if hasattr(owner, name):
                    stack.enter_context(mock.patch.object(owner, name, True))
        yield
