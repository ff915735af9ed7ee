"""What parameter-efficient fine-tuning trains beside frozen weights, in the words of its recipes.

Source: ``megatron.bridge.peft`` 0.3.1 and ``nemo.collections.llm.peft`` 2.7.3, which are alike.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from nest_megatron.errors import UserInputError
from nest_megatron.names import Name


class PeftScheme(Name):
    """How adapters change a product: added to it, or to its direction alone (DoRA).

    Canonical LoRA has adapters of their own for queries, keys, values, gate and up projection.
    """

    LORA = "lora"
    DORA = "dora"
    CANONICAL_LORA = "canonical_lora"


_JOINT = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
#: Module -> the projections in it that canonical LoRA adapts one by one.
PROJECTIONS = {
    "linear_qkv": ("linear_q", "linear_k", "linear_v"),
    "linear_fc1": ("linear_fc1_up", "linear_fc1_gate"),
}
_LATENT = (
    *("linear_q_proj", "linear_q_down_proj", "linear_q_up_proj"),
    *("linear_kv_down_proj", "linear_kv_up_proj"),
)
_OF_MIXERS = ("in_proj", "out_proj")
#: Grouped products of experts, whose adapters the experts of a rank share.
EXPERTS = ("mlp.experts.linear_fc1", "mlp.experts.linear_fc2")
#: Modules whose adapters are priced.
MODULES = (*_JOINT, *_LATENT, *_OF_MIXERS, "output_layer")


def _one_by_one(modules: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(one for name in modules for one in PROJECTIONS.get(name, (name,)))


_DEFAULTS = {
    PeftScheme.LORA: _JOINT,
    PeftScheme.DORA: _JOINT,
    PeftScheme.CANONICAL_LORA: _one_by_one(_JOINT),
}
_POSITIONS = ("pre", "post")


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """Low-rank adapters on linear modules of every layer; all other weights are frozen.

    Args:
        target_modules: names of modules, or patterns of whole names with ``*``; empty: the scheme's
            own default, attention and MLP.
        dim: the rank.
        dropout: share of what adapters see, or put out, that is dropped.
        dropout_position: ``pre`` (what they see) or ``post``.
        a2a_experimental: outputs of row-parallel adapters go to their ranks by an all-to-all, where
            the sequence is divided over the tensor ranks.

    Raises:
        UserInputError: for what is impossible or not priced, naming the field.
    """

    scheme: PeftScheme = PeftScheme.LORA
    target_modules: tuple[str, ...] = ()
    dim: int = 32
    dropout: float = 0.0
    dropout_position: str = "pre"
    a2a_experimental: bool = False

    def __post_init__(self) -> None:
        if not self.target_modules:
            object.__setattr__(self, "target_modules", _DEFAULTS[self.scheme])
        if type(self.dim) is not int or not 1 <= self.dim <= 1_000_000:
            raise _wrong("dim", self.dim, "it must be a whole number of at least 1")
        if not 0.0 <= self.dropout < 1.0:
            raise _wrong("dropout", self.dropout, "it must be at least 0 and below 1")
        if self.dropout_position not in _POSITIONS:
            limit = f"it must be one of {', '.join(_POSITIONS)}"
            raise _wrong("dropout_position", self.dropout_position, limit)
        if self.scheme is PeftScheme.DORA and self.dropout:
            limit = "with DoRA the frozen products run twice, which is not priced"
            raise _wrong("dropout", self.dropout, limit, "Set it to 0.")
        self._check_targets()

    def _check_targets(self) -> None:
        separate = self.scheme is PeftScheme.CANONICAL_LORA
        known = _one_by_one(MODULES) if separate else MODULES
        for target in self.target_modules:
            name = target.rpartition(".")[2]
            if "*" not in name and name not in known:
                limit = f"adapters of {self.scheme} are priced on {', '.join(known)}"
                raise _wrong("target_modules", target, limit, "Leave it out.")

        for names in PROJECTIONS.values() if separate else ():
            given = [t for t in self.target_modules if t.rpartition(".")[2] in names]
            if given and len({t.rpartition(".")[2] for t in given}) < len(names):
                limit = f"the frameworks run all of {', '.join(names)} or none"
                raise _wrong("target_modules", given[0], limit, "Name them all.")

    def adapts(self, path: str, num_layers: int) -> bool:
        """Whether a module has an adapter, in all decoder layers or in none.

        Args:
            path: of the module in a layer (``self_attention.linear_qkv``).

        Raises:
            UserInputError: for a pattern that holds in some layers alone.

        Source: ``ModuleMatcher.match``: a name is compared, a pattern against the whole name.
        """
        name = path.rpartition(".")[2]
        return any(t == name or _holds(t, path, num_layers) for t in self.target_modules)

    def require_experts(self, num_layers: int) -> None:
        """Refuse what cannot be in a model with experts: DoRA on their products."""
        for path in EXPERTS if self.scheme is PeftScheme.DORA else ():
            if self.adapts(path, num_layers):
                limit = f"DoRA takes the norm of one weight, and {path} has one for each expert"
                fix = "Name linear_qkv and linear_proj alone."
                raise _wrong("target_modules", " ".join(self.target_modules), limit, fix)

    def words(self) -> str:
        """In a few words for people.

        >>> Adapters(target_modules=("linear_qkv",), dim=16).words()
        'lora of rank 16 on linear_qkv'
        """
        return f"{self.scheme} of rank {self.dim} on {', '.join(self.target_modules)}"


def _holds(pattern: str, path: str, num_layers: int) -> bool:
    if "*" not in pattern and "." not in pattern:
        return False
    regex = re.compile(".*".join(map(re.escape, pattern.split("*"))))
    if path == "output_layer":
        return regex.fullmatch(path) is not None
    found = {bool(regex.fullmatch(f"decoder.layers.{i}.{path}")) for i in range(num_layers)}
    if len(found) > 1:
        limit = f"it adapts {path} in some layers alone, and layers are priced alike"
        raise _wrong("target_modules", pattern, limit, "Name modules of all layers.")
    return found == {True}


def _wrong(field: str, value: object, limit: str, fix: str = "Correct it.") -> UserInputError:
    return UserInputError(f"peft.{field}", value, limit, fix)
