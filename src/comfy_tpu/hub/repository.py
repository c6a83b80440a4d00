"""A repository of the hub: its files and their sizes, and the hub's errors as sentences."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from comfy_tpu.errors import CheckpointError, InvalidValueError
from comfy_tpu.hub.selection import RemoteFile


@dataclasses.dataclass(frozen=True)
class Repository:
    """The files of a model at one commit."""

    model: str
    commit: str
    files: tuple[RemoteFile, ...]

    def find(self, name: str) -> RemoteFile | None:
        return next((file for file in self.files if file.name == name), None)


def open_repository(model: str, revision: str | None = None) -> Repository:
    """Asks the hub for the files of a model. `revision`: a branch, a tag or a commit; None: main."""
    from huggingface_hub import HfApi

    with hub_errors(model, revision):
        found = HfApi().model_info(model, revision=revision, files_metadata=True)
    files = (_describe(each) for each in found.siblings or ())
    return Repository(model, str(found.sha), tuple(files))


def _describe(sibling: Any) -> RemoteFile:
    lfs = sibling.lfs
    # A dictionary in older versions of huggingface_hub.
    sha256 = None if lfs is None else lfs["sha256"] if isinstance(lfs, dict) else lfs.sha256
    return RemoteFile(sibling.rfilename, int(sibling.size or 0), sha256)


@contextlib.contextmanager
def hub_errors(model: str, revision: str | None = None) -> Iterator[None]:
    """Turns what huggingface_hub raises into a sentence each. OSErrors of this machine's disk pass."""
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{model}"
    try:
        yield
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"model={model} is gated: its owner asks you to accept its licence first; do that at {page}, and log in "
            "with `hf auth login`, or set HF_TOKEN",
            field="model",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise InvalidValueError(
            f"revision={revision} does not exist in {model}; see {page}/tree/main for those that do", field="revision"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"model={model} is not on the hub, or is private; check the name, or log in with `hf auth login`, or set "
            "HF_TOKEN",
            field="model",
        ) from error
    except errors.HFValidationError as error:
        raise InvalidValueError(
            f'model={model} is no hub id; give one such as "owner/name" ({_first_line(error)})', field="model"
        ) from error
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError) as error:
        raise CheckpointError(
            f"model={model} cannot be downloaded offline; unset HF_HUB_OFFLINE, or copy the model from another machine",
            field="model",
        ) from error
    except errors.HfHubHTTPError as error:
        raise CheckpointError(
            f"model={model}: {constants.ENDPOINT} refused ({_first_line(error)}); try again later", field="model"
        ) from error
    except Exception as error:
        if not _is_network_error(error):
            raise
        raise CheckpointError(
            f"model={model}: {constants.ENDPOINT} cannot be reached ({_first_line(error)}); check the network, and "
            "start again: what is there stays",
            field="model",
        ) from error


def _is_network_error(error: Exception) -> bool:
    """By the package: requests in older versions of huggingface_hub, httpx in newer ones."""
    return isinstance(error, (ConnectionError, TimeoutError)) or any(
        each.__module__.split(".")[0] in ("requests", "httpx", "httpx2", "httpcore", "urllib3")
        for each in type(error).__mro__
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
