"""What surrounds a text, written into a tokenizer.json: folders from elsewhere may leave it to their programs."""

import tokenizers
from etils import epath

from tfx_jax.data.files import write_file
from tfx_jax.data.folder_tokenizers import HFTokenizer


def write_template(folder: epath.PathLike, tokenizer: HFTokenizer, *, first: int | None, last: int) -> bool:
    """Has the tokenizer.json of a folder put special tokens around a text, unless it does.

    Args:
      folder: of the file; without one there is nothing to do, as the other kinds of tokenizers put them there always.
      tokenizer: what `load_folder_tokenizer` reads of the folder.
      first: the token before the first text, or None.
      last: the token behind each text.

    Returns:
      Whether the file was changed.
    """
    path, before = epath.Path(folder) / "tokenizer.json", [] if first is None else [first]
    if not path.exists() or tokenizer.encode_with_specials("a").ids == [*before, *tokenizer.encode("a"), last]:
        return False
    pipeline = tokenizers.Tokenizer.from_file(str(path))
    token = dict(zip([*before, last], tokenizer.pieces([*before, last]), strict=True))
    start = "".join(f"{token[index]} " for index in before)
    pipeline.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{start}$A {token[last]}",
        # Only models that have a token before the first text tell a second one by its type.
        pair=f"{start}$A {token[last]} $B:1 {token[last]}:1" if before else f"$A {token[last]} $B {token[last]}",
        special_tokens=[(text, index) for index, text in token.items()],
    )
    write_file(path, pipeline.to_str(pretty=True).encode())
    return True
