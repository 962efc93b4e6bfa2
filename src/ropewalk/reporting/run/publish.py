"""Upload a finished run's model, or another exported model, to the Hugging Face Hub."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropewalk.errors import RopewalkError, RunFailure, first_line, http_errors
from ropewalk.io.files import refuse_adapter
from ropewalk.io.progress import Reporter
from ropewalk.io.results import Result
from ropewalk.models.checkpoint.card import CARD, is_own_card
from ropewalk.models.checkpoint.weights import weight_files
from ropewalk.training.checkpoint.files import EXPORT_RECORD, check_export
from ropewalk.training.folder import MODEL, RECIPE, SUMMARY

if TYPE_CHECKING:
    from huggingface_hub import HfApi

MOST_IN_NAME = 96
_WORD = r"[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9_])?"
_NAME = re.compile(rf"(?!.*(?:--|\.\.|\.git\Z)){_WORD}/{_WORD}", re.ASCII)
"""Names that the Hub accepts."""


@dataclass(frozen=True)
class PushResult(Result):
    """An uploaded model.

    Attributes:
        folder: folder of the model.
        repository: name of its repository on the Hub.
        url: address of the repository.
        private: whether only its owner can see it.
        files: names of the uploaded files.
        bytes: their size.
        notes: what was left out, one sentence each.
    """

    folder: Path
    repository: str
    url: str
    private: bool
    files: tuple[str, ...]
    bytes: int
    notes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Repository:
    """A repository on the Hub that may be written to.

    Attributes:
        name: ``owner/name``.
        private: whether only its owner can see it, or will.
        exists: whether it exists already.
        api: client of the Hub.
    """

    name: str
    private: bool
    exists: bool
    api: HfApi


def writable_repository(name: str, public: bool = False) -> Repository:
    """Check, before any work, that a model can be uploaded under a name; nothing is created.

    Args:
        name: ``owner/name``.
        public: whether everybody may see the model.

    Raises:
        RopewalkError: if the name is not valid, there is no token, the token may not write to the owner's
            repositories, or the repository exists and ``public`` is not what it is.
        RunFailure: if the Hub cannot be reached.
    """
    from huggingface_hub import HfApi, get_token

    if not _NAME.fullmatch(name) or len(name) > MOST_IN_NAME:
        raise RopewalkError(
            f"--push {name!r} is not the name of a repository; write OWNER/NAME with letters, digits, underscores, "
            f"hyphens and dots (no two hyphens or dots in a row), at most {MOST_IN_NAME} characters"
        )
    if get_token() is None:
        raise RopewalkError(
            f"--push {name} needs a Hugging Face token, and there is none; either run `hf auth login`, or set HF_TOKEN"
        )
    api = HfApi(library_name="ropewalk")
    with _hub(f"cannot query the Hugging Face Hub about {name}"):
        known = api.whoami()
        _check_rights(known, name)
        exists = api.repo_exists(name)
        private = bool(api.repo_info(name).private) if exists else not public
    if exists and not private and not public:
        raise RopewalkError(
            f"the repository {name} exists and is public; either add --public, or give another name"
        )
    if exists and private and public:
        raise RopewalkError(
            f"the repository {name} exists and is private; either leave out --public, or first make the repository "
            "public on the Hugging Face Hub"
        )
    return Repository(name, private, exists, api)


def folder_to_push(model: str) -> Path:
    """The folder of the model that a run has exported, or that is an exported model itself.

    Raises:
        RopewalkError: if there is no such folder, the run is not finished, or a file of the model is damaged.
    """
    path = Path(model).expanduser()
    if not path.is_dir():
        raise RopewalkError(
            f"there is no folder {model}; with --push, name the folder of a finished run or of an exported model"
        )
    # A run keeps its recipe beside the model, so the folder is a run's and not a model's.
    if (path / RECIPE).is_file():
        if not (path / SUMMARY).is_file():
            raise RopewalkError(
                f"the run in {path} is not finished; finish it with: ropewalk extend {path / RECIPE} --resume"
            )
        path = path / MODEL
    refuse_adapter(path)
    if not (path / "config.json").is_file() or not weight_files(path):
        raise RopewalkError(
            f"{path} is not the folder of a model, because it lacks config.json or weights in safetensors; "
            "name the folder of a finished run or of an exported model"
        )
    wrong = check_export(path) if (path / EXPORT_RECORD).is_file() else None
    if wrong is not None:
        raise RopewalkError(
            f"the model in {path} is damaged ({wrong}); export the model again (for the model of a run, with --resume)"
        )
    # For its error alone: a link is refused before the upload.
    _files(path)
    return path


def push(folder: Path, repository: Repository, reporter: Reporter) -> PushResult:
    """Upload a model's folder as one commit: all of its files or none.

    A model card in the repository that somebody wrote or edited there is kept, unless the folder's card was written by
    somebody as well.

    Args:
        folder: result of :func:`folder_to_push`.
        repository: result of :func:`writable_repository`.
        reporter: shows which file is being uploaded.

    Raises:
        RunFailure: if the Hub cannot be reached or refuses the upload.
    """
    from huggingface_hub import CommitOperationAdd

    api, name = repository.api, repository.name
    files, left = _files(folder)
    notes = [f"{each} is a folder and was not uploaded" for each in left]
    with _hub(f"cannot upload to {name}"):
        if not repository.exists:
            # exist_ok, because somebody may have created it since it was checked.
            api.create_repo(name, private=repository.private, exist_ok=True)
        # Our card can be written again at any time; what somebody wrote on the Hub cannot.
        if repository.exists and is_own_card(folder / CARD) and _has_other_card(repository):
            files = [path for path in files if path.name != CARD]
            notes.append(f"the {CARD} in {name} was written there and was kept")
        added = [CommitOperationAdd(path.name, str(path)) for path in files]
        with reporter.bar(f"upload to {name}", len(added)) as advance:
            for done, each in enumerate(added):
                advance(done, each.path_in_repo)
                # File by file for the progress bar; nothing is visible in the repository before the commit.
                api.preupload_lfs_files(name, [each])
            api.create_commit(name, added, commit_message=f"Upload {folder.name} with ropewalk")
            advance(len(added), "committed")
    return PushResult(
        folder,
        name,
        f"{api.endpoint}/{name}",
        repository.private,
        tuple(path.name for path in files),
        sum(path.stat().st_size for path in files),
        tuple(notes),
    )


def _files(folder: Path) -> tuple[list[Path], list[str]]:
    """Files of a model to upload, and the names of folders that are not.

    Raises:
        RopewalkError: for a link, which may lead to something outside the folder.
    """
    # Hidden entries, such as .cache of huggingface_hub, do not belong to the model.
    entries = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    for path in entries:
        if path.is_symlink():
            raise RopewalkError(f"{path} is a link; replace it with the file itself, or remove it")
    return [path for path in entries if path.is_file()], [path.name for path in entries if path.is_dir()]


def _check_rights(known: dict[str, Any], name: str) -> None:
    """Raise if a token's owner may not write to a repository, as far as the Hub says."""
    owner = name.partition("/")[0]
    own = [str(known["name"]), *(str(each["name"]) for each in known.get("orgs") or ())]
    if owner.lower() not in [each.lower() for each in own]:
        raise RopewalkError(
            f"--push {name}: your Hugging Face token belongs to {own[0]}, who cannot upload to {owner}; before the "
            f"slash, write one of: {', '.join(own)}"
        )
    token = (known.get("auth") or {}).get("accessToken") or {}
    # Other roles may still lack the right to write to this repository, which only the upload shows.
    if token.get("role") == "read":
        raise RopewalkError(
            f"--push {name}: your Hugging Face token can only read; create a token that can write, and run `hf auth "
            "login`"
        )


def _has_other_card(repository: Repository) -> bool:
    """Whether the repository has a card that this program did not write."""
    api, name = repository.api, repository.name
    if not api.file_exists(name, CARD):
        return False
    with tempfile.TemporaryDirectory(prefix="ropewalk-") as folder:
        return not is_own_card(Path(api.hf_hub_download(name, CARD, local_dir=folder)))


@contextmanager
def _hub(what: str) -> Iterator[None]:
    """Turn errors of the Hub's client into one sentence."""
    failures: tuple[type[Exception], ...] = (OSError, *http_errors())
    try:
        yield
    except failures as error:
        raise RunFailure(f"{what}: {first_line(error)}") from error
