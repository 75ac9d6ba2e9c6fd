"""What a Hugging Face folder says about its tokenizer beside the vocabulary: special tokens, options, the family."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, TypeVar

from etils import epath

from tfx_jax.errors import UserError
from tfx_jax.files import parse_json, read_small_file

# Where a folder names no token for a role, a special token of such a name has it.
_USUAL_NAMES = {
    "pad": ("<pad>", "[PAD]"),
    "bos": ("<s>", "<|endoftext|>"),
    "eos": ("</s>", "<|endoftext|>"),
    "unk": ("<unk>", "[UNK]"),
    "mask": ("<mask>", "[MASK]"),
    "cls": ("[CLS]",),
    "sep": ("[SEP]",),
}

_ADDED_TOKEN_OPTIONS = ("single_word", "lstrip", "rstrip", "normalized", "special")

T = TypeVar("T")


class SpecialIds(NamedTuple):
    """The ids of special tokens; None where there is none."""

    pad_id: int | None = None
    bos_id: int | None = None
    eos_id: int | None = None
    unk_id: int | None = None
    mask_id: int | None = None
    cls_id: int | None = None
    sep_id: int | None = None


class TokenizerConfig:
    """The JSON files beside a vocabulary; each may be missing.

    Attributes:
      folder: where they are.
      options: what tokenizer_config.json holds.
      names: of special tokens, by role ("pad", "bos", "eos", "unk", "mask", "cls", "sep").
      special: names of all special tokens, also of those without a role.
      added: tokens that are not in the vocabulary's own file, or are more than words there, by id; options such as
        "lstrip", "normalized" and "special" for each, and its name as "content".
    """

    def __init__(self, folder: epath.Path):
        """Reads them.

        Raises:
          UserError: if one is damaged.
        """
        self.folder = folder
        self.options = self._read("tokenizer_config.json")
        self._configs = [self._read("config.json"), self._read("generation_config.json")]
        named = {**self._read("special_tokens_map.json"), **{k: v for k, v in self.options.items() if v is not None}}
        self.names = {role: self._name(named[f"{role}_token"]) for role in _USUAL_NAMES if named.get(f"{role}_token")}
        others = named.get("additional_special_tokens") or named.get("extra_special_tokens") or []
        if not isinstance(others, list | dict):
            raise UserError(f"{folder}: the additional special tokens are {others!r}, not a list or an object of them")
        self.added = self._added()
        self.special = {
            *self.names.values(),
            *(self._name(token) for token in (others.values() if isinstance(others, dict) else others)),
            *(token["content"] for token in self.added.values() if token.get("special")),
        }
        for token in self.added.values():
            token["special"] = token["content"] in self.special
            token.setdefault("normalized", not token["special"])

    @property
    def family(self) -> str | None:
        """The model that the tokenizer belongs to, such as "gpt2" or "bert"; None if no file says it."""
        config = self._configs[0]
        name = str(self.options.get("tokenizer_class") or config.get("tokenizer_class") or "").lower()
        family = name.removesuffix("fast").removesuffix("tokenizer")
        if family in ("", "pretrained", "tokenizersbackend"):  # any tokenizer.json
            family = str(config.get("model_type") or "").lower().replace("-", "")
        return family or None

    def require_family(self, file: str, *families: str) -> None:
        """Refuses a file of a family whose tokenizer does more than the file says."""
        if self.family not in (None, *families):
            raise UserError(
                f"{self.folder / file} belongs to a tokenizer of {self.family}, which is read from tokenizer.json only"
            )

    def option(self, name: str, default: T) -> T:
        """A field of tokenizer_config.json, which has the type of `default`; that, if it does not say or says null."""
        value = self.options.get(name)
        if value is None:
            return default
        if type(value) is not type(default):
            raise UserError(
                f"{self.folder / 'tokenizer_config.json'}: {name} is {value!r}, not a {type(default).__name__}"
            )
        return value

    def name_by_default(self, **names: str) -> None:
        """Names tokens that have a role in a family, for the roles ("pad", ...) to which no file gives a name."""
        self.names = {**names, **self.names}
        self.special |= set(self.names.values())

    def special_ids(self, vocabulary: Mapping[str, int], special: Collection[str]) -> SpecialIds:
        """Which ids have a role: by the token's name, by the id in config.json, or by one of the usual names.

        Args:
          vocabulary: of all tokens.
          special: those that may be found by a usual name.
        """
        ids = set(vocabulary.values())

        def find(role: str) -> int | None:
            if role in self.names:
                return vocabulary.get(self.names[role])
            for config in self._configs:
                found = config.get(f"{role}_token_id")
                found = found[0] if isinstance(found, list) and found else found
                if type(found) is int and found in ids:
                    return found
            return next(
                (vocabulary[name] for name in _USUAL_NAMES[role] if name in special and name in vocabulary), None
            )

        return SpecialIds(**{f"{role}_id": find(role) for role in _USUAL_NAMES})

    def _added(self) -> dict[int, dict[str, Any]]:
        tokens = self.options.get("added_tokens_decoder")
        file = "added_tokens.json" if tokens is None else "tokenizer_config.json"
        if tokens is None:
            tokens = {index: {"content": name} for name, index in self._read(file).items()}
        found = {}
        try:
            for index, token in tokens.items():
                options = {name: token[name] for name in _ADDED_TOKEN_OPTIONS if name in token}
                if not all(type(value) is bool for value in options.values()):
                    raise ValueError
                found[int(index)] = {"content": self._name(token), **options}
        except (TypeError, ValueError, AttributeError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{self.folder / file} is damaged: its added tokens are no names with ids") from None
        return found

    def _name(self, token: Any) -> str:
        name = token.get("content") if isinstance(token, dict) else token
        if not isinstance(name, str) or not name:
            raise UserError(f"{self.folder}: the special token {token!r} has no name")
        return name

    def _read(self, name: str) -> dict[str, Any]:
        return read_json(self.folder / name) if (self.folder / name).exists() else {}


def read_json(path: epath.Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
      UserError: if there is none.
    """
    values = read(path, parse_json)
    if not isinstance(values, dict):
        raise UserError(f"{path} holds a {type(values).__name__}, not an object")
    return values


def read(path: epath.Path, parse: Callable[[bytes], T]) -> T:
    """Reads a file.

    Raises:
      UserError: if that cannot be done, or `parse` fails in any way.
    """
    try:
        return parse(read_small_file(path))
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except BaseException as error:
        # What is written in Rust also fails with exceptions that are no `Exception`.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path} is damaged ({reason}): fetch it again") from None
