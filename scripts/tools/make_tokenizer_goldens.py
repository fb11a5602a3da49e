"""Write tokenizer_layouts.json and chat_templates.json: what transformers makes of small tokenizer directories.

    pip install torch==2.13.0 transformers==5.23.0
    python -m scripts.tools.make_tokenizer_goldens [--out tests/models]

scripts/tools/tokenizer_layouts.py describes the directories of tokenizer_layouts.json. For each directory the file has
the named special tokens, the ids of each text, the texts of these ids without and with special tokens, and the rendered
chat template: null without a template, or false if transformers refuses to choose one of several templates.

scripts/tools/chat_layouts.py describes the directories and chats of chat_templates.json, which has the rendered chats,
or false if transformers raises an error.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jinja2
import transformers  # pyrefly: ignore[missing-import]

from scripts.tools.chat_layouts import CHATS, TEMPLATES
from scripts.tools.tokenizer_layouts import LAYOUTS, QUESTION, TEXTS, Files, write

OUT = Path(__file__).resolve().parents[2] / "tests" / "models"


def golden(files: Files, directory: Path) -> dict[str, Any]:
    """Load a directory with transformers and return the expected values."""
    write(files, directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    ids = [tokenizer.encode(text) for text in TEXTS]
    return {
        "special_tokens": tokenizer.special_tokens_map,
        "ids": ids,
        "texts": [[tokenizer.decode(i, skip_special_tokens=skip) for skip in (True, False)] for i in ids],
        "rendered": rendered(tokenizer),
    }


def rendered(tokenizer: Any) -> str | bool | None:
    """Return the text of a chat, None without a template, or False if transformers chooses no template."""
    if tokenizer.chat_template is None:
        return None
    try:
        tokenizer.get_chat_template()
    except ValueError:
        return False
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], tokenize=False, add_generation_prompt=True
    )


def rendered_chats(files: Files, directory: Path) -> dict[str, str | bool]:
    """Load a directory with transformers. Return the text of each chat, or False if transformers raises an error."""
    write(files, directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    texts: dict[str, str | bool] = {}
    for name, chat in CHATS.items():
        arguments = {"add_generation_prompt": True, **chat}
        try:
            texts[name] = tokenizer.apply_chat_template(arguments.pop("messages"), tokenize=False, **arguments)
        except (ValueError, TypeError, jinja2.TemplateError):
            texts[name] = False
    return texts


def write_goldens(path: Path, layouts: Mapping[str, Files], values_of: Callable[[Files, Path], dict[str, Any]]) -> None:
    """Write a JSON object with one line per directory."""
    lines = []
    for name, files in layouts.items():
        with tempfile.TemporaryDirectory() as directory:
            values = json.dumps(values_of(files, Path(directory)), ensure_ascii=False, separators=(",", ":"))
        lines.append(f"{json.dumps(name)}:{values}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print(f"{path}: {len(lines)} directories, transformers {transformers.__version__}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=OUT, help="folder; default: tests/models")
    out = parser.parse_args().out
    transformers.logging.set_verbosity_error()
    write_goldens(out / "tokenizer_layouts.json", LAYOUTS, golden)
    write_goldens(out / "chat_templates.json", TEMPLATES, rendered_chats)


if __name__ == "__main__":
    main()
