"""A server whose workers are Ray actors: jobs shared, one cancelled, a worker killed, an end without strays."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.ray_processes import command_line, find_processes
from tests.serving.real_server import Server

pytest.importorskip("ray", reason="an extra that make test does not install: pip install 'comfy-tpu[ray]'")

pytestmark = pytest.mark.slow
