"""Names of models as people write them, brought to one spelling."""

from __future__ import annotations

import re

from nest_megatron.plain import frozen
from nest_megatron.validation.rows import RefusedRowError

HYBRID = "hybrid of Mamba and attention layers"
NOT_PUBLIC = "architecture not public here"

#: Words around a model's name that say nothing of its shape.
NOISE = frozenset(
    re.findall(
        r"\w+",
        "a100 b200 b300 base benchmark bf16 chat dev dropless finetune finetuning fp16 fp8"
        " gb200 gb300 h100 h200 hf inferred instruct it jax lm lora math maxtext meta mi300x model"
        " mxfp8 nvfp4 nvidia paxml peft perf pretrain pretraining proxy scaling sft strong"
        " thinking tokendrop training weak",
    )
)

_REFUSED = {
    r"jamba|zamba|falcon[-_ ]?h1|^(?!.*(nemotron|mamba)).*hybrid": HYBRID,
    r"nemotron[-_ ]?h(?![a-z])(?![-_ ]?(4|8|47|56)b)|mamba.?2?.?hybrid(?!.?8b)": HYBRID,
    r"nemotron[-_ ]?v?[356].*(lightning|nano[-_ ]?4b)": NOT_PUBLIC,
    r"^(?!.*(hybrid|nemotron)).*mamba|hyena|evo.?2|rwkv": "no attention layers",
    r"ultra[-_ ]?253b|super[-_ ]?49b": "layers of different shapes",
    r"zebra|(?<![a-z])(gdn|kda)(?![a-z])|gated.?delta": "linear attention",
    r"kimi[-_ ]?linear|minimax[-_ ](01|m1|text)": "linear attention",
    r"deepseek[-_ ]?v?3[._]2|deepseek[-_ ]?v?4|glm[-_ ]?5": "sparse attention",
    r"gemma[-_ ]?(4|3n)": "layers of different shapes",
    r"kimi[-_ ]?k(2[._]\d|[3-9])": NOT_PUBLIC,
    r"qwen[-_ ]?[4-9]": NOT_PUBLIC,
    r"(?<![a-z])(vlm?|llava|omni|vision|clip|vit)(?![a-z])": "more than a language model",
    r"(?<![a-z])(flux|wan|sdxl|dlrm|retinanet|resnet|unet|rgat|cosmos)": "not a language model",
    r"stable.?diffusion|(?<![a-z])dit(?![a-z])": "not a language model",
    r"(?<![a-z])m?t5(?![a-z])": "encoder and decoder",
    r"embedding|reranker": "encoder without a language-model head",
    r"^llama[-_ ]?4[-_ ]*$": "number of experts not stated",
}

#: What a key looks like, and the key that it stands for.
_ALIASES = {
    r"0p(\d)b": r"\g<1>00m",
    r"dsv(\d)(.*)": r"deepseekv\1\2",
    r"deepseekr1distillqwen(1p5b|7b|14b|32b)": r"qwen25\1",
    r"deepseekr1distillllama(8b|70b)": r"llama31\1",
    r"deepseek(?:v31(?:terminus)?|v30324|r10528)": "deepseekv3",
    r"deepseekv316b": "deepseekv2lite",
    r"deepseekr1(.*)": r"deepseekv3\1",
    r"gpt3?|nemomegatron|megatron": "gpt3175b",
    r"gpt(\d+(?:p\d+)?[mbt])": r"gpt3\1",
    r"nemotronv?3nano(?:30b)?(?:a3b)?": "nemotron3nano",
    r"nemotronv?3super(?:120b)?(?:a12b)?": "nemotron3super",
    r"nemotronnano(?:v2)?(9b|12b)(?:v2)?": r"nemotronnano\1v2",
    r"nemotronv?3ultra(?:550b)?(?:a55b)?": "nemotron3ultra",
    r"(?:nvidia)?mamba2?hybrid8b": "mamba2hybrid8b",
    r"nemotron(?:34b)?": "nemotron34b",
    r"nemotron(4b|8b|22b)": r"nemotron3\1",
    r"nemotron(15b|340b)": r"nemotron4\1",
    r"qwq32b": "qwen2532b",
    r"qwen25coder(1p5b|3b|7b|14b|32b)": r"qwen25\1",
    r"(qwen3.*?)2507": r"\1",
    r"qwen3[68](27b|35b|35ba3b)": r"qwen35\1",
    r"qwen3coder30ba3b": "qwen330ba3b",
    r"qwen2(500m|1p5b|7b|72b)": r"qwen25\1",
    r"kimi1t": "kimik2",
    r"(?:megatron)?turing(?:nlg)?530b|mtnlg530b": "megatron530b",
    r"codegemma(.*)": r"gemma\1",
    r"mixtral": "mixtral8x7b",
    r"mistralnemo": "mistralnemo12b",
    r"mistrallarge2?(?:123b)?": "mistralnemo123b",
    r"llama31nemotron(?:nano)?(8b|70b)": r"llama31\1",
    r"mistralsmall(?:3|31|32)?(?:24b)?": "mistralsmall24b",
    r"chatglm": "chatglm26b",
    r"glm46": "glm45",
    r"internlm25(7b|20b)": r"internlm2\1",
    r"olmo2(?:1124|0325)?(7b|13b|32b)": r"olmo2\1",
    r"olmoe(?:1b7b|7b)?(?:0924|0125)?": "olmoe7ba1b",
    r"phi4(?:14b)?": "phi414b",
    r"llama3405b": "llama31405b",
    r"llama3370b": "llama3170b",
    r"llama(7b|13b)": r"llama2\1",
    r"llama(?:30b|32p5b)": "llama33b",
    r"llama4(?:scout|experts16|17b16e).*": "llama4scout",
    r"llama4(?:maverick|experts128|17b128e).*": "llama4maverick",
    r"grok1?(?:314b)?": "grok1314b",
    r"bert": "bertlarge",
    r"bertlarge(?:un)?cased": "bertlarge",
    r"bloom": "bloom176b",
    r"palm": "palm540b",
    r"lamda": "lamda137b",
    r"gopher": "gopher280b",
    r"chinchilla70b": "chinchilla",
    r"starcoder": "starcoder15b",
    r"phi3(?:mini)?(?:3p8b|4k|128k)*": "phi3mini",
}
#: What some of them assume.
_ASSUMED = {
    r"deepseekv316b": "the DeepSeek-V3 of 16B has the shape of V2-Lite",
    r"gpt3?|nemomegatron|megatron": "a GPT-3 of no stated size is the 175B",
    r"mixtral": "Mixtral of no stated size is 8x7B",
    r"bert": "BERT of no stated size is BERT-Large",
}

