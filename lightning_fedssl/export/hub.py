"""Upload of an exported model to Hugging Face's hub (the extra ``huggingface``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning_fedssl.storage.optional import optional


def push_to_hub(name: str, files: Sequence[Path]) -> None:
    """Uploads files of one folder in one commit.

    Args:
        name: The repository, such as ``you/your-model``. One that there is not is made, private:
            its owner decides who sees it.
        files: The files, as :func:`~lightning_fedssl.export.export` returns them.

    Raises:
        ValueError: If huggingface_hub is not installed, there is no login, or the hub or the way
            to it fails; the message says what to do and where the files are.
    """
    folder = files[0].parent
    try:
        api = optional("huggingface_hub").HfApi(token=True)  # of the user's login
        api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(
            repo_id=name, folder_path=folder, allow_patterns=[path.name for path in files]
        )
    except Exception as error:  # of the import, the login, the network, the hub, or the name
        raise ValueError(
            f"push_to_hub {name}: {error}. The files are in {folder}. It needs a login: hf "
            "auth login, or a token that may write in HF_TOKEN"
        ) from error
