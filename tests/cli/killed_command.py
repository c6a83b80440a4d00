"""The command in a process that gets a signal as it reports a step: KILL is "STEP NUMBER", or "STEP NUMBER PROCESS" on
several hosts."""

import os
import sys

from comfy_tpu.cli.main import main
from comfy_tpu.cli.progress import Display

step, number, *process = map(int, os.environ["KILL"].split())
show = Display.__call__


def show_and_kill(display, progress):
    show(display, progress)
    if progress.stage == "denoising" and progress.preview is not None and progress.done == step:
        os.kill(os.getpid(), number)


if not process or sys.argv[sys.argv.index("--process-id") + 1] == str(process[0]):
    Display.__call__ = show_and_kill
sys.exit(main())