_CUTS = (r"proxy[-_ ]?(\d+)\s*l\b", r"truncated to (\d+) layers", r"\(?(\d+) layers kept\)?")
#: Layers and experts that a truncated model keeps, as in ``8L 8E``.
_KEPT = re.compile(r"(?<![a-z0-9])(\d+)l (\d+)e(?![a-z0-9])")
_NO_MTP = r"(?:w/o|without|no)[ _-]*mtp"
_SIZE = re.compile(r"(\d+)(?:p(\d+))?([mbt])")
_BILLIONS = {"m": 1e-3, "b": 1.0, "t": 1e3}


@frozen
class ModelName:
    """What a name says.

    Args:
        words: the words that name the model, lower case, decimals of a size as in ``1p5b``.
        num_layers, num_experts: what a truncated model keeps, if it says so.
        mtp: with or without multi-token prediction, if it says so.
    """

    words: tuple[str, ...]
    num_layers: int | None
    num_experts: int | None
    mtp: bool | None

    @property
    def key(self) -> str:
        """The words in one."""
        return "".join(self.words)


def read_name(text: str) -> ModelName:
    """What a model's name says, freed of releases, tasks, devices and vendors.

    >>> read_name("Llama 3.1 405b 24.09 proxy-21L").key
    'llama31405b'
    >>> read_name("Qwen2.5-1.5B").key
    'qwen251p5b'
    """
    rest = text.lower().strip()
    num_layers, num_experts, rest = _cut(rest)
    mtp = False if re.search(_NO_MTP, rest) else True if "mtp" in rest else None
    rest = re.sub(rf"{_NO_MTP}|\+?\s*mtp|\([^)]*\)|\[[^\]]*\]", " ", rest)
    rest = re.sub(r"\bv?2\d\.\d\d(\.\d+)*\b|^[\w.-]+/", " ", rest)
    rest = re.sub(r"(\d)\.(\d+)(?=[mbt](?![a-z0-9]))", r"\1p\2", rest)
    words = [word for word in re.split(r"[^a-z0-9]+", rest) if word and word not in NOISE]
    return ModelName(words=tuple(words), num_layers=num_layers, num_experts=num_experts, mtp=mtp)


def _cut(text: str) -> tuple[int | None, int | None, str]:
    if kept := _KEPT.search(text):
        return int(kept[1]), int(kept[2]), text.replace(kept[0], " ")
    for pattern in _CUTS:
        found = re.search(pattern, text)
        if found:
            return int(found[1]), None, text.replace(found[0], " ")
    return None, None, text


def refuse_by_name(text: str) -> None:
    """Refuse what the spec of a transformer cannot describe, whatever its size."""
    for pattern, reason in _REFUSED.items():
        if re.search(pattern, text.lower().strip()):
            raise RefusedRowError(reason, text)


def candidates(name: ModelName) -> tuple[tuple[str, str], ...]:
    """Keys under which a model may be known, best first, each with what it assumes."""
    keys = [(name.key, "")]
    for pattern, stands_for in _ALIASES.items():
        key, note = keys[-1]
        if re.fullmatch(pattern, key):
            note = _ASSUMED.get(pattern, note)
            keys.append((re.sub(f"^(?:{pattern})$", stands_for, key), note))
        elif pattern.startswith("0p") and re.search(pattern, key):
            keys.append((re.sub(pattern, stands_for, key), note))
    return tuple(keys)


def size_in_billions(word: str) -> float | None:
    """Number of parameters that a word such as ``1p5b`` states, in billions.

    >>> size_in_billions("1p5b"), size_in_billions("126m"), size_in_billions("v3")
    (1.5, 0.126, None)
    """
    found = _SIZE.fullmatch(word)
    if not found:
        return None
    return float(f"{found[1]}.{found[2] or 0}") * _BILLIONS[found[3]]


def key_of(name: str) -> str:
    """The key of a catalogue entry's name."""
    return re.sub(r"[^a-z0-9]", "", name.lower())
