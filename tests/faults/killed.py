"""A command in a process that kills itself at a point: killed.py LIBRARY DIRECTORY KIND NUMBER ARGUMENT…"""

import signal
import sys
from pathlib import Path

from comfy_tpu.cli.main import main
from tests.faults.injection import SystemPoints

library, directory, kind, number, *arguments = sys.argv[1:]
points = SystemPoints(Path(library))
points.watch(Path(directory))
with points.failing(kind, int(number), -signal.SIGKILL, sticky=False):
    sys.exit(main(arguments))
