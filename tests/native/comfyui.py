"""A real ComfyUI in this process, set up as its own main.py does with --cpu. Nothing of it is imported before."""

import functools
import importlib
import importlib.machinery
import importlib.util
import sys
import types
from pathlib import Path

from tests.comfyui.checkout import NoComfyUIError, find_path


class QuietServer:
    """What nodes need of ComfyUI's server: it hears everything, and tells nobody."""

    client_id = None
    last_node_id = None
    last_prompt_id = None

    def __init__(self) -> None:
        self.routes = types.SimpleNamespace(get=lambda path: lambda handler: handler)
        self.loop = types.SimpleNamespace(call_soon_threadsafe=lambda *call: None, call_later=lambda *call: None)

    def send_sync(self, event, data, sid=None) -> None:
        pass

    def send_progress_text(self, text, node_id, sid=None) -> None:
        pass


def _without_sound() -> None:
    """ComfyUI 0.33 needs torchaudio, whose releases lag behind torch's. No model here has sound."""
    if importlib.util.find_spec("torchaudio") is None:
        for name in ("torchaudio", "torchaudio.functional", "torchaudio.transforms"):
            module = types.ModuleType(name)
            module.__spec__ = importlib.machinery.ModuleSpec(name, None)
            sys.modules[name] = module
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], child, module)


@functools.cache
def start_comfyui(base_directory: Path) -> Path:
    """Where it is, once it can be imported. `base_directory` holds its models, input and output."""
    path = find_path()
    _without_sound()
    # First, as when main.py is run: it has packages with names like `utils`. Ours are imported by then.
    sys.path.insert(0, str(path))
    try:
        importlib.import_module("utils")  # before comfy/ itself gets on the path, which has a utils.py
        importlib.import_module("comfy.options").enable_args_parsing(False)
        args = importlib.import_module("comfy.cli_args").args
        args.cpu = True
        args.base_directory = str(base_directory)
        server = importlib.import_module("server")
        importlib.import_module("nodes")
    except ImportError as error:
        raise NoComfyUIError(f"{sys.executable} cannot import ComfyUI in {path}: {error}") from error
    server.PromptServer.instance = QuietServer()
    importlib.import_module("comfy.utils").set_progress_bar_enabled(False)
    # Layers this small cost more to share than to compute: SDXL took 10 s of two busy cores, and takes 0.2 s.
    importlib.import_module("torch").set_num_threads(1)
    return path
