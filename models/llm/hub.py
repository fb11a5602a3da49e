"""Folders of models: local folders, and repositories of the Hugging Face Hub in its local cache."""

from __future__ import annotations

import os
import re
from pathlib import Path

FILES = ("*.json", "*.jinja", "*.safetensors")
"""Files that are downloaded: configuration, weights, tokenizer and chat templates."""

IGNORED = ("*/*.safetensors", "consolidated*.safetensors")
"""Copies of weights in other formats, which some repositories have."""

TOKENIZER_FILES = ("*.json", "*.jinja")
"""Files that are downloaded for a tokenizer."""

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def model_folder(name: str | os.PathLike[str], revision: str | None = None, files: tuple[str, ...] = FILES) -> Path:
    """Return the folder of a model: a local folder, or a snapshot of a repository of the Hugging Face Hub.

    `huggingface_hub` downloads the files that its cache does not have. It reads HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE
    and HF_TOKEN.

    Args:
      name: path of a folder, or id of a repository, such as "Qwen/Qwen3-8B". An existing folder takes precedence.
      revision: branch, tag or commit of the repository; None for the main branch.
      files: patterns of the files that are downloaded.

    Raises:
      ValueError: there is no such folder and `name` is not an id of a repository; a local folder with a revision; or
        the repository cannot be downloaded and is not in the cache.
    """
    path = Path(name).expanduser()
    if os.fspath(name) and path.is_dir():
        if revision is not None:
            raise ValueError(f"revision: expected None for the local folder {path}, got {revision!r}")
        return path
    if not isinstance(name, str) or not _HUB_ID.fullmatch(name) or name.startswith("."):
        raise ValueError(f"model: expected a folder or the id of a repository of the Hugging Face Hub, got {name!r}")
    import huggingface_hub  # takes a third of a second, and local folders do not need it
    from huggingface_hub import errors

    where = name if revision is None else f"{name} at revision {revision}"
    try:
        folder = huggingface_hub.snapshot_download(
            name, revision=revision, allow_patterns=[*files], ignore_patterns=[*IGNORED]
        )
        return Path(folder)
    except errors.GatedRepoError as error:
        raise ValueError(f"model: access to {where} is restricted; set HF_TOKEN to the token of an account") from error
    except errors.RevisionNotFoundError as error:
        raise ValueError(f"model: the repository {name} has no revision {revision}") from error
    except errors.RepositoryNotFoundError as error:
        raise ValueError(
            f"model: {where} is neither a folder nor a public repository of the Hugging Face Hub"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise ValueError(
            f"model: {where} is neither a folder nor in the cache of the Hugging Face Hub, which cannot be reached"
        ) from error
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        raise ValueError(f"model: {where} cannot be downloaded: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
