"""Write tests/models/tokenizer_layouts.json: what Hugging Face transformers makes of small tokenizer directories.

    pip install torch==2.13.0 transformers==5.23.0
    python -m scripts.tools.make_tokenizer_goldens [--out tests/models/tokenizer_layouts.json]

scripts/tools/tokenizer_layouts.py describes the directories. For each directory the file has the named special tokens,
the ids of each text, the texts of these ids without and with special tokens, and the rendered chat template: null
without a template, or false if transformers refuses to choose one of several templates.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import transformers  # pyrefly: ignore[missing-import]

from pallas_attn.models.cli.output_files import output_file
from scripts.tools.tokenizer_layouts import LAYOUTS, QUESTION, TEXTS, Files, write

OUT = Path(__file__).resolve().parents[2] / "tests" / "models" / "tokenizer_layouts.json"


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=OUT, help="default: tests/models/tokenizer_layouts.json")
    out = parser.parse_args().out
    transformers.logging.set_verbosity_error()
    lines = []
    for name, files in LAYOUTS.items():
        with tempfile.TemporaryDirectory() as directory:
            values = json.dumps(golden(files, Path(directory)), ensure_ascii=False, separators=(",", ":"))
        lines.append(f"{json.dumps(name)}:{values}")
    with output_file(out) as file:
        file.write(("{\n" + ",\n".join(lines) + "\n}\n").encode())
    print(f"{out}: {len(lines)} directories, transformers {transformers.__version__}")


if __name__ == "__main__":
    main()
